"""The default store: everything in this process's memory, within a byte budget."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from recorder_core.errors import LeaseError, StoreClosedError
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.records import Record
from recorder_core.stores.base import (
    AddOutcome,
    KeySummary,
    Lease,
    StoreStats,
    in_order,
    updated_records,
)
from recorder_core.throttle import Throttle

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 4 * 1024**3
MAX_BLOCKED_PREFIXES = 16_384
"""The most recently blocked prefixes that are remembered: a few MB at most."""
_REMEMBERED_ACKS = 1024


@dataclass(slots=True)
class _Bucket:
    """The records of one key."""

    records: dict[str, Record] = field(default_factory=dict)
    bytes: int = 0
    last_write: float = 0.0

    def put(self, record: Record) -> int:
        """Take or replace a record; returns the bytes that this adds."""
        old = self.records.get(record.id)
        added = record.nbytes - (old.nbytes if old else 0)
        self.records[record.id] = record
        self.bytes += added
        return added


@dataclass(slots=True)
class _Leased:
    expires_at: float
    buckets: dict[RecordKey, _Bucket]


class MemoryStore:
    """A `RecordStore` in memory.

    Args:
        max_bytes: The budget, leased records included.
        when_full: `evict` deletes the keys written to least recently until the new record fits
            (never leased ones, never the record's own key); `reject` refuses the new record.
        clock: Seconds, from any origin; for tests.
    """

    def __init__(
        self,
        max_bytes: int = DEFAULT_MAX_BYTES,
        *,
        when_full: Literal["evict", "reject"] = "evict",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_bytes <= 0:
            raise ValueError(f"max_bytes is {max_bytes}, it must be positive")
        if when_full not in ("evict", "reject"):
            raise ValueError(f"when_full is {when_full!r}, it must be 'evict' or 'reject'")
        self._max_bytes = max_bytes
        self._evicts = when_full == "evict"
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        # Ordered by last write: the first is evicted first.
        self._buckets: OrderedDict[RecordKey, _Bucket] = OrderedDict()
        self._leases: dict[str, _Leased] = {}
        self._acknowledged: OrderedDict[str, None] = OrderedDict()
        self._blocked: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._bytes = 0
        self._leased_bytes = 0
        self._counters: Counter[str] = Counter()
        self._warn_full = Throttle(logger)

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StoreClosedError("the store is closed")
            self._return_expired()
            yield

    def add(self, record: Record) -> AddOutcome:
        """See `RecordStore.add`."""
        with self._open():
            return self._add(record)

    def _add(self, record: Record) -> AddOutcome:
        key = record.key
        if any(key.parts[:n] in self._blocked for n in range(len(key.parts) + 1)):
            self._counters["blocked"] += 1
            return AddOutcome.BLOCKED
        bucket = self._buckets.get(key)
        held = bucket.records if bucket is not None else {}
        if record.id in held:
            return AddOutcome.STORED
        if record.parent is not None:
            parent = held.get(record.parent)
            if parent is None or parent.end != record.start:
                return AddOutcome.NO_PARENT
        if not self._make_room(record.nbytes, key):
            self._counters["full"] += 1
            return AddOutcome.FULL
        self._counters["stored"] += 1
        self._put(key, [record])
        return AddOutcome.STORED

    def _put(self, key: RecordKey, records: Iterable[Record]) -> None:
        bucket = self._buckets.setdefault(key, _Bucket())
        for record in records:
            self._bytes += bucket.put(record)
        bucket.last_write = self._clock()
        self._buckets.move_to_end(key)

    def _make_room(self, needed: int, key: RecordKey) -> bool:
        if self._bytes + needed <= self._max_bytes:
            return True
        own = self._buckets.get(key)
        kept = self._leased_bytes + (own.bytes if own else 0)
        if not self._evicts or kept + needed > self._max_bytes:
            self._warn_full.warning(
                "the record store is full (%d of %d bytes): records are refused",
                self._bytes,
                self._max_bytes,
            )
            return False
        if own is not None:
            self._buckets.move_to_end(key)
        before = self._counters["evicted"]
        while self._bytes + needed > self._max_bytes:
            _, oldest = self._buckets.popitem(last=False)
            self._bytes -= oldest.bytes
            self._counters["evicted"] += len(oldest.records)
        self._warn_full.warning(
            "the record store is full (%d bytes): %d records of the least recently written keys "
            "were evicted; drain sooner or raise the budget",
            self._max_bytes,
            self._counters["evicted"] - before,
        )
        return True

    def overwrite(self, key: RecordKey, records: Iterable[Record]) -> None:
        """See `RecordStore.overwrite`."""
        new = in_order(key, records)
        with self._open():
            old = self._matching_with_leased(KeyPrefix(key.text), exact=key)
            needed = sum(record.nbytes for record in new)
            if not self._make_room(needed - sum(bucket.bytes for _, bucket in old), key):
                raise ValueError(f"{needed} bytes do not fit the budget of {self._max_bytes}")
            self._counters["overwritten"] += self._delete(old)
            self._counters["stored"] += len(new)
            if new:
                self._put(key, new)

    def update(
        self,
        key: RecordKey,
        *,
        record_ids: Collection[str] | None = None,
        reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        token_level_reward: Sequence[float] | None = None,
    ) -> int:
        """See `RecordStore.update`."""
        with self._open():
            bucket = self._buckets.get(key)
            if bucket is None:
                return 0
            wanted = bucket.records if record_ids is None else set(record_ids)
            old = [record for record in bucket.records.values() if record.id in wanted]
            updated = updated_records(
                old, reward=reward, info=info, token_level_reward=token_level_reward
            )
            added = sum(each.nbytes for each in updated) - sum(each.nbytes for each in old)
            if added > 0 and not self._make_room(added, key):
                raise ValueError(f"{added} bytes more do not fit the budget of {self._max_bytes}")
            for record in updated:
                self._bytes += bucket.put(record)
            return len(updated)

    def get(self, prefix: KeyPrefix) -> list[Record]:
        """See `RecordStore.get`."""
        with self._open():
            return self._records(self._matching(prefix))

    def remove(self, prefix: KeyPrefix) -> int:
        """See `RecordStore.remove`."""
        with self._open():
            removed = self._delete(self._matching_with_leased(prefix))
            self._counters["removed"] += removed
            return removed

    def drain(self, prefix: KeyPrefix, lease_s: float) -> Lease:
        """See `RecordStore.drain`."""
        if not lease_s > 0:
            raise ValueError(f"lease_s is {lease_s}, it must be positive")
        with self._open():
            buckets = dict(self._matching(prefix))
            for key, bucket in buckets.items():
                del self._buckets[key]
                self._leased_bytes += bucket.bytes
            lease_id = uuid.uuid4().hex
            self._leases[lease_id] = _Leased(self._clock() + lease_s, buckets)
            records = self._records(buckets.items())
        return Lease(id=lease_id, records=tuple(records), lease_s=lease_s)

    def ack(self, lease_id: str) -> int:
        """See `RecordStore.ack`."""
        with self._open():
            if lease_id in self._acknowledged:
                return 0
            lease = self._leases.pop(lease_id, None)
            if lease is None:
                raise LeaseError(
                    f"lease {lease_id!r} is unknown or has run out; its records are back in the "
                    "store"
                )
            self._remember(self._acknowledged, lease_id, _REMEMBERED_ACKS)
            freed = sum(bucket.bytes for bucket in lease.buckets.values())
            self._bytes -= freed
            self._leased_bytes -= freed
            count = sum(len(bucket.records) for bucket in lease.buckets.values())
            self._counters["acknowledged"] += count
            return count

    def block(self, prefix: KeyPrefix) -> None:
        """See `RecordStore.block`; the `MAX_BLOCKED_PREFIXES` blocked last are remembered."""
        with self._open():
            self._remember(self._blocked, prefix.parts, MAX_BLOCKED_PREFIXES)

    @staticmethod
    def _remember(known: OrderedDict[Any, None], item: Any, limit: int) -> None:
        known[item] = None
        known.move_to_end(item)
        if len(known) > limit:
            known.popitem(last=False)

    def keys(self, prefix: KeyPrefix) -> list[KeySummary]:
        """See `RecordStore.keys`."""
        with self._open():
            now = self._clock()
            return [
                KeySummary(
                    key=key,
                    records=len(bucket.records),
                    rewarded=sum(each.reward is not None for each in bucket.records.values()),
                    bytes=bucket.bytes,
                    age_s=now - bucket.last_write,
                )
                for key, bucket in self._matching(prefix)
            ]

    def sweep(self, older_than_s: float) -> int:
        """See `RecordStore.sweep`."""
        with self._open():
            limit = self._clock() - older_than_s
            old = [(key, each) for key, each in self._buckets.items() if each.last_write < limit]
            swept = self._delete(old)
            self._counters["swept"] += swept
            return swept

    def stats(self) -> StoreStats:
        """See `RecordStore.stats`."""
        with self._open():
            leased = [each for lease in self._leases.values() for each in lease.buckets.values()]
            return StoreStats(
                keys=len(self._buckets),
                records=sum(len(bucket.records) for bucket in self._buckets.values()),
                bytes=self._bytes,
                max_bytes=self._max_bytes,
                leased_records=sum(len(bucket.records) for bucket in leased),
                blocked_prefixes=len(self._blocked),
                counters=dict(self._counters),
            )

    def close(self) -> None:
        """See `RecordStore.close`."""
        with self._lock:
            self._closed = True
            self._buckets.clear()
            self._leases.clear()
            self._bytes = self._leased_bytes = 0

    def _matching(self, prefix: KeyPrefix) -> list[tuple[RecordKey, _Bucket]]:
        found = [item for item in self._buckets.items() if prefix.matches(item[0])]
        return sorted(found, key=lambda item: item[0])

    def _matching_with_leased(
        self, prefix: KeyPrefix, exact: RecordKey | None = None
    ) -> list[tuple[RecordKey, _Bucket]]:
        everywhere = [self._buckets, *(lease.buckets for lease in self._leases.values())]
        return [
            (key, bucket)
            for buckets in everywhere
            for key, bucket in buckets.items()
            if (key == exact if exact else prefix.matches(key))
        ]

    def _delete(self, found: Iterable[tuple[RecordKey, _Bucket]]) -> int:
        count = 0
        for key, bucket in found:
            if self._buckets.get(key) is bucket:
                del self._buckets[key]
            for lease in self._leases.values():
                if lease.buckets.get(key) is bucket:
                    del lease.buckets[key]
                    self._leased_bytes -= bucket.bytes
            self._bytes -= bucket.bytes
            count += len(bucket.records)
        return count

    @staticmethod
    def _records(buckets: Iterable[tuple[RecordKey, _Bucket]]) -> list[Record]:
        return [record for _, bucket in buckets for record in bucket.records.values()]

    def _return_expired(self) -> None:
        now = self._clock()
        for lease_id in [each for each, lease in self._leases.items() if lease.expires_at <= now]:
            for key, returned in self._leases.pop(lease_id).buckets.items():
                self._leased_bytes -= returned.bytes
                self._counters["returned"] += len(returned.records)
                newer = self._buckets.get(key)
                if newer is not None:
                    # Recorded while the lease ran: the older records come first again.
                    for record in newer.records.values():
                        # Less than its size if it was added again while it was leased.
                        self._bytes += returned.put(record) - record.nbytes
                    returned.last_write = newer.last_write
                self._buckets[key] = returned
                self._buckets.move_to_end(key, last=newer is not None)
