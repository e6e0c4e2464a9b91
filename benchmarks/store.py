"""What the store's calls on one run cost, alone and beside 100,000 keys and 10,000 leases."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from benchmarks import generations
from benchmarks.harness import Row, main, microseconds, no_gc, progress, row
from recorder_core import MemoryStore, RecordKey

TARGET = 1.5
"""A call may take this many times as long in a full store."""
LEASE_S = 600.0


def filled(keys: int, leases: int) -> MemoryStore:
    """A store of so many runs of one turn, and so many leases of one run each beside them."""
    store = MemoryStore(2**40)
    record = generations.record(generations.fresh_key(), 16, 16)
    for each in generations.copies(record, keys + leases):
        store.add(each)
    for number in range(leases):
        store.drain(RecordKey.parse(f"copies/{number // 8}/{number}"), f"lease {number}", LEASE_S)
    stats = store.stats()
    assert (stats.keys, stats.leases) == (keys, leases)
    return store


class Calls:
    """The calls of one run's life, timed one by one.

    Args:
        store: Where the run is added, and drained again.
    """

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._number = itertools.count()
        self.microseconds: dict[str, list[float]] = {}

    def life(self) -> None:
        """One run comes and goes."""
        number, store = next(self._number), self._store
        record = generations.record(RecordKey.parse(f"new/{number}/0"), 16, 16)
        key, lease = record.key, f"new {number}"
        calls: dict[str, Callable[[], object]] = {
            "add": lambda: store.add(record),
            "update": lambda: store.update(key, reward=1.0),
            "keys": lambda: store.keys(key),
            "drain": lambda: store.drain(key, lease, LEASE_S),
            "ack": lambda: store.ack(lease),
        }
        for name, call in calls.items():
            self.microseconds.setdefault(name, []).append(microseconds(call))


def measure(quick: bool) -> list[Row]:
    keys, leases, rounds, lives = (2_000, 200, 5, 10) if quick else (100_000, 10_000, 40, 50)
    progress("store: filling one")
    few, many = Calls(filled(10, 0)), Calls(filled(keys, leases))
    progress("store: calls")
    with no_gc():
        for _ in range(rounds):  # in turn: what disturbs one disturbs the other
            for calls in (few, many):
                for _ in range(lives):
                    calls.life()
    rows = []
    for name, times in many.microseconds.items():
        alone = row(f"{name} of one run: 10 keys", "µs", few.microseconds[name])
        full = row(f"{name} of one run: {keys:,} keys, {leases:,} leases", "µs", times)
        ratio = full.median / alone.median
        rows += [alone, full, row(f"{name} of one run: full against 10 keys", "x", [ratio], TARGET)]
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
