"""A store that survives its process: what `MemoryStore` holds, and the same in a file."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from recorder_core.codec import check_writable
from recorder_core.keys import RecordKey
from recorder_core.keytree import Selection, name_of
from recorder_core.recent import Recent
from recorder_core.records import Record
from recorder_core.runs import SampleId
from recorder_core.stores.base import AddOutcome, Lease, Updated
from recorder_core.stores.held import Held, Leased
from recorder_core.stores.memory import DEFAULT_MAX_BYTES, MemoryStore
from recorder_core.stores.sqlite.file import StoreFile
from recorder_core.stores.sqlite.rows import Contents, encode_values
from recorder_core.stores.sqlite.writer import Writer

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0


class SQLiteStore(MemoryStore):
    """A `RecordStore` in memory and in an SQLite file, from which it comes back.

    Calls go by what is in memory; a thread of its own writes what they changed, many changes in
    one transaction. Who is to be told that something is safe waits by `when_safe`, as `Recorder`
    does. Where the disk takes no more, records are refused, and what is there can be drained.

    Args:
        path: The file; made where there is none. One process at a time has it.
        max_bytes: The budget of memory, leased records included; the file is about as large.
        max_run_bytes: See `MemoryStore`.
        when_full: See `MemoryStore`.
        clock: Seconds, from any origin; for tests.
        recent: See `MemoryStore`.

    Raises:
        StoreFileError: The file is damaged, something else's, or in use; it is left as it is.
    """

    def __init__(
        self,
        path: str | Path,
        max_bytes: int = DEFAULT_MAX_BYTES,
        *,
        max_run_bytes: int | None = None,
        when_full: Literal["evict", "reject"] = "evict",
        clock: Callable[[], float] = time.monotonic,
        recent: Recent | None = None,
    ) -> None:
        super().__init__(
            max_bytes,
            max_run_bytes=max_run_bytes,
            when_full=when_full,
            clock=clock,
            recent=recent,
        )
        self.path = Path(path).absolute()
        self._file = StoreFile(self.path, clock)
        self._restore(self._file.contents, clock() - time.time())
        if self._file.lost:
            self._counters["lost"] = self._file.lost
            logger.warning(
                "%s: %d records had been taken when the process before ended, and were not on the "
                "disk yet: they are lost",
                *(self.path, self._file.lost),
            )
        del self._file.contents
        self._writer = Writer(self._lock, self._file)
        self._journal = self._writer.changes

    def _restore(self, contents: Contents, offset: float) -> None:
        """Hold again what the file held.

        Args:
            contents: What that is.
            offset: What makes the file's times those of the clock, in seconds.
        """
        last = 0
        now = self._clock()
        for each in contents.leases:
            expires_at = min(each.expires_at + offset, now + each.lease_s)
            self._leases[each.name] = Leased(each.where, {}, each.lease_s, expires_at, each.more)
            self._expiries.append((expires_at, each.name))
        self._expiries.sort()  # as a heap is
        for row, run in contents.runs:
            held = Held(run, row.number, min(row.written + offset, now))
            if row.lease is None:
                self._insert(held)
            else:
                self._leases[row.lease].runs[held.key] = held
                self._bytes += held.bytes
                self._hold(held, row.lease)
            self._counters["stored"] += len(held.records)
            last = max(last, row.number)
        for leased in self._leases.values():
            leased.runs = dict(sorted(leased.runs.items(), key=lambda item: item[0].order))
        self._epochs = itertools.count(last + 1)
        for lease in contents.acknowledged:
            self._remember(self._acknowledged, lease)
        for where in contents.blocked:
            self._remember(self._blocked, name_of(where))
        for gone in contents.gone:
            self._gone.put(gone.key, gone)

    def add(self, record: Record, epoch: int | None = None) -> AddOutcome:
        """See `RecordStore.add`; waits where the disk is much slower than the engine."""
        check_writable(record)
        self._writer.make_room()
        if self._writer.fault:
            with self._open():
                self._counters["disk"] += 1
            return AddOutcome.DISK
        return super().add(record, epoch)

    def overwrite(self, key: RecordKey, records: Iterable[Record]) -> None:
        """See `RecordStore.overwrite`."""
        given = list(records)
        for record in given:
            check_writable(record)
        super().overwrite(key, given)

    def update(
        self,
        key: RecordKey,
        *,
        sample_ids: Collection[SampleId] | None = None,
        reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        token_level_reward: Sequence[float] | None = None,
    ) -> Updated:
        """See `RecordStore.update`."""
        encode_values(info or {})  # what cannot be written is refused
        return super().update(
            key,
            sample_ids=sample_ids,
            reward=reward,
            info=info,
            token_level_reward=token_level_reward,
        )

    def drain(
        self,
        where: Selection,
        lease: str,
        lease_s: float,
        max_bytes: int | None = None,
        max_runs: int | None = None,
    ) -> Lease:
        """See `RecordStore.drain`."""
        lease.encode()  # likewise: a lone surrogate
        return super().drain(where, lease, lease_s, max_bytes, max_runs)

    def when_safe(self, done: Callable[[Exception | None], None], *, records: bool = False) -> None:
        """See `RecordStore.when_safe`."""
        with self._open():
            safe = self._writer.when_safe(done, records=records)
        if safe:
            done(None)

    def close(self) -> None:
        """See `RecordStore.close`; what is due is written before."""
        with self._lock:
            was_open = not self._closed
            self._closed = True
        if was_open:
            ended = self._writer.close(_CLOSE_S)
            unsaved = self._writer.changes.unsaved
            if unsaved or not ended:
                logger.warning("%s: %d records could not be written to it", self.path, unsaved)
            if ended:
                self._file.close(whole=not unsaved)
        super().close()
