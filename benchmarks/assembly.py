"""Time and memory of `assemble`, and how they grow with what is assembled."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

from benchmarks import generations
from benchmarks.harness import Row, main, microseconds, no_gc, progress, row
from recorder_core import Run, assemble

TARGET_GROWTH = 2.4
"""Twice as much may take so many times as long, or as much memory: linear, with room for noise."""


def turns(count: int) -> list[Run]:
    """One run of many turns, each continuing the last."""
    record = generations.record(generations.fresh_key(), 512, 32)
    records = [record]
    for _ in range(count - 1):
        record = generations.record(record.key, 32, 32, record)
        records.append(record)
    return [Run(record.key, records)]


def branches(prefix: int, count: int) -> list[Run]:
    """One run whose long first turn was continued many times."""
    root = generations.record(generations.fresh_key(), prefix, 32)
    records = [generations.record(root.key, 32, 32, root) for _ in range(count)]
    return [Run(root.key, [root, *records])]


def singles(count: int) -> list[Run]:
    """Many runs of one turn each."""
    record = generations.record(generations.fresh_key(), 256, 256)
    return [Run(each.key, [each]) for each in generations.copies(record, count)]


def milliseconds(runs: list[Run]) -> float:
    """The time that it takes."""
    with no_gc():
        return microseconds(assemble, runs) / 1000


def megabytes(runs: list[Run]) -> float:
    """The most memory that it takes at any moment, the experiences included."""
    tracemalloc.start()
    try:
        experiences = assemble(runs)
        return tracemalloc.get_traced_memory()[1] / 1e6 if experiences else 0.0
    finally:
        tracemalloc.stop()


def growth_rows(name: str, half: list[Run], whole: list[Run], repeats: int) -> list[Row]:
    """What assembling takes, and how many times what half as much does."""
    milliseconds(half)  # warms up
    times = [(milliseconds(half), milliseconds(whole)) for _ in range(repeats)]
    memory = megabytes(whole)
    return [
        row(name, "ms", [each for _, each in times]),
        row(
            f"{name}: time against half of it",
            "x",
            [each / other for other, each in times],
            TARGET_GROWTH,
        ),
        row(f"{name}: memory", "MB", [memory]),
        row(
            f"{name}: memory against half of it",
            "x",
            [memory / megabytes(half)],
            TARGET_GROWTH,
        ),
    ]


def measure(quick: bool) -> list[Row]:
    scale, repeats = (20, 2) if quick else (1, 5)
    cases: dict[str, tuple[Callable[[int], list[Run]], int]] = {
        "turns in one run": (turns, 2_000 // scale),
        "branches of a prefix of 100,000 tokens": (
            lambda count: branches(100_000 // scale, count),
            200 // scale,
        ),
        "records of 512 tokens": (singles, 20_000 // scale),
    }
    rows = []
    for name, (make, count) in cases.items():
        progress(f"assembly: {name}")
        rows += growth_rows(f"{count:,} {name}", make(count // 2), make(count), repeats)
    conversation = generations.recorded(generations.conversation(20, 512, 128, 256))
    times = [milliseconds(conversation) for _ in range(10 * repeats)]
    rows.append(row("20 turns, 8,064 tokens", "ms", times))
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
