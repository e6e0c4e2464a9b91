"""Runs in files: streams, as drains and spools leave them, and the blobs of earlier releases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from recorder_core.cli.exits import CommandError
from recorder_core.codec import MAGIC, StreamDecoder
from recorder_core.errors import CodecError
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.protocol import KeyReply
from recorder_core.runs import Run, merged_by_key
from recorder_core.view.pieces import NoPiecesError

_PIECE_BYTES = 1 << 20

Told = Callable[[int, int], None]
"""Told how many records there are so far, and bytes."""


class Files:
    """The runs of some files, as one source; read on first use, and held.

    Args:
        paths: Of the files.
        told: Told while they are read.
    """

    def __init__(self, paths: Sequence[Path], told: Told | None = None) -> None:
        self.name = ", ".join(map(str, paths))
        """For messages."""
        self._paths = paths
        self._told = told
        self._pieces: dict[int, bytes] = {}

    @cached_property
    def all(self) -> list[Run]:
        """The runs of all files, keys in order; what several have of one run is together."""
        read = [_read(path, self._told) for path in self._paths]
        for _, pieces in read:
            self._pieces |= pieces
        return merged_by_key(run for runs, _ in read for run in runs)

    def keys(self, prefix: KeyPrefix) -> list[KeyReply]:
        """What the files have, run by run."""
        return [_described(run) for run in self.all if prefix.matches(run.key)]

    def runs(self, prefix: KeyPrefix) -> Iterator[Run]:
        """The runs, keys in order."""
        return (run for run in self.all if prefix.matches(run.key))

    def run(self, key: RecordKey) -> Run | None:
        """One run; None if it is not there."""
        return next((run for run in self.all if run.key == key), None)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of token ids, from the files that hold them.

        Raises:
            NoPiecesError: None does.
        """
        if self.all and not self._pieces:
            raise NoPiecesError("no file holds its tokens' bytes: give a --tokenizer")
        return [self._pieces.get(each, b"") for each in ids]


def _read(path: Path, told: Told | None) -> tuple[list[Run], dict[int, bytes]]:
    """The runs of one file, and the bytes of tokens where it holds them.

    Raises:
        CommandError: It cannot be read, or holds no runs.
    """
    decoder = StreamDecoder()
    try:
        with path.open("rb") as file:
            piece = _without_line(file.read(_PIECE_BYTES))
            while piece:
                decoder.feed(piece)
                if told is not None:
                    told(decoder.records, decoder.bytes)
                piece = file.read(_PIECE_BYTES)
        return decoder.close(), decoder.pieces
    except OSError as error:
        raise CommandError(f"{path} cannot be read ({error.strerror})") from None
    except CodecError as error:
        raise CommandError(f"{path} holds no recorded runs: {error}") from None


def _without_line(begin: bytes) -> bytes:
    """The begin of a file, without the line that a spool writes before its stream."""
    if begin[:1] == b"{":
        end = begin.find(b"\n" + MAGIC) + 1
        return begin[end:]
    return begin


def _described(run: Run) -> KeyReply:
    """What a server would say of it."""
    finished = max((each.finished_at for each in run.records.values()), default=0.0)
    return KeyReply(
        key=run.key,
        records=len(run.records),
        rewarded=run.rewarded,
        reward=run.reward,
        pending=run.pending,
        missing=run.missing,
        bytes=run.nbytes,
        age_s=max(time.time() - finished, 0.0) if finished else 0.0,
        closed=run.closed,
    )
