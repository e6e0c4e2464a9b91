"""The recorder's counters, sizes and histograms, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isinf

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from recorder_core.drops import DropReason
from recorder_core.errors import StoreClosedError
from recorder_core.measures import Histogram, Measures
from recorder_core.recorder import Recorder
from recorder_core.stores import StoreStats
from recorder_core.stores.base import FATES

# From the start, and not from the first one on: of a counter that was not there before, Prometheus
# does not see the first increase.
_NO_DROPS = dict.fromkeys((reason.value for reason in DropReason), 0)
_NO_FATES = dict.fromkeys(FATES, 0)


class RecorderCollector(Collector):
    """Reads what a recorder has counted when Prometheus asks, and costs nothing otherwise.

    Args:
        recorder: Whose counters.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        """One family per counter, size and histogram."""
        stats = self._recorder.stats()
        yield _counter("started", "Generations that carried a record key.", stats.started)
        yield _counter("extended", "Records that continue an earlier one.", stats.extended)
        yield _counter("roots", "Records that begin a trajectory.", stats.roots)
        yield _counter(
            "prefix_breaks",
            "Records whose prompt repeats an earlier prompt but not the tokens sampled after it.",
            stats.prefix_break,
        )
        yield _counter("superseded", "Answers not delivered and asked again.", stats.superseded)
        yield _counter("errors", "Exceptions caught by the recorder.", stats.errors)
        dropped = _NO_DROPS | stats.dropped
        yield _labelled("dropped", "Generations not stored.", "reason", dropped)
        yield _labelled("flagged", "Records that carry a flag.", "flag", stats.flagged)
        yield _labelled("unkeyed", "Generations without a record key.", "reason", stats.unkeyed)
        yield _gauge("pending", "Generations in flight or waiting to be stored.", stats.pending)
        yield from _measured(self._recorder.measures)
        try:
            store = self._recorder.store.stats()
        except StoreClosedError:
            return
        yield from _stored(store)


def _measured(measures: Measures) -> Iterator[Metric]:
    yield _histogram(
        "queue_seconds",
        "From the end of a generation until the recorder's thread takes it up.",
        measures.queue_seconds,
    )
    yield _histogram(
        "build_seconds",
        "Making a record and storing it, on the recorder's thread.",
        measures.build_seconds,
    )
    yield _histogram(
        "drain_seconds",
        "Serving a page of a drain to its last byte, without the wait that was asked for.",
        measures.drain_seconds,
    )
    yield _histogram("drain_bytes", "The size of a page of a drain.", measures.drain_bytes)


def _stored(store: StoreStats) -> Iterator[Metric]:
    yield _gauge("store_runs", "Runs in sight: those not leased.", store.keys)
    yield _gauge("store_records", "Records in sight.", store.records)
    yield _gauge("store_leases", "Leases that are open.", store.leases)
    yield _gauge("store_leased_records", "Records that are leased.", store.leased_records)
    yield _gauge("store_bytes", "Bytes held, leased records included.", store.bytes)
    yield _gauge("store_max_bytes", "Bytes that may be held.", store.max_bytes)
    if store.oldest_age_s is not None:
        yield _gauge(
            "store_oldest_run_age_seconds",
            "Since something was added to the run that has waited longest for a drain.",
            store.oldest_age_s,
        )
    fates = _NO_FATES | store.counters
    yield _labelled("store_fates", "Records by what became of them.", "fate", fates)


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"recorder_{name}", text, value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"recorder_{name}", text, value)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    seen = histogram.read()
    buckets = [("+Inf" if isinf(bound) else str(bound), count) for bound, count in seen.buckets]
    return HistogramMetricFamily(f"recorder_{name}", text, buckets, seen.total)


def _labelled(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"recorder_{name}", text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family
