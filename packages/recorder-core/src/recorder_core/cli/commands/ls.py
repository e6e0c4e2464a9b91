"""`recorder ls`: the runs that are there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from recorder_core.cli.exits import Exit
from recorder_core.cli.formats import counted, duration, pairs, size
from recorder_core.cli.places import places
from recorder_core.cli.progress import Arrivals, progress
from recorder_core.cli.sources import nothing, opened
from recorder_core.cli.streams import say
from recorder_core.cli.tables import Column, write_table
from recorder_core.protocol import KeyReply

_ROWS_ON_A_TERMINAL = 1_000

COLUMNS = (
    Column("key"),
    Column("records", right=True),
    Column("pending", "in flight", lambda count: counted(count) if count else "", True, True),
    Column("rewarded", right=True),
    Column("reward", right=True),
    Column("missing", people=pairs, optional=True),
    Column("bytes", "size", size, right=True),
    Column("age_s", "age", duration, right=True),
    Column("closed", optional=True),
)

_SORTS: dict[str, Callable[[KeyReply], Any]] = {
    "key": lambda reply: reply.key.order,
    "reward": lambda reply: reply.reward,
    "records": lambda reply: reply.records,
    "pending": lambda reply: reply.pending,
    "bytes": lambda reply: reply.bytes,
    "age": lambda reply: reply.age_s,
}


def run(args: argparse.Namespace) -> int:
    """List them."""
    where, arrivals = places(args), Arrivals()
    with opened(args, where, arrivals) as source, progress(arrivals, "reading"):
        found = source.keys(where.prefix)
        if not found:
            nothing(source, where.prefix)
    value = _SORTS[args.sort]
    known = [each for each in found if value(each) is not None]
    unknown = [each for each in found if value(each) is None]  # last, whatever the order
    ordered = sorted(known, key=value, reverse=args.reverse) + unknown
    limit = args.limit
    if limit is None and sys.stdout.isatty() and not args.json:
        limit = _ROWS_ON_A_TERMINAL
    rows = (each.model_dump(mode="json") for each in ordered[:limit])
    write_table(COLUMNS, rows, as_json=args.json)
    if args.limit is None and limit is not None and len(ordered) > limit:
        say(f"{counted(len(ordered) - limit, 'further run')}; --limit {len(ordered)} shows all")
    return Exit.DONE
