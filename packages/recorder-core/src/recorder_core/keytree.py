"""A mapping by record key in which a prefix costs what lies under it, and not what lies beside."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from typing import Any, Generic, TypeVar

from recorder_core.keys import KeyPrefix, RecordKey

Value = TypeVar("Value")

Selection = RecordKey | KeyPrefix
"""One run, by its whole key, or all runs under a prefix."""

Name = RecordKey | tuple[str, ...]
"""A selection as a dictionary's key: see `name_of`."""

_order = attrgetter("order")
# A component leads to what is below it, a whole key to nothing: it ends there.
_Node = dict[Any, Any]


def name_of(where: Selection) -> Name:
    """A selection as a dictionary's key: a prefix is its components."""
    return where if isinstance(where, RecordKey) else where.parts


def names_of(key: RecordKey) -> list[Name]:
    """The names of all selections that hold a key: itself, and every prefix of it."""
    parts = key.parts
    return [key, *(parts[:count] for count in range(len(parts) + 1))]


class KeyTree(Generic[Value]):
    """Values by key; remembers which key was written least recently. Not thread-safe."""

    __slots__ = ("_root", "_values")

    def __init__(self) -> None:
        self._values: OrderedDict[RecordKey, Value] = OrderedDict()
        self._root: _Node = {}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._values

    def get(self, key: RecordKey) -> Value | None:
        """The value of one key, or None."""
        return self._values.get(key)

    def put(self, key: RecordKey, value: Value, *, oldest: bool = False) -> None:
        """Set a key's value; it counts as written most recently, or as the oldest of all."""
        if key not in self._values:
            node = self._root
            for part in key.parts[:-1]:
                node = node.setdefault(part, {})
            node[key] = None
        self._values[key] = value
        self._values.move_to_end(key, last=not oldest)

    def pop(self, key: RecordKey) -> Value | None:
        """Take a key out; returns its value, or None where it has none."""
        value = self._values.pop(key, None)
        if value is None:
            return None
        path, parts = [self._root], key.parts[:-1]
        for part in parts:
            path.append(path[-1][part])
        del path[-1][key]
        for part, above in zip(reversed(parts), reversed(path[:-1]), strict=True):
            if above[part]:
                break
            del above[part]
        return value

    def oldest_first(self) -> Iterator[tuple[RecordKey, Value]]:
        """Keys and values, those written least recently first; not to be changed meanwhile."""
        return iter(self._values.items())

    def keys(self, where: Selection, limit: int | None = None) -> list[RecordKey]:
        """The keys that are selected, at most so many, in no order."""
        if isinstance(where, RecordKey):
            return [where] if where in self._values else []
        if not where.parts:
            return list(islice(self._values, limit))
        found: list[RecordKey] = []
        node: Any = self._root
        *above, last = where.parts
        for part in above:
            node = node.get(part)
            if node is None:
                return found
        # The prefix may itself be a whole key, beside being the beginning of others.
        if len(where.parts) > 2:
            try:
                whole = RecordKey.parse(str(where))
            except ValueError:
                pass
            else:
                found += [whole] if whole in self._values else []
        below = [node[last]] if last in node else []
        while below and (limit is None or len(found) < limit):
            for part, value in islice(below.pop().items(), limit):
                if value is None:
                    found.append(part)
                else:
                    below.append(value)
        return found[:limit]

    def items(self, where: Selection) -> list[tuple[RecordKey, Value]]:
        """The keys that are selected and their values, keys in order."""
        found = sorted(self.keys(where), key=_order)
        return [(key, self._values[key]) for key in found]

    def values(self, where: Selection) -> list[Value]:
        """The values of the keys that are selected, keys in order."""
        return [value for _, value in self.items(where)]
