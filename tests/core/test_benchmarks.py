"""The benchmarks that need no engine run and report; what they report is no matter here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


# They are run on the newer Pythons, and take a while.
@pytest.mark.skipif(sys.version_info < (3, 11), reason="on a newer Python")
@pytest.mark.parametrize(
    "name",
    ["assembly", "draining", "export", "memory", "recording", "sqlite", "store", "transfer"],
)
def test_a_quick_benchmark_reports_valid_json(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", "-"],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["quick"]
    assert report["machine"]["cores"] >= 1
    assert report["rows"]
    for row in report["rows"]:
        assert row["benchmark"] == name
        assert row["low"] <= row["median"] <= row["high"]
        assert row["met"] == (None if row["target"] is None else row["median"] <= row["target"])
