"""The default store: everything in this process's memory, within a byte budget."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Literal, TypeVar

from recorder_core.drops import DropReason
from recorder_core.errors import LeaseError, StoreClosedError
from recorder_core.keys import RecordKey
from recorder_core.keytree import KeyTree, Name, Selection, name_of, names_of
from recorder_core.recent import Recent
from recorder_core.records import Record
from recorder_core.runs import RUN_BYTES, Run, SampleId, fits
from recorder_core.stores.base import (
    AddOutcome,
    Lease,
    RunSummary,
    StoreStats,
    Updated,
    checked_reward,
    in_order,
    updated_records,
)
from recorder_core.stores.held import Held, Journal, Leased
from recorder_core.throttle import Throttle

Seen = TypeVar("Seen")

_order = attrgetter("order")

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 4 * 1024**3
MAX_REMEMBERED = 16_384
"""The leases acknowledged, prefixes blocked and runs evicted most recently are remembered: so many
of each, some 10 MB at most."""
_SEEN_AT_ONCE = 256
_PAUSE_S = 20e-6


class MemoryStore:
    """A `RecordStore` in memory.

    Args:
        max_bytes: The budget, leased records included.
        max_run_bytes: The most that one run may hold; None: as much as all.
        when_full: `evict` deletes the runs written to least recently until the new record fits,
            whole (never leased ones, and none with generations in flight); `reject` refuses the
            new record.
        recent: Told of rewards and of what is handed out, for people who look; its own budget.
        clock: Seconds, from any origin; for tests.
    """

    def __init__(
        self,
        max_bytes: int = DEFAULT_MAX_BYTES,
        *,
        max_run_bytes: int | None = None,
        when_full: Literal["evict", "reject"] = "evict",
        recent: Recent | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_bytes <= 0 or (max_run_bytes is not None and max_run_bytes <= 0):
            raise ValueError(
                f"max_bytes is {max_bytes}, max_run_bytes {max_run_bytes}: they must be positive"
            )
        if when_full not in ("evict", "reject"):
            raise ValueError(f"when_full is {when_full!r}, it must be 'evict' or 'reject'")
        self._max_bytes = max_bytes
        self._max_run_bytes = max_run_bytes
        self._evicts = when_full == "evict"
        self.recent = Recent() if recent is None else recent
        self._clock = clock
        self._in_flight: Callable[[RecordKey], int] = lambda key: 0
        self._taken: Callable[[RecordKey], None] = lambda key: None
        self._lock = threading.Lock()  # held for microseconds, or for what a call selects
        self._closed = False
        self._epochs = itertools.count(1)
        self._runs: KeyTree[Held] = KeyTree()
        self._leases: dict[str, Leased] = {}
        self._leased: KeyTree[set[str]] = KeyTree()
        self._expiries: list[tuple[float, str]] = []  # a heap; leases extended since are in it too
        self._acknowledged: OrderedDict[str, None] = OrderedDict()
        self._blocked: OrderedDict[Name, None] = OrderedDict()
        self._journal = Journal()
        self._gone: KeyTree[Run] = KeyTree()  # what is missing of runs that are not here
        self._bytes = self._records = self._leased_records = 0
        self._counters: Counter[str] = Counter()
        self._warn_full = Throttle(logger)

    def watch(
        self,
        in_flight: Callable[[RecordKey], int],
        taken: Callable[[RecordKey], None] = lambda key: None,
    ) -> None:
        """See `RecordStore.watch`."""
        self._in_flight, self._taken = in_flight, taken

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StoreClosedError("the store is closed")
            if self._expiries:
                self._return_expired()
            yield

    # Writing.

    def epoch(self, key: RecordKey) -> int:
        """See `RecordStore.epoch`."""
        with self._open():
            run = self._runs.get(key)
            return run.epoch if run is not None and run.records else 0

    def add(self, record: Record, epoch: int | None = None) -> AddOutcome:
        """See `RecordStore.add`."""
        with self._open():
            key = record.key
            if self._is_blocked(key):
                self._counters["blocked"] += 1
                return AddOutcome.BLOCKED
            run = self._runs.get(key)
            known = run.records if run is not None else {}
            if epoch is not None and epoch != (run.epoch if run is not None and known else 0):
                return AddOutcome.MOVED
            if record.id in known:
                return AddOutcome.STORED
            if not fits(record, known):
                return AddOutcome.NO_PARENT
            own = run.bytes if run is not None else 0
            added = record.nbytes + (0 if own else RUN_BYTES)
            if not self._make_room(key, added, own + added):
                self._counters["full"] += 1
                return AddOutcome.FULL
            run = run or self._begin(key)
            self._put(run, record)
            self._counters["stored"] += 1
            run.last_write = self._clock()
            self._runs.put(key, run)
            self._journal.run(run)
            return AddOutcome.STORED

    def _begin(self, key: RecordKey) -> Held:
        run = Held(self._recall_gone(key) or Run(key), next(self._epochs), self._clock())
        self._insert(run)
        self._journal.run(run)
        return run

    def _put(self, run: Held, record: Record) -> None:
        """Take or replace a record of a run in sight."""
        old = run.records.get(record.id)
        added = record.nbytes - (old.nbytes if old else 0)
        run.put(record)
        run.bytes += added
        self._bytes += added
        self._records += old is None
        if old is None:
            self._journal.added(run, record)
        else:
            self._journal.learnt(run, record)

    def note_dropped(self, key: RecordKey, reason: DropReason) -> None:
        """See `RecordStore.note_dropped`."""
        with self._open():
            run = self._runs.get(key)
            if run is None and (not reason.cuts or self._is_blocked(key)):
                return
            if run is None and self._make_room(key, RUN_BYTES, RUN_BYTES):
                run = self._begin(key)
            if run is not None:
                run.dropped = _one_more(run.dropped, reason)
                self._journal.run(run)
            else:
                gone = self._gone.get(key) or Run(key)
                gone.dropped = _one_more(gone.dropped, reason)
                self._remember_gone(gone)

    def amend(
        self,
        key: RecordKey,
        record_id: str,
        *,
        delivered: bool | None = None,
        flag: str | None = None,
    ) -> None:
        """See `RecordStore.amend`."""
        with self._open():
            for run in self._with_leased(key):
                record = run.records.get(record_id)
                if record is None:
                    continue
                if delivered is not None:
                    record.delivered = delivered
                if flag is not None and flag not in record.flags:
                    record.flags = (*record.flags, flag)
                self._journal.learnt(run, record)

    def _is_blocked(self, key: RecordKey) -> bool:
        blocked = self._blocked
        return bool(blocked) and any(name in blocked for name in names_of(key))

    def _make_room(self, key: RecordKey, added: int, size: int) -> bool:
        """Whether a run may have `added` bytes more, `size` in all; evicts others for it."""
        if self._max_run_bytes is not None and size > self._max_run_bytes:
            self._warn_full.warning(
                "run %s is full (%d of %d bytes): its records are refused",
                *(key, size - added, self._max_run_bytes),
            )
            return False
        lacking = self._bytes + added - self._max_bytes
        if lacking <= 0:
            return True
        victims = self._victims(lacking, key) if self._evicts else None
        if victims is None:
            self._warn_full.warning(
                "the record store is full (%d of %d bytes, the rest leased or still growing): "
                "records are refused; drain and acknowledge sooner or raise the budget",
                *(self._bytes, self._max_bytes),
            )
            return False
        self._counters["evicted"] += sum(map(self._give_up, victims))
        self._warn_full.warning(
            "the record store is full (%d bytes): %d runs, those written to least recently, were "
            "evicted; drain sooner or raise the budget",
            *(self._max_bytes, len(victims)),
        )
        return True

    def _need_room(self, key: RecordKey, added: int, size: int) -> None:
        if not self._make_room(key, added, size):
            limit = min(self._max_run_bytes or self._max_bytes, self._max_bytes)
            raise ValueError(f"{added} bytes more do not fit the budget of {limit}")

    def _give_up(self, run: Held) -> int:
        """Delete a run that says so if it goes on; returns its records."""
        evicted = run.evicted + len(run.records)
        self._remember_gone(Run(run.key, dropped=run.dropped, evicted=evicted))
        return self._delete(run)

    def _remember_gone(self, run: Run) -> None:
        self._gone.put(run.key, run)
        self._journal.gone(run.key, run)
        if len(self._gone) > MAX_REMEMBERED:
            self._recall_gone(next(self._gone.oldest_first())[0])

    def _recall_gone(self, key: RecordKey) -> Run | None:
        gone = self._gone.pop(key)
        if gone is not None:
            self._journal.gone(key, None)
        return gone

    def _victims(self, lacking: int, key: RecordKey) -> list[Held] | None:
        """The runs that make room for so many bytes; None if all of them do not."""
        victims: list[Held] = []
        for other, run in self._runs.oldest_first():
            if other != key and not self._in_flight(other):
                victims.append(run)
                lacking -= run.bytes
                if lacking <= 0:
                    return victims
        return None

    def overwrite(self, key: RecordKey, records: Iterable[Record]) -> None:
        """See `RecordStore.overwrite`."""
        run = Run(key, in_order(key, records))
        size = run.nbytes if run.records else 0
        with self._open():
            old = self._with_leased(key)
            self._need_room(key, size - sum(each.bytes for each in old), size)
            self._counters["overwritten"] += sum(map(self._delete, old))
            self.recent.forget(key)
            self._recall_gone(key)
            self._counters["stored"] += len(run.records)
            if run.records:
                held = Held(run, next(self._epochs), self._clock())
                self._insert(held)
                self._journal.run(held)
                for record in held.records.values():
                    self._journal.added(held, record)

    def _insert(self, run: Held, *, oldest: bool = False) -> None:
        self._runs.put(run.key, run, oldest=oldest)
        self._bytes += run.bytes
        self._records += len(run.records)

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
        checked_reward(reward)
        with self._open():
            run = self._runs.get(key)
            if run is None:
                growing = sample_ids is None and self._in_flight(key) and not self._is_blocked(key)
                if not growing:
                    return Updated(0, list(sample_ids or ()))
                size = Run(key, info=info).own_bytes
                self._need_room(key, size, size)
                run = self._begin(key)
            if sample_ids is None:
                self._update_run(run, reward, info, token_level_reward)
                self._say_rewarded(key, reward)
                return Updated(len(run.records), [])
            named = {name: run.select(name) for name in sample_ids}
            old = {record.id: record for found in named.values() for record in found}
            updated = updated_records(
                old.values(), reward=reward, info=info, token_level_reward=token_level_reward
            )
            self._replace(run, updated, 0)
            if updated:
                self._say_rewarded(key, reward)
            return Updated(len(updated), [name for name, found in named.items() if not found])

    def _say_rewarded(self, key: RecordKey, reward: float | None) -> None:
        if reward is not None:
            self.recent.rewarded(key, float(reward))

    def _update_run(
        self,
        run: Held,
        reward: float | None,
        info: Mapping[str, Any] | None,
        token_level_reward: Sequence[float] | None,
    ) -> None:
        updated: list[Record] = []
        if token_level_reward is not None:
            updated = updated_records(run.records.values(), token_level_reward=token_level_reward)
        merged = Run(run.key, info={**run.info, **info}) if info else run
        own = merged.own_bytes - run.own_bytes
        self._replace(run, updated, own)
        run.info = merged.info
        run.bytes += own
        self._bytes += own
        if reward is not None:
            run.reward = float(reward)
        self._journal.run(run)

    def _replace(self, run: Held, updated: Sequence[Record], own: int) -> None:
        """Replace records of a run, if they and `own` bytes more fit."""
        added = own + sum(each.nbytes - run.records[each.id].nbytes for each in updated)
        if added > 0:
            self._need_room(run.key, added, run.bytes + added)
        for record in updated:
            self._put(run, record)

    # Reading.

    def get(self, where: Selection) -> list[Run]:
        """See `RecordStore.get`."""
        with self._open():
            keys = self._runs.keys(where)
        keys.sort(key=_order)
        return self._see(keys, lambda run: run.copy(closed=self._is_blocked(run.key)))

    def keys(
        self, where: Selection, *, after: RecordKey | None = None, limit: int | None = None
    ) -> list[RunSummary]:
        """See `RecordStore.keys`."""
        with self._open():
            found = self._runs.keys(where)
        if after is not None:
            found = [key for key in found if key.order > after.order]
        if limit is None:
            found.sort(key=_order)
        else:
            found = heapq.nsmallest(limit, found, key=_order)
        return self._see(found, self._summary)

    def _see(self, keys: Sequence[RecordKey], look: Callable[[Held], Seen]) -> list[Seen]:
        """Look at runs, each at one moment; where there are many, other threads get between."""
        seen: list[Seen] = []
        for at in range(0, len(keys), _SEEN_AT_ONCE):
            if at:
                time.sleep(_PAUSE_S)  # a thread that waits for the lock takes longer to wake up
            with self._open():
                runs = map(self._runs.get, keys[at : at + _SEEN_AT_ONCE])
                seen += [look(run) for run in runs if run is not None]
        return seen

    def _summary(self, run: Held) -> RunSummary:
        return RunSummary(
            key=run.key,
            records=len(run.records),
            rewarded=run.rewarded,
            reward=run.reward,
            missing=run.missing,
            bytes=run.bytes,
            age_s=self._clock() - run.last_write,
            closed=self._is_blocked(run.key),
        )

    # Taking away.

    def remove(self, where: Selection) -> int:
        """See `RecordStore.remove`."""
        with self._open():
            removed = sum(map(self._delete, self._with_leased(where)))
            for key in self._gone.keys(where):
                self._recall_gone(key)
            self.recent.removed(where)
            self._counters["removed"] += removed
            return removed

    def _with_leased(self, where: Selection) -> list[Held]:
        found = self._runs.values(where)
        for key, leases in self._leased.items(where):
            found += [self._leases[lease].runs[key] for lease in leases]
        return found

    def _delete(self, run: Held) -> int:
        """Forget a run, wherever it is; returns its records."""
        count = len(run.records)
        if self._runs.get(run.key) is run:
            self._take_out(run)
        else:
            for lease in self._leased.get(run.key) or ():
                if self._leases[lease].runs[run.key] is run:
                    del self._leases[lease].runs[run.key]
                    self._unlease(lease, run)
                    break
            self._bytes -= run.bytes
        self._journal.deleted(run)
        return count

    def _take_out(self, run: Held) -> None:
        """A run in sight is here no more."""
        self._runs.pop(run.key)
        self._records -= len(run.records)
        self._bytes -= run.bytes
        self._taken(run.key)

    def drain(
        self,
        where: Selection,
        lease: str,
        lease_s: float,
        max_bytes: int | None = None,
        max_runs: int | None = None,
    ) -> Lease:
        """See `RecordStore.drain`."""
        _check_lease_s(lease_s)
        with self._open():
            keys = self._runs.keys(where, None if max_runs is None else max_runs + 1)
        more = max_runs is not None and len(keys) > max_runs
        if more:
            del keys[max_runs:]
        keys.sort(key=_order)  # of many runs it takes longer than a page of them
        with self._open():
            if lease in self._acknowledged:
                raise LeaseError(f"lease {lease!r} is acknowledged already: take another name")
            held = self._leases.get(lease)
            if held is not None and held.where != where:
                raise LeaseError(f"lease {lease!r} is of {held.where}, not of {where}")
            if held is None:
                held = self._leases[lease] = self._take(where, keys, lease, max_bytes)
                held.more |= more
            self._extend(lease, held, lease_s)
            runs = list(held.runs.values())
            for run in runs:
                run.closed = self._is_blocked(run.key)
            return Lease(lease, list(runs), lease_s, held.more)

    def _take(
        self, where: Selection, keys: Iterable[RecordKey], lease: str, max_bytes: int | None
    ) -> Leased:
        taken: dict[RecordKey, Held] = {}
        size, more = 0, False
        for key in keys:
            run = self._runs.get(key)
            if run is None:
                continue
            size += run.bytes
            if max_bytes is not None and size > max_bytes and taken:
                more = True
                break
            taken[key] = run
        for key, run in taken.items():
            self._runs.pop(key)
            self._taken(key)
            self._records -= len(run.records)
            self._hold(run, lease)
            self.recent.handed_out(run, run.bytes)
            self._journal.run(run)
        return Leased(where, taken, 0, 0, more)

    def _hold(self, run: Held, lease: str) -> None:
        run.lease = lease
        self._leased_records += len(run.records)
        self._leased.put(run.key, (self._leased.get(run.key) or set()) | {lease})

    def _extend(self, lease: str, held: Leased, lease_s: float) -> None:
        held.lease_s = lease_s
        held.expires_at = self._clock() + lease_s
        heapq.heappush(self._expiries, (held.expires_at, lease))
        if len(self._expiries) > 2 * len(self._leases) + MAX_REMEMBERED:
            self._expiries = [(each.expires_at, name) for name, each in self._leases.items()]
            heapq.heapify(self._expiries)
        self._journal.lease(lease, held)

    def _unlease(self, lease: str, run: Held) -> None:
        """A run that a lease holds is taken from it."""
        self._leased_records -= len(run.records)
        others = (self._leased.get(run.key) or set()) - {lease}
        if others:
            self._leased.put(run.key, others)
        else:
            self._leased.pop(run.key)

    def ack(self, lease: str) -> int:
        """See `RecordStore.ack`."""
        with self._open():
            if lease in self._acknowledged:
                return 0
            held = self._open_lease(lease)
            del self._leases[lease]
            self._remember(self._acknowledged, lease)
            self._journal.lease(lease, None)
            self._journal.acknowledged(lease)
            count = 0
            for run in held.runs.values():
                self._unlease(lease, run)
                self._bytes -= run.bytes
                count += len(run.records)
                self._journal.deleted(run)
            self._counters["acknowledged"] += count
            return count

    def _open_lease(self, lease: str) -> Leased:
        held = self._leases.get(lease)
        if held is None:
            raise LeaseError(
                f"lease {lease!r} is unknown or has run out; its records are back in the store"
            )
        return held

    def release(self, lease: str) -> int:
        """See `RecordStore.release`."""
        with self._open():
            return self._return(lease) if lease in self._leases else 0

    def extend(self, lease: str, lease_s: float) -> None:
        """See `RecordStore.extend`."""
        _check_lease_s(lease_s)
        with self._open():
            self._extend(lease, self._open_lease(lease), lease_s)

    def _return_expired(self) -> None:
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, lease = heapq.heappop(self._expiries)
            held = self._leases.get(lease)
            if held is not None and held.expires_at <= now:
                self._return(lease)

    def _return(self, lease: str) -> int:
        """Put a lease's runs back; returns how many records."""
        held = self._leases.pop(lease)
        self._journal.lease(lease, None)
        count = 0
        for run in held.runs.values():
            self._unlease(lease, run)
            self._bytes -= run.bytes
            count += len(run.records)
            self.recent.returned(run)
            self._put_back(run)
        self._counters["returned"] += count
        return count

    def _put_back(self, run: Held) -> None:
        whole: Run = run
        last_write, newer = run.last_write, self._runs.get(run.key)
        parts = [run]
        if newer is not None:
            # Recorded while the lease ran: the older records come first again.
            whole, last_write = run.merge(newer), newer.last_write
            again = len(run.records) + len(newer.records) - len(whole.records)
            self._counters["overwritten"] += again
            parts.append(newer)
            self._take_out(newer)
        if (gone := self._recall_gone(run.key)) is not None:
            whole = whole.merge(gone)
        back = Held(whole, next(self._epochs), last_write)
        self._insert(back, oldest=newer is None)
        self._journal.joined(parts, back)

    def block(self, where: Selection) -> None:
        """See `RecordStore.block`; the `MAX_REMEMBERED` blocked last are remembered."""
        with self._open():
            self._remember(self._blocked, name_of(where))
            self._journal.blocked(where)

    @staticmethod
    def _remember(known: OrderedDict[Any, None], item: Any) -> None:
        known[item] = None
        known.move_to_end(item)
        if len(known) > MAX_REMEMBERED:
            known.popitem(last=False)

    def sweep(self, older_than_s: float) -> int:
        """See `RecordStore.sweep`."""
        with self._open():
            limit = self._clock() - older_than_s
            old = [run for _, run in self._runs.oldest_first() if run.last_write < limit]
            swept = sum(self._give_up(run) for run in old if not self._in_flight(run.key))
            self._counters["swept"] += swept
            return swept

    def stats(self) -> StoreStats:
        """See `RecordStore.stats`."""
        with self._open():
            return StoreStats(
                keys=len(self._runs),
                records=self._records,
                bytes=self._bytes,
                max_bytes=self._max_bytes,
                leases=len(self._leases),
                leased_records=self._leased_records,
                blocked_prefixes=len(self._blocked),
                counters=dict(self._counters),
                oldest_age_s=self._oldest_age_s(),
            )

    def _oldest_age_s(self) -> float:
        first = next(self._runs.oldest_first(), None)
        return 0.0 if first is None else self._clock() - first[1].last_write

    def when_safe(self, done: Callable[[Exception | None], None], *, records: bool = False) -> None:
        """See `RecordStore.when_safe`."""
        with self._open():
            pass
        done(None)

    def close(self) -> None:
        """See `RecordStore.close`."""
        with self._lock:
            self._closed = True
            self._runs, self._leased, self._gone = KeyTree(), KeyTree(), KeyTree()
            self._leases.clear()
            self._expiries.clear()
            self._bytes = self._records = self._leased_records = 0


def _check_lease_s(lease_s: float) -> None:
    if not lease_s > 0:
        raise ValueError(f"lease_s is {lease_s}, it must be positive")


def _one_more(dropped: Mapping[str, int], reason: DropReason) -> dict[str, int]:
    return {**dropped, reason.value: dropped.get(reason.value, 0) + 1}
