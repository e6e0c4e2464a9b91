"""How far long work is, on the standard error where that is a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from recorder_core.cli.formats import counted, size

_SILENT_S = 0.5
"""What is done by then needs no progress."""
_PAUSE_S = 0.2


class Arrivals:
    """Counts what arrives by several connections at once; made to be told by a client.

    A connection is told by its thread; one whose counts fall has begun another reply.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}
        self._before = (0, 0)
        self._lock = threading.Lock()
        self.began_at: float | None = None
        """When the last reply began to arrive, by `time.monotonic`; None before the first."""

    def __call__(self, records: int, count: int) -> None:
        """So many records of a reply have come, and so many bytes."""
        thread = threading.get_ident()
        with self._lock:
            last = self._last.get(thread, (0, 0))
            if count < last[1]:
                self._before = (self._before[0] + last[0], self._before[1] + last[1])
            if count < last[1] or not last[1]:
                self.began_at = time.monotonic()
            self._last[thread] = (records, count)

    @property
    def records(self) -> int:
        """Records so far."""
        return self._before[0] + sum(records for records, _ in list(self._last.values()))

    @property
    def bytes(self) -> int:
        """Bytes so far."""
        return self._before[1] + sum(count for _, count in list(self._last.values()))


@contextmanager
def progress(arrivals: Arrivals, doing: str) -> Iterator[None]:
    """Show what arrives while the block goes on.

    Args:
        arrivals: What is counted.
        doing: What goes on, such as `reading`.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # of the extra, and wanted on a terminal alone
    from rich.status import Status

    ended = threading.Event()

    def show() -> None:
        if ended.wait(_SILENT_S):
            return
        with Status(f"{doing} …", console=Console(stderr=True)) as status:
            while not ended.wait(_PAUSE_S):
                if arrivals.bytes:
                    so_far = f"{counted(arrivals.records, 'record')}, {size(arrivals.bytes)}"
                    status.update(f"{doing} … {so_far}")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
