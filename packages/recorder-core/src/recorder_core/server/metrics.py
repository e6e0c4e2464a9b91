"""The recorder's counters, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from recorder_core.errors import StoreClosedError
from recorder_core.recorder import Recorder


class RecorderCollector(Collector):
    """Reads a recorder's counters when Prometheus asks, and costs nothing otherwise.

    Args:
        recorder: Whose counters.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        """One family per counter."""
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
        yield _labelled("dropped", "Generations not stored.", "reason", stats.dropped)
        yield _labelled("flagged", "Records that carry a flag.", "flag", stats.flagged)
        yield _labelled("unkeyed", "Generations without a record key.", "reason", stats.unkeyed)
        yield GaugeMetricFamily(
            "recorder_pending", "Generations in flight or waiting to be stored.", stats.pending
        )
        try:
            store = self._recorder.store.stats()
        except StoreClosedError:
            return
        yield GaugeMetricFamily("recorder_store_records", "Records stored.", store.records)
        yield GaugeMetricFamily("recorder_store_bytes", "Bytes held.", store.bytes)
        yield _labelled("store_fates", "Records by what became of them.", "fate", store.counters)


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"recorder_{name}", text, value)


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"recorder_{name}", text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family
