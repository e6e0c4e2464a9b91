"""Time on the recorder's thread per turn, and of `submit` on the engine's."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from benchmarks import generations
from benchmarks.harness import Row, main, microseconds, no_gc, progress, row
from recorder_core import Recorder, Turn
from recorder_core.measures import Measures

TARGET_BRANCHES = 2.0
"""An insert under a key with 10,000 branches may take this many times one with a single branch."""
TARGET_MEASURES = 1.0
"""Microseconds that the histograms of `/metrics` may take of a turn."""


def record_times(recorder: Recorder, turns: Iterable[Turn]) -> list[float]:
    """Microseconds of building each record, finding its parent and storing it.

    Called here and not on the recorder's thread, where the waiting would be timed as well.
    """
    with no_gc():
        return [microseconds(recorder._record, turn) for turn in turns]


def branches(existing: int, repeats: int) -> tuple[list[float], list[float]]:
    """Microseconds to record one more branch: under a key with one, and with many.

    Returns:
        The times with one and with `existing`, taken in turn.
    """
    recorder = Recorder()

    def grow(count: int) -> tuple[Turn, list[int]]:
        """A run whose first turn was continued `count` times."""
        root = generations.single(256, 256)
        path = [*root.prompt_ids, *root.response_ids]
        recorder._record(root)
        for _ in range(count):
            recorder._record(branch(root, path, 16))
        return root, path

    def branch(root: Turn, path: list[int], size: int) -> Turn:
        prompt = [*path, *generations.ids(size)]
        return generations.generation(root.key, prompt, generations.ids(size))

    many = grow(existing)
    few = [grow(1) for _ in range(repeats)]
    pairs = [(branch(*one, 512), branch(*many, 512)) for one in few]
    with no_gc():
        times = [
            (microseconds(recorder._record, one), microseconds(recorder._record, other))
            for one, other in pairs
        ]
    recorder.close()
    return [one for one, _ in times], [other for _, other in times]


def submit_times(count: int, burst: int) -> list[float]:
    """Microseconds of `submit`, with `burst` generations that finish in one step of the engine."""
    recorder = Recorder()
    times = []
    with no_gc():
        for _ in range(count // burst):
            turns = [generations.single(512, 512) for _ in range(burst)]
            times += [microseconds(recorder.submit, turn) for turn in turns]
            recorder.flush()
    recorder.close()
    return times


def measure_times(count: int) -> list[float]:
    """Microseconds of what is measured of one turn, each the mean of many."""
    measures = Measures()

    def a_hundred_turns() -> None:
        for _ in range(100):
            queued = began = time.perf_counter()
            measures.queue_seconds.observe(began - queued)
            measures.build_seconds.observe(time.perf_counter() - began)

    with no_gc():
        return [microseconds(a_hundred_turns) / 100 for _ in range(count)]


def measure(quick: bool) -> list[Row]:
    many = 20 if quick else 500
    few = 2 if quick else 20
    recorder = Recorder()
    record_times(recorder, (generations.single(64, 64) for _ in range(few)))  # warm up

    progress("recording: turns")
    short = record_times(recorder, (generations.single(512, 512) for _ in range(many)))
    talks = [
        record_times(recorder, generations.conversation(20, 512, 128, 256)) for _ in range(few)
    ]
    long = record_times(recorder, (generations.single(32_768, 8_192) for _ in range(few)))
    recorder.close()
    rows = [
        row("512 + 512 tokens: build, parent, store", "µs/turn", short),
        row(
            "20 turns, 8,064 tokens: mean of the turns",
            "µs/turn",
            [float(np.mean(times)) for times in talks],
        ),
        row("20 turns, 8,064 tokens: the last turn", "µs/turn", [times[-1] for times in talks]),
        row("32,768 + 8,192 tokens", "µs/turn", long),
    ]

    progress("recording: branches")
    existing = 100 if quick else 10_000
    with_one, with_many = branches(existing, many)
    ratio = [other / one for one, other in zip(with_one, with_many, strict=True)]
    rows += [
        row("a branch, 1 there: 1,024 + 512 tokens", "µs/turn", with_one),
        row(f"a branch, {existing:,} there", "µs/turn", with_many),
        row(f"a branch: {existing:,} against 1", "x", ratio, TARGET_BRANCHES),
    ]

    progress("recording: histograms")
    rows.append(row("what is measured of a turn", "µs", measure_times(many), TARGET_MEASURES))

    progress("recording: submit")
    for burst, name in ((1, "the thread idle"), (64, "64 at once")):
        times = submit_times(64 if quick else 2048, burst)
        rows.append(row(f"submit, 512 + 512 tokens, {name}", "µs", times))
        rows.append(
            row(f"submit, {name}: 99th percentile", "µs", [float(np.percentile(times, 99))])
        )
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
