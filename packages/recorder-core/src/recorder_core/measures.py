"""How long the recorder's work takes and how large it is, as counts in buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
BYTES = (1e3, 1e4, 1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9, 1e10)


@dataclass(frozen=True)
class Observed:
    """What a histogram has counted up to one moment."""

    buckets: tuple[tuple[float, int], ...]
    """Upper bounds, the last infinite, and how many values were at most that."""
    total: float
    """The sum of all values."""

    @property
    def count(self) -> int:
        """How many values there were."""
        return self.buckets[-1][1]


class Histogram:
    """Counts values by size.

    It takes no lock, as it must cost next to nothing: one thread observes, any may read.

    Args:
        bounds: Upper bounds of the buckets, ascending; one more takes what is larger.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Observed:
        """What has been counted."""
        bounds, counts = (*self._bounds, float("inf")), list(self._counts)
        return Observed(tuple(zip(bounds, accumulate(counts), strict=True)), self._total)


class Measures:
    """A recorder's histograms.

    Two are written for each record, by its thread, and two for each page of a drain, by the event
    loop that serves it.
    """

    __slots__ = ("build_seconds", "drain_bytes", "drain_seconds", "queue_seconds")

    def __init__(self) -> None:
        self.queue_seconds = Histogram(SECONDS)
        """From the end of a generation until the recorder's thread takes it up."""
        self.build_seconds = Histogram(SECONDS)
        """Making a record and storing it, or finding that it is not to be stored."""
        self.drain_seconds = Histogram(SECONDS)
        """Serving a page of a drain to its last byte, without the wait that was asked for."""
        self.drain_bytes = Histogram(BYTES)
        """The size of such a page, as sent."""
