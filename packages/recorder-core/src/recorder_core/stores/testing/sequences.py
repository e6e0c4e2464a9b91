"""Calls in any order, and what a store's accounts have to be after each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from recorder_core.drops import DropReason
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.keytree import Selection
from recorder_core.records import Record
from recorder_core.runs import Run
from recorder_core.stores.base import RecordStore, StoreStats
from recorder_core.stores.testing.given import ALL, LONG_S, child, root

_KEYS = [RecordKey.parse(text) for text in ("1/a/0", "1/a/0/1", "1/a/1", "1/b/0", "2/a/0")]
_SELECTIONS: list[Selection] = [ALL, KeyPrefix("1"), KeyPrefix("1/a"), KeyPrefix("1/a/0"), *_KEYS]


class OpenLease(NamedTuple):
    """A lease that is not over, and what was asked for."""

    where: Selection
    id: str


def accounted_for(stats: StoreStats) -> int:
    """Records held, and those of which a counter says what became of them."""
    gone = ("acknowledged", "removed", "overwritten", "evicted", "swept")
    fates = sum(stats.counters.get(fate, 0) for fate in gone)
    return stats.records + stats.leased_records + fates


def check_accounts(store: RecordStore, leases: Iterable[OpenLease]) -> tuple[list[Run], list[Run]]:
    """Count again, and compare; `leases` are all that are open.

    Returns:
        The runs in sight, and those leased.
    """
    stats, summaries, runs = store.stats(), store.keys(ALL), store.get(ALL)
    # Asked again, a lease gives what it gave, less what was deleted since.
    leased = [run for each in leases for run in store.drain(each.where, each.id, LONG_S).runs]
    assert accounted_for(stats) == stats.counters.get("stored", 0)
    assert [each.key for each in summaries] == [run.key for run in runs]
    assert [each.records for each in summaries] == [len(run.records) for run in runs]
    assert [each.rewarded for each in summaries] == [run.rewarded for run in runs]
    assert stats.keys == len(runs)
    assert stats.records == sum(each.records for each in summaries)
    assert stats.leased_records == sum(len(run.records) for run in leased)
    assert 0 <= sum(each.bytes for each in summaries) <= stats.bytes <= stats.max_bytes
    if not leased:
        assert sum(each.bytes for each in summaries) == stats.bytes
    return runs, leased


class RandomSequence:
    """Makes one call after the other, on a few runs, some of them in flight.

    Args:
        store: The store.
        random: Decides.
    """

    def __init__(self, store: RecordStore, random: random.Random) -> None:
        self.leases: list[OpenLease] = []
        """Those that are open."""
        self._store = store
        self._random = random
        self._names = (f"n{number}" for number in itertools.count())
        self._in_flight: RecordKey | None = None
        store.watch(lambda key: key == self._in_flight)

    def step(self) -> None:
        """Make one call."""
        calls = {
            self._add: 12,
            self._update: 4,
            self._note: 2,
            self._overwrite: 1,
            self._remove: 1,
            self._drain: 4,
            self._end_lease: 4,
            self._sweep: 0.3,
        }
        self._in_flight = self._random.choice([None, *_KEYS])
        (call,) = self._random.choices(list(calls), list(calls.values()))
        call()

    def end(self) -> None:
        """Take everything away."""
        for lease in self.leases:
            self._store.ack(lease.id)
        self._store.remove(ALL)

    def _key(self) -> RecordKey:
        return self._random.choice(_KEYS)

    def _record(self, key: RecordKey) -> Record:
        known = [record for run in self._store.get(key) for record in run.records.values()]
        parent = self._random.choice([None, *known])
        if parent is not None and self._random.random() < 0.8:
            return child(parent, next(self._names))
        # Now and then one that is, or was, there.
        name = self._random.choice([next(self._names), "again"])
        return root(name, key, tokens=self._random.choice([1, 20, 300]))

    def _add(self) -> None:
        key = self._key()
        record = self._record(key)
        self._store.add(record, self._random.choice([None, self._store.epoch(key), 1]))

    def _update(self) -> None:
        sample_ids = self._random.choice([None, ["again", "absent"]])
        info = self._random.choice([None, {"note": "x" * self._random.randrange(500)}])
        rewards = self._random.choice([None, [0.5]])
        with suppress(ValueError):  # where it does not fit nothing is changed
            self._store.update(
                self._key(),
                sample_ids=sample_ids,
                reward=self._random.choice([None, 1.0, float("nan")]),
                info=info,
                token_level_reward=rewards,
            )

    def _note(self) -> None:
        self._store.note_dropped(self._key(), self._random.choice(list(DropReason)))
        self._store.amend(self._key(), "again", delivered=True, flag="odd")

    def _overwrite(self) -> None:
        key = self._key()
        first = root(next(self._names), key)
        records = [first, child(first, next(self._names))]
        with suppress(ValueError):
            self._store.overwrite(key, records[: self._random.randrange(3)])

    def _remove(self) -> None:
        self._store.remove(self._random.choice(_SELECTIONS[1:]))

    def _drain(self) -> None:
        lease = OpenLease(self._random.choice(_SELECTIONS), next(self._names))
        self._store.drain(*lease, LONG_S, self._random.choice([None, 1, 5_000]))
        self.leases.append(lease)

    def _end_lease(self) -> None:
        if not self.leases:
            return
        lease = self.leases.pop(self._random.randrange(len(self.leases)))
        self._random.choice([self._store.ack, self._store.release])(lease.id)

    def _sweep(self) -> None:
        self._store.sweep(0.0)
