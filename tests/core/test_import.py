"""Importing the core is cheap: an agent that only writes a reward imports it too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
began = time.process_time()
from recorder_core import *
print(time.process_time() - began)
print(*{name.split(".")[0] for name in sys.modules})
"""
HEAVY = {"torch", "vllm", "sglang", "tinker", "ray", "transformers"}
WEB = {"fastapi", "starlette", "httpx", "uvicorn", "aiohttp"}


def test_importing_the_core_is_cheap_and_pulls_in_no_engine(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    seconds = []
    for _ in range(5):  # the first one compiles
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True
        )
        took, modules = done.stdout.decode().splitlines()
        seconds.append(float(took))
        loaded = set(modules.split())
    assert "recorder_core" in loaded
    assert not loaded & (HEAVY | WEB)
    assert min(seconds) < 0.3


def test_all_that_is_public_is_there_and_nothing_else() -> None:
    import recorder_core

    for name in recorder_core.__all__:
        value = getattr(recorder_core, name)
        assert value.__module__.startswith("recorder_core."), name
    assert set(recorder_core.__all__) <= set(dir(recorder_core))
    with pytest.raises(AttributeError, match="has no attribute 'recrod'"):
        _ = recorder_core.recrod
