"""The one thread that writes a store's changes to its file, many in one transaction."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from recorder_core.errors import NotSavedError
from recorder_core.stores.sqlite.changes import Changes
from recorder_core.stores.sqlite.file import StoreFile, Written
from recorder_core.throttle import Throttle

logger = logging.getLogger(__name__)

LINGER_S = 0.05
"""How long changes wait for further ones, where nobody waits for them."""
RETRY_S = 1.0
"""How long, where they could not be written."""
MAX_UNSAVED_BYTES = 64 * 1024**2
"""Memory of records that may be taken before they are written; beyond it the next one waits."""
_ROOM_S = 0.005


class _Waiting(NamedTuple):
    """Who wants to know when what was changed before is on the disk."""

    done: Callable[[Exception | None], None]
    records: bool


class Writer:
    """Writes what is due, at once where somebody waits for it, else after a moment.

    Args:
        lock: The store's lock.
        file: Where it is written.
    """

    def __init__(self, lock: threading.Lock, file: StoreFile) -> None:
        self._lock = lock
        self._file = file
        self._due = threading.Event()
        self._urgent = threading.Event()
        self.changes = Changes(self._due.set, file.count)
        """What is due; guarded by the store's lock."""
        self.fault = ""
        """What keeps records from the disk; empty where nothing does."""
        self._waiting: list[_Waiting] = []
        self._closing = False
        self._warn = Throttle(logger)
        self._thread = threading.Thread(target=self._run, name="record store", daemon=True)
        self._thread.start()

    def when_safe(self, done: Callable[[Exception | None], None], *, records: bool) -> bool:
        """See `RecordStore.when_safe`; with the lock held.

        Returns:
            Whether it is so already: then `done` is not called.
        """
        if self.changes.clean:
            return True
        self._waiting.append(_Waiting(done, records))
        self._hurry()
        return False

    def make_room(self) -> None:
        """Wait until a further record may be taken, or cannot be; without the lock."""
        while self.changes.unsaved_bytes > MAX_UNSAVED_BYTES and not (self.fault or self._closing):
            self._hurry()
            time.sleep(_ROOM_S)

    def close(self, timeout: float) -> bool:
        """Write what is due, within `timeout` seconds, and end.

        Returns:
            Whether the thread has ended.
        """
        self._closing = True
        self._hurry()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _hurry(self) -> None:
        self._urgent.set()
        self._due.set()

    def _run(self) -> None:
        while not self._closing:
            self._due.wait()
            self._urgent.wait(RETRY_S if self.fault else LINGER_S)
            # Before anything is taken: what comes later sets them again.
            self._due.clear()
            self._urgent.clear()
            self._write()
            if self.fault or self._file.give_back():
                self._due.set()
        self._write()

    def _write(self) -> None:
        with self._lock:
            if self.changes.clean and not (self._waiting or self.fault):
                return
            batch = self.changes.take()
            waiting, self._waiting = self._waiting, []
        written = self._file.write(batch)
        with self._lock:
            if written.rest is None:
                self.changes.saved(batch, records=written.records is None)
        self._judge(written)
        for each in waiting:
            error = written.records if each.records else written.rest
            try:
                each.done(None if error is None else _not_saved(self._file, error))
            except Exception:
                logger.exception("what waits for the record store failed")

    def _judge(self, written: Written) -> None:
        if written.records is None:
            if self.fault:
                logger.warning("%s can be written again: recording goes on", self._file.path)
            self.fault = ""
            return
        self.fault = str(written.records)
        self._warn.warning(
            "%s takes no more (%s): generations are served and not recorded until it does; %d "
            "records are in memory alone. Make room on the disk, or drain",
            *(self._file.path, self.fault, self.changes.unsaved),
        )


def _not_saved(file: StoreFile, error: Exception) -> NotSavedError:
    return NotSavedError(
        f"{file.path} takes no more ({error}): the change is in effect and is written as soon as "
        "it can be, but would be lost if the process ended before; ask again"
    )
