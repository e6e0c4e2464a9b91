"""Runs as files for other programs, a function for each format."""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from recorder_core import export
from recorder_core.cli.exits import CommandError, Exit
from recorder_core.cli.formats import counted, pairs
from recorder_core.cli.streams import say
from recorder_core.codec import as_json, encode_stream
from recorder_core.export import Batch
from recorder_core.runs import Run
from recorder_core.trajectories import assemble
from recorder_core.view.pieces import Pieces, known_pieces
from recorder_core.view.saved import save

_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")


class Sink(Protocol):
    """Where bytes go."""

    def write(self, data: bytes, /) -> Any:
        """Take them."""
        ...


class Escaped:
    """Lines of JSON for a terminal: what it might obey is escaped.

    Args:
        to: Where the lines go on to; each is given whole.
    """

    def __init__(self, to: Sink) -> None:
        self._to = to

    def write(self, data: bytes, /) -> Any:
        """Take a line."""
        return self._to.write(_BEYOND_ASCII.sub(_escape, data.decode()).encode())


def _escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1].replace("\x7f", r"\u007f")


class Asked(NamedTuple):
    """What is asked for beside the runs."""

    args: argparse.Namespace
    """The command line."""
    pieces: Pieces
    """The bytes of token ids."""


Writer = Callable[[Iterator[Run], Sink, Asked], int]
"""Writes runs; returns how many rows, or runs where there are no rows."""


def _write_jsonl(runs: Iterator[Run], to: Sink, _: Asked) -> int:
    """A trajectory a line, as `GET /records` shows them to people."""
    count = 0
    for run in runs:
        for experience in assemble([run]):
            to.write(as_json([experience])[1:-1] + b"\n")
            count += 1
    return count


def _write_rec(runs: Iterator[Run], to: Sink, asked: Asked) -> int:
    """The runs themselves, as a drain writes them."""
    count = 0

    def counting() -> Iterator[Run]:
        nonlocal count
        for run in runs:
            count += 1
            yield run

    pieces = functools.partial(known_pieces, asked.pieces) if asked.args.pieces else None
    for frame in encode_stream(counting(), pieces=pieces):
        to.write(frame)
    return count


def _write_html(runs: Iterator[Run], to: Sink, asked: Asked) -> int:
    """The page, with the runs in it."""
    return save(runs, to, asked.pieces)


def _write_atif(runs: Iterator[Run], to: Sink, asked: Asked) -> int:
    """An ATIF trajectory a line."""
    name, _, version = asked.args.name.partition("@")
    count = 0
    for run in runs:
        for experience in assemble([run]):
            made = export.atif.trajectory(
                experience, agent=name, agent_version=version or "unknown"
            )
            to.write(made.model_dump_json(exclude_none=True).encode() + b"\n")
            count += 1
    return count


def _write_prime_rl(runs: Iterator[Run], to: Sink, asked: Asked) -> int:
    """Samples of prime-rl, one a line, with group advantages."""
    batch = export.group_advantages(_batch(runs, asked))
    return _write_dicts(export.dicts.prime_rl(batch, env_name=asked.args.name), to)


def _write_slime(runs: Iterator[Run], to: Sink, asked: Asked) -> int:
    """Samples of slime, one a line."""
    return _write_dicts(export.dicts.slime(_batch(runs, asked)), to)


def _write_miles(runs: Iterator[Run], to: Sink, asked: Asked) -> int:
    """Samples of miles, one a line."""
    return _write_dicts(export.dicts.miles(_batch(runs, asked)), to)


def _batch(runs: Iterator[Run], asked: Asked) -> Batch:
    """The normal form by the rules that are given; what they take out is told.

    Raises:
        ExportError: A rule refuses.
        CommandError: There is no such rule.
    """
    try:
        rules = export.Rules(**dict(asked.args.rule))
    except TypeError:
        known = ", ".join(each.name for each in fields(export.Rules))
        names = ", ".join(name for name, _ in asked.args.rule)
        raise CommandError(f"of the rules {names} one is none of {known}", Exit.USAGE) from None
    found = list(runs)
    incomplete = [run.key for run in found if run.missing]
    batch = export.rows(assemble(found), rules, incomplete=incomplete)
    report = batch.report
    if report.dropped or report.masked_tokens:
        left_out = f"left out, by rule: {pairs(report.dropped) or 'none'}"
        masked = f"masked tokens: {pairs(report.masked_tokens) or 'none'}"
        given = f"{counted(report.experiences, 'row')} given, {report.rows} written"
        say(f"{given}; {left_out}; {masked}")
    return batch


def _write_dicts(samples: list[dict[str, Any]], to: Sink) -> int:
    for sample in samples:
        to.write(msgspec.json.encode(sample, enc_hook=_plain) + b"\n")
    return len(samples)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in a sample")


def write_parquet(runs: Iterator[Run], path: Path) -> int:
    """A trajectory a row; returns how many. Needs pyarrow."""
    from recorder_core.export import parquet  # of an extra of its own

    with parquet.Writer(path) as writer:
        for run in runs:
            writer.write(assemble([run]))
    return writer.rows


WRITERS: dict[str, Writer] = {
    "jsonl": _write_jsonl,
    "rec": _write_rec,
    "html": _write_html,
    "atif": _write_atif,
    "prime_rl": _write_prime_rl,
    "slime": _write_slime,
    "miles": _write_miles,
}
"""What is written to a stream; Parquet wants a file."""
