"""What handing turns to a recorder process costs, against recording in the process that serves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from benchmarks import generations
from benchmarks.harness import Row, main, no_gc, progress, row
from recorder_core import Recorder, Turn
from recorder_core.host.process import HostProcess
from recorder_core.host.relay import Relay
from recorder_core.intake import Intake
from recorder_core.options import RecordingOptions

TARGET = 1.0
"""Of the CPU that recording in it takes, a front end may spend so much."""
_TICK = os.sysconf("SC_CLK_TCK")


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used, in steps of a clock tick."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def submitted(intake: Intake, turns: list[Turn], done: Callable[[], bool]) -> float:
    """Microseconds of this process's CPU per turn, until all are out of its hands."""
    began = time.process_time()
    with no_gc():
        for turn in turns:
            intake.submit(turn)
        while not done():
            time.sleep(0.001)
    return (time.process_time() - began) / len(turns) * 1e6


def measure(quick: bool) -> list[Row]:
    """The same turns here, and by way of a relay, in turn."""
    count, repeats = (100, 3) if quick else (2_000, 9)
    here: list[float] = []
    front: list[float] = []
    process: list[float] = []
    host = HostProcess(RecordingOptions(enabled=True))
    with closing(host), closing(Relay(host.folder)) as relay, closing(Recorder()) as recorder:
        for number in range(repeats):
            progress(f"{number + 1} of {repeats}")
            turns = [generations.single(512, 512) for _ in range(count)]
            here.append(submitted(recorder, turns, lambda: recorder.pending() == 0))
            before = cpu_of(host.pid)
            front.append(submitted(relay, turns, lambda: not relay._unsettled and relay.idle))
            process.append((cpu_of(host.pid) - before) / count * 1e6)
    ratios = [one / other for one, other in zip(front, here, strict=True)]
    return [
        row("CPU of a turn of 512 + 512 tokens, recorded in the front end", "µs", here),
        row("the same, handed over: of the front end", "µs", front),
        row("the same, handed over: of the recorder process", "µs", process),
        row("front end, handed over / recorded", "x", ratios, TARGET),
    ]


if __name__ == "__main__":
    main(__doc__, measure)
