"""Generations in flight: how many there are under a key or prefix, and when there are none."""

from __future__ import annotations

from collections.abc import Callable

from recorder_core.keys import RecordKey
from recorder_core.keytree import KeyTree, Name, Selection, name_of, names_of


class _Waiting:
    """Those who want to know when nothing is in flight any more under one key or prefix."""

    __slots__ = ("count", "told")

    def __init__(self, count: int) -> None:
        self.count = count
        self.told: dict[object, Callable[[], None]] = {}


class InFlight:
    """Counts by key. Not thread-safe: its owner's lock guards it."""

    def __init__(self) -> None:
        self.total = 0
        """Generations in flight, under all keys."""
        self._counts: KeyTree[int] = KeyTree()
        self._waiting: dict[Name, _Waiting] = {}

    def add(self, key: RecordKey) -> None:
        """A generation began."""
        self.total += 1
        self._counts.put(key, (self._counts.get(key) or 0) + 1)
        for name in names_of(key) if self._waiting else ():
            if (waiting := self._waiting.get(name)) is not None:
                waiting.count += 1

    def remove(self, key: RecordKey) -> list[Callable[[], None]]:
        """A generation ended; returns whom to tell that there are no more, outside the lock."""
        self.total -= 1
        left = (self._counts.get(key) or 0) - 1
        if left > 0:
            self._counts.put(key, left)
        else:
            self._counts.pop(key)
        told: list[Callable[[], None]] = []
        for name in names_of(key) if self._waiting else ():
            if (waiting := self._waiting.get(name)) is not None:
                waiting.count -= 1
                if not waiting.count:
                    told += waiting.told.values()
                    del self._waiting[name]
        return told

    def count(self, where: Selection) -> int:
        """How many are in flight there."""
        if isinstance(where, RecordKey):
            return self._counts.get(where) or 0
        return sum(self._counts.values(where)) if where.parts else self.total

    def by_key(self, where: Selection) -> dict[RecordKey, int]:
        """As `count`, key by key, in the order of the keys."""
        return dict(self._counts.items(where))

    def when_none(self, where: Selection, done: Callable[[], None]) -> Callable[[], None] | None:
        """Have `done` called once nothing is in flight there; None if nothing is.

        Returns:
            What calls it off; it may be called without the lock, at any time.
        """
        count = self.count(where)
        if not count:
            return None
        waiting = self._waiting.setdefault(name_of(where), _Waiting(count))
        token = object()
        waiting.told[token] = done
        # One operation on one dictionary; the rest goes with the last generation there.
        return lambda: waiting.told.pop(token, None) and None
