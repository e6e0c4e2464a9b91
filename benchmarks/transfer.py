"""Codec and drain throughput, against pickle and a safetensors blob per tensor and experience."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import numpy as np

from benchmarks import generations
from benchmarks.baseline import baseline_decode, baseline_encode
from benchmarks.harness import (
    Row,
    cpu_microseconds,
    main,
    microseconds,
    no_gc,
    progress,
    row,
)
from benchmarks.served import serving
from recorder_core import Experience, Run, assemble, decode_runs, encode_runs
from recorder_core.client import RecordClient

TARGETS = {"encode": 5.0, "decode": 3.0, "assemble": 8.0}
"""Microseconds of CPU per record of 512 tokens."""
TARGET_OF_BASELINE = 0.2
"""A drain to assembled experiences may take this share of the baseline's time."""


def codec_rows(name: str, runs: list[Run], repeats: int, targets: dict[str, float]) -> list[Row]:
    """The formats alone, in memory."""
    experiences = assemble(runs)
    stream, theirs = encode_runs(runs), baseline_encode(experiences)
    decoded = decode_runs(stream)
    assert assemble(decoded) == experiences
    assert baseline_decode(theirs) == [each.replace(turns=()) for each in experiences]
    count = sum(len(run.records) for run in runs)
    steps: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "encode": (encode_runs, runs),
        "decode": (decode_runs, stream),
        "assemble": (assemble, decoded),
        "baseline: encode": (baseline_encode, experiences),
        "baseline: decode": (baseline_decode, theirs),
    }
    times: dict[str, list[float]] = {step: [] for step in steps}
    for _ in range(repeats):  # in turn: what disturbs one disturbs the others
        for step, (function, argument) in steps.items():
            with no_gc():
                times[step].append(cpu_microseconds(function, argument) / count)
    rows = [row(f"{name}: size against the baseline's", "x", [len(stream) / len(theirs)])]
    for step, each in times.items():
        rows.append(row(f"{name}: {step}", "µs CPU/record", each, targets.get(step)))
    return rows


def drain_rows(count: int, repeats: int) -> list[Row]:
    """Over HTTP: from a server's store to experiences in the trainer's hands."""
    ours: list[float] = []
    theirs: list[float] = []

    def drain() -> list[Experience]:
        with client.drain() as drained:
            return drained.experiences

    def baseline() -> list[Experience]:
        return baseline_decode(http.get("/baseline").content)

    with (
        serving() as server,
        RecordClient(server.url) as client,
        httpx.Client(base_url=server.url, timeout=600) as http,
    ):
        for _ in range(repeats):
            server.call("fill", count, 512, 512)
            server.call("assemble")
            with no_gc():
                theirs.append(microseconds(baseline) / 1000)
                ours.append(microseconds(drain) / 1000)
    ratio = (np.array(ours) / np.array(theirs)).tolist()
    name = f"{count:,} of 512 + 512 tokens, over HTTP"
    return [
        row(f"{name}: drain and assemble", "ms", ours),
        row(f"{name}: baseline", "ms", theirs),
        row(f"{name}: time against the baseline's", "x", ratio, TARGET_OF_BASELINE),
    ]


def measure(quick: bool) -> list[Row]:
    count, repeats = (32, 2) if quick else (1024, 15)
    cases = {
        "256 + 256": ([generations.single(256, 256) for _ in range(count)], TARGETS),
        "512 + 512": ([generations.single(512, 512) for _ in range(count)], {}),
        "20 turns": (
            [
                turn
                for _ in range(2 if quick else 20)
                for turn in generations.conversation(20, 512, 128, 256)
            ],
            {},
        ),
    }
    rows = []
    for name, (turns, targets) in cases.items():
        progress(f"transfer: {name}")
        rows += codec_rows(name, generations.recorded(turns), repeats, targets)
    progress("transfer: over HTTP")
    return rows + drain_rows(count, repeats)


if __name__ == "__main__":
    main(__doc__, measure)
