"""`recorder rm`: delete runs."""

from __future__ import annotations

import argparse

from recorder_core.cli.confirm import ask
from recorder_core.cli.engines import Engines, connected
from recorder_core.cli.exits import Exit
from recorder_core.cli.formats import counted
from recorder_core.cli.places import urls
from recorder_core.cli.sources import nothing
from recorder_core.cli.streams import say


def run(args: argparse.Namespace) -> int:
    """Say how many, ask, and delete them."""
    with connected(args, urls(args.url)) as client:
        found = client.keys(args.prefix)
        leased = sum(each.store.leased_records for each in client.stats().values())
        if not found and not leased:
            nothing(Engines(client), args.prefix)
        records = counted(sum(each.records for each in found), "record")
        drained = "; of what is drained and not acknowledged, what is there" if leased else ""
        where = f"under {args.prefix}" if args.prefix.parts else "everywhere"
        ask(f"delete {counted(len(found), 'run')}, {records} {where}{drained}?", yes=args.yes)
        deleted = client.delete(args.prefix)
        if not deleted:
            nothing(Engines(client), args.prefix)
    say(f"{counted(deleted, 'record')} deleted")
    return Exit.DONE
