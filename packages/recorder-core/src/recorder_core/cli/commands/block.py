"""`recorder block`: refuse what is generated for runs from now on."""

from __future__ import annotations

import argparse

from recorder_core.cli.confirm import ask
from recorder_core.cli.engines import connected
from recorder_core.cli.exits import Exit
from recorder_core.cli.formats import counted
from recorder_core.cli.places import urls
from recorder_core.cli.streams import say


def run(args: argparse.Namespace) -> int:
    """Say what is there, ask, and refuse what comes. What is recorded stays."""
    with connected(args, urls(args.url)) as client:
        found = client.keys(args.prefix)
        in_flight = counted(sum(each.pending for each in found), "generation")
        where = f"under {args.prefix}" if args.prefix.parts else "everywhere"
        there = f"{counted(len(found), 'run')} there, {in_flight} in flight"
        ask(f"refuse all that is generated {where} from now on ({there})?", yes=args.yes)
        client.block(args.prefix)
    say(f"{args.prefix if args.prefix.parts else 'everything'} is blocked; {there}")
    return Exit.DONE
