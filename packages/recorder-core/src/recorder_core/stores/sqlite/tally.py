"""How many records a store has been given, where the end of its process does not reach."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_TALLY = struct.Struct("<QQ")


class Tally:
    """Two numbers in a small file that is mapped into memory: the session, and a count.

    To write one costs what writing to memory does, and what is written there the system keeps when
    the process is killed. Against the number of records that were on the disk by then, it says how
    many were not.

    Args:
        path: The file; made where there is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("a+b") as file:
            file.truncate(_TALLY.size)  # of an empty one the rest is zeros
            self._map = mmap.mmap(file.fileno(), _TALLY.size)

    def read(self) -> tuple[int, int]:
        """The session, and its count."""
        session, count = _TALLY.unpack_from(self._map)
        return session, count

    def begin(self, session: int) -> None:
        """Another session begins, with none."""
        self._session = session
        self.count(0)

    def count(self, count: int) -> None:
        """So many were given in this session."""
        _TALLY.pack_into(self._map, 0, self._session, count)

    def close(self, *, keep: bool) -> None:
        """Let go of it; delete the file, unless it is to say what is missing."""
        self._map.close()
        if not keep:
            self._path.unlink(missing_ok=True)
