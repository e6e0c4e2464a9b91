"""Where runs are read from: the same questions to engines and to files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol

from recorder_core.cli.exits import CommandError, Exit
from recorder_core.cli.files import Files
from recorder_core.cli.places import Places
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.protocol import KeyReply
from recorder_core.runs import Run

_DRAINED = "What was drained is with whoever drained it"


class Source(Protocol):
    """Runs that are read, and stay where they are."""

    name: str
    """For messages."""

    def keys(self, prefix: KeyPrefix) -> list[KeyReply]:
        """What is there, run by run."""
        ...

    def runs(self, prefix: KeyPrefix) -> Iterator[Run]:
        """The runs, keys in order."""
        ...

    def run(self, key: RecordKey) -> Run | None:
        """One run; None if it is not there."""
        ...

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of token ids.

        Raises:
            NoPiecesError: They are not known.
        """
        ...


@contextmanager
def opened(
    args: argparse.Namespace,
    where: Places,
    told: Callable[[int, int], None] | None = None,
    *,
    drained: bool = False,
) -> Iterator[Source]:
    """The files that are named, else the engines.

    Args:
        args: The command line.
        where: What it names.
        told: Told while runs are read: how many records of a reply or file so far, and bytes.
        drained: Whether engines show a run with what was drained of it.
    """
    if where.files:
        yield Files(where.files, told)
        return
    from recorder_core.cli.engines import Engines, connected  # files want no HTTP client

    with connected(args, where.urls, told) as client:
        yield Engines(client, drained=drained)


def nothing(source: Source, wanted: KeyPrefix | RecordKey, drained: str = _DRAINED) -> NoReturn:
    """End the command as nothing is there, and say what is near.

    Args:
        source: Where it was looked for.
        wanted: What was.
        drained: Where it is if it was drained.

    Raises:
        CommandError: Always.
    """
    parts = wanted.parts
    in_flight = sum(each.pending for each in source.keys(KeyPrefix("/".join(parts))))
    if in_flight:
        where = f"under {'/'.join(parts)}" if parts else "yet"
        raise CommandError(f"nothing has finished {where}; {in_flight} in flight", Exit.NOTHING)
    if not parts:
        raise CommandError(f"nothing is recorded in {source.name}", Exit.NOTHING)
    near = next(
        filter(None, (_below(source, parts[:n]) for n in range(len(parts) - 1, -1, -1))), ""
    )
    hint = f"; nearest: {near}" if near else ""
    raise CommandError(f"nothing under {wanted}{hint}. {drained}", Exit.NOTHING)


def _below(source: Source, parts: tuple[str, ...]) -> str:
    """What comes next below a prefix, from the first to the last; empty if there is nothing."""
    depth = len(parts) + 1
    keys = source.keys(KeyPrefix("/".join(parts)))
    found = list(
        dict.fromkeys(each.key.parts[:depth] for each in keys if len(each.key.parts) >= depth)
    )
    if not found:
        return ""
    first = "/".join(found[0])
    return first if len(found) == 1 else f"{first} to /{found[-1][-1]}"
