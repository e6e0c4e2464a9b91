"""`recorder export`: trajectories for other programs. What is recorded stays where it is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from recorder_core.cli.arguments import FORMATS
from recorder_core.cli.exits import CommandError, Exit
from recorder_core.cli.formats import counted
from recorder_core.cli.places import places
from recorder_core.cli.progress import Arrivals, progress
from recorder_core.cli.sources import nothing, opened
from recorder_core.cli.streams import say
from recorder_core.cli.whole import check_free, whole_file
from recorder_core.cli.writers import WRITERS, Asked, Escaped, Sink, write_parquet
from recorder_core.runs import Run
from recorder_core.view.pieces import pieces_from

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".rec": "rec",
    ".html": "html",
}
_NOT_FOR_TERMINALS = ("rec", "html")


def run(args: argparse.Namespace) -> int:
    """Write them."""
    form, path = _format(args), args.output
    where, arrivals = places(args), Arrivals()
    if path is not None:
        check_free(path, force=args.force)  # before anything is read
    with opened(args, where, arrivals) as source, progress(arrivals, "reading"):
        runs = source.runs(where.prefix)
        first = next(runs, None)
        if first is None:
            nothing(source, where.prefix)
        pieces = source.pieces if args.tokenizer is None else pieces_from(args.tokenizer)
        count = _write(form, chain([first], runs), Asked(args, pieces))
    if path is not None:
        say(f"{path}: {counted(count, 'run' if form in ('rec', 'html') else 'row')}")
    return Exit.DONE


def _format(args: argparse.Namespace) -> str:
    """The format that is asked for, by name or by the file's suffix.

    Raises:
        CommandError: The suffix says nothing, or the format needs something more.
    """
    path: Path | None = args.output
    form: str = args.format or ("jsonl" if path is None else _SUFFIXES.get(path.suffix, ""))
    if not form and path is not None:
        known = ", ".join(FORMATS)
        raise CommandError(f"{path} says no format; --format is one of {known}", Exit.USAGE)
    if path is None and (form == "parquet" or (form in _NOT_FOR_TERMINALS and sys.stdout.isatty())):
        raise CommandError(f"{form} is not to be read here; name a file by -o", Exit.USAGE)
    if args.pieces and form not in ("rec", "html"):
        raise CommandError(f"{form} has no place for --pieces; rec and html have", Exit.USAGE)
    if form in ("atif", "prime_rl") and not args.name:
        of = "the agent" if form == "atif" else "the environment"
        raise CommandError(f"{form} names {of}; give --name NAME", Exit.USAGE)
    return form


def _write(form: str, runs: Iterator[Run], asked: Asked) -> int:
    """Write runs; returns how many rows, or runs."""
    path: Path | None = asked.args.output
    if path is None:
        stream = sys.stdout.buffer
        to: Sink = Escaped(stream) if sys.stdout.isatty() else stream
        count = WRITERS[form](runs, to, asked)
        stream.flush()
        return count
    with whole_file(path, force=asked.args.force) as part:
        if form == "parquet":
            return write_parquet(runs, part)
        with part.open("wb") as file:
            return WRITERS[form](runs, file, asked)
