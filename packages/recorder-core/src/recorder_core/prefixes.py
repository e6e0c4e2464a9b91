"""Hashes of every prefix of a token sequence, and a table of prefixes seen before.

The hash is multilinear over 2^64 with secret random weights, taken twice: the prefix `t[:n]` has
the two sums of `weight[i] * (t[i] + 1)`. Every prefix of a sequence is one cumulative sum away,
so looking a prompt up costs time linear in it, however many prefixes the table holds. For a
vocabulary under 2^18 two different sequences of one length agree in both sums with a chance below
2^-92 (Lemire and Kaser, "Strongly universal string hashing is fast", 2014), and the weights differ
in every process, so that no client can aim for it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from recorder_core.arrays import AnyArray

Uint64Array = npt.NDArray[np.uint64]
Mark = TypeVar("Mark")

_ONE = np.uint64(1)
_rng = np.random.default_rng(secrets.randbits(128))
_weights: Uint64Array = np.empty((2, 0), dtype=np.uint64)
_growing = threading.Lock()


def _weights_to(count: int) -> Uint64Array:
    global _weights
    weights = _weights
    if weights.shape[1] < count:
        with _growing:
            missing = max(count, 2 * _weights.shape[1], 4096) - _weights.shape[1]
            fresh = _rng.integers(0, 2**64, size=(2, missing), dtype=np.uint64)
            _weights = weights = np.concatenate([_weights, fresh], axis=1)
    return weights


class Prefix(NamedTuple):
    """A token sequence, known by its length and its two sums."""

    length: int
    first: int
    second: int


EMPTY = Prefix(0, 0, 0)


class Prefixes:
    """Every prefix of a sequence that ends in `tokens` and begins with `base`.

    Args:
        tokens: int32 [n], the tokens after `base`.
        base: What comes before them.
        marked: Positions at which something stands beside the token, and what; sequences that
            differ in it are different. Those outside `tokens` are passed over.
    """

    __slots__ = ("base_length", "first", "second")

    def __init__(
        self,
        tokens: AnyArray,
        base: Prefix = EMPTY,
        marked: Iterable[tuple[int, Hashable]] = (),
    ) -> None:
        end = base.length + len(tokens)
        weights = _weights_to(end)[:, base.length : end]
        values = tokens.astype(np.uint64) + _ONE
        for position, what in marked:
            if base.length <= position < end:
                # In place on a slice: arrays wrap around in silence, numpy scalars warn.
                index = position - base.length
                values[index : index + 1] += np.uint64(hash(what) % 2**64)
        self.base_length = base.length
        self.first = _running_sum(weights[0], values, base.first)
        self.second = _running_sum(weights[1], values, base.second)

    def at(self, length: int) -> Prefix:
        """The prefix of that many tokens, `base` counted in."""
        index = length - self.base_length
        return Prefix(length, int(self.first[index]), int(self.second[index]))


def _running_sum(weights: Uint64Array, values: Uint64Array, base: int) -> Uint64Array:
    sums = np.empty(len(values) + 1, dtype=np.uint64)
    sums[0] = base
    np.multiply(weights, values, out=sums[1:])
    return np.cumsum(sums, out=sums)


class PrefixTable(Generic[Mark]):
    """One mark per known prefix, found again in any sequence that begins with it."""

    __slots__ = ("_filter", "_marks")

    def __init__(self) -> None:
        self._marks: dict[Prefix, Mark] = {}
        # One flag per hash bucket: rules almost every prefix out without a dictionary lookup.
        self._filter: npt.NDArray[np.bool_] = np.zeros(64, dtype=np.bool_)

    def at(self, prefix: Prefix, new: Callable[[], Mark]) -> Mark:
        """The mark at a prefix; `new` makes it when the prefix is not known yet."""
        mark = self._marks.get(prefix)
        if mark is None:
            mark = self._marks[prefix] = new()
            if 32 * len(self._marks) > len(self._filter):
                self._filter = np.zeros(4 * len(self._filter), dtype=np.bool_)
                known = (each.first for each in self._marks)
                first = np.fromiter(known, dtype=np.uint64, count=len(self._marks))
                self._filter[self._buckets(first)] = True
            self._filter[prefix.first & (len(self._filter) - 1)] = True
        return mark

    def _buckets(self, first: Uint64Array) -> Uint64Array:
        buckets: Uint64Array = first & np.uint64(len(self._filter) - 1)
        return buckets

    def longest_first(self, prefixes: Prefixes, up_to: int) -> Iterator[tuple[int, Mark]]:
        """The marks at a sequence's prefixes, from `up_to` tokens down to its base.

        Yields:
            The prefix's length and its mark.
        """
        first = prefixes.first[: up_to - prefixes.base_length + 1]
        for index in np.flatnonzero(self._filter[self._buckets(first)])[::-1].tolist():
            length = prefixes.base_length + index
            mark = self._marks.get(prefixes.at(length))
            if mark is not None:
                yield length, mark
