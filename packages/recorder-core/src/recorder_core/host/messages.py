"""What a front end and the recorder process tell each other."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recorder_core.drops import DropReason
from recorder_core.keys import RecordKey
from recorder_core.records import Turn, made

# The longest path of a Unix socket is 107 bytes.
_LONGEST = 90


class Folder(NamedTuple):
    """The private folder in which the processes find each other."""

    path: Path

    @property
    def turns(self) -> str:
        """The socket to which front ends send turns."""
        return str(self.path / "turns")

    @property
    def http(self) -> str:
        """The socket on which `/records` is served."""
        return str(self.path / "http")

    @property
    def key(self) -> Path:
        """The file with the key that the processes show each other."""
        return self.path / "key"

    def check(self) -> None:
        """Check that sockets can be made here.

        Raises:
            ValueError: The path is too long.
        """
        if len(bytes(self.path)) > _LONGEST:
            raise ValueError(
                f"{self.path} is too long for the path of a Unix socket; set TMPDIR to a "
                "shorter one"
            )


# From a front end.


class Started(NamedTuple):
    """Generations that began, of these keys."""

    keys: list[RecordKey]


class Ended(NamedTuple):
    """A generation that finished."""

    number: int
    turn: Turn


class Dropped(NamedTuple):
    """A generation that ended and is not recorded."""

    key: RecordKey
    reason: DropReason


class Counted(NamedTuple):
    """What was counted since the last such message, and how the engine is recorded."""

    unkeyed: dict[str, int]
    errors: int
    engine: dict[str, str]


class Delivered(NamedTuple):
    """Which replies were sent to their end, by the numbers of their turns."""

    replies: list[tuple[int, bool]]


class CaughtUp(NamedTuple):
    """All that had happened when this was asked for was sent before."""

    number: int


# From the recorder process.


class Ask(NamedTuple):
    """Send what has happened so far, then `CaughtUp` with this number."""

    number: int


class Settled(NamedTuple):
    """Turns that are stored or dropped, by their numbers."""

    numbers: list[int]


# From a front end, and to the others.


class Announced(NamedTuple):
    """Something that all front ends are to know, in the engine package's own words."""

    number: int
    news: Any


# To the front end that announced it.


class Heard(NamedTuple):
    """All others know what was announced under this number."""

    number: int


def hang_up(connection: Connection) -> None:
    """End a connection for both sides, also where a thread of this one waits for a message."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def resolved(turn: Turn) -> Turn:
    """A turn whose fields are values, in arrays of its own: int32 ids, float32 logprobs."""
    logprobs = made(turn.logprobs)
    if turn.exchange is not None:
        _ = turn.exchange.model  # read from the request's body, which stays here
    return replace(
        turn,
        prompt_ids=np.asarray(turn.prompt_ids, dtype=np.int32),
        response_ids=np.asarray(turn.response_ids, dtype=np.int32),
        logprobs=None if logprobs is None else np.asarray(logprobs, dtype=np.float32),
        versions=tuple(turn.versions),
        routed_experts=made(turn.routed_experts),
        sampling_mask=made(turn.sampling_mask),
        sampling=made(turn.sampling),
        flags=made(turn.flags),
    )
