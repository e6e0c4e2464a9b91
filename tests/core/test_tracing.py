"""Spans from requests to records: tracing is never turned on, and never costs a record.

What a real engine's exporter sends is in `tests/vllm/test_tracing.py`.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from recorder_core import RecordKey, Recorder
from recorder_core.records import FinishReason, Turn

KEY = RecordKey.parse("0/task/0")

def record_one(recorder):
    recorder.submit(Turn(KEY, [1, 2], [3], FinishReason.STOP, [-0.5], request_id="req"))
    assert recorder.flush(10)
"""
UNTOUCHED = """
record_one(Recorder())
assert not any(name.startswith("opentelemetry") for name in sys.modules)
"""
OFF = """
import opentelemetry.trace
from recorder_core import tracing

record_one(Recorder())
assert not tracing.is_on()
assert "opentelemetry.trace.propagation.tracecontext" not in sys.modules
"""
BROKEN = """
from opentelemetry import trace
from recorder_core import tracing

class Broken(trace.TracerProvider):
    def get_tracer(self, *args, **kwargs):
        raise OSError("no collector")

trace.set_tracer_provider(Broken())
assert tracing.is_on()
recorder = Recorder()
record_one(recorder)
record_one(recorder)
stats = recorder.stats()
assert (stats.recorded, stats.errors, stats.dropped, stats.pending) == (2, 2, {}, 0), stats
"""


def run(program: str) -> str:
    """Runs in an interpreter of its own: a process has one tracer provider, for good."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return done.stderr


def test_recording_imports_no_opentelemetry() -> None:
    run(UNTOUCHED)


def test_tracing_stays_off_where_no_one_turned_it_on() -> None:
    run(OFF)


def test_a_fault_of_the_tracer_costs_no_record() -> None:
    assert "request req of 0/task/0 has no span" in run(BROKEN)
