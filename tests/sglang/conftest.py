"""Real SGLang servers; each starts on first use (half a minute) and is shared by all that can."""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from examples.sglang_server import ENVIRONMENT, SGLangServer

os.environ.update(ENVIRONMENT)  # SGLang asks once, when it is imported, whether it is on a CPU
import sglang

from recorder_core.client import RecordClient
from tests.models import tiny_qwen3, tiny_qwen3_moe_wide

ADMIN_KEY = "admin-key-of-the-tests"
ENGINE_KEY = "engine-key-of-the-tests"
SERVING = ["--dtype", "float32", "--tool-call-parser", "qwen25", "--enable-metrics"]
"""What the recording server and its twin without recording have in common."""
LONG_TOKENS = 150
"""Generations of so many tokens and more are paced, at 10 ms for each."""
PACED = {"RECORDER_TESTS_PACED_TOKENS": str(LONG_TOKENS)}


@pytest.fixture(scope="session")
def engine_version() -> Version:
    """The release of the engine."""
    return Version(sglang.__version__)


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers' output goes."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def recording_server(log_folder: Path) -> Iterator[SGLangServer]:
    """The tiny model in float32, with recording; the admin key is SGLang's own."""
    args = ["--enable-recording", "--admin-api-key", ADMIN_KEY, *SERVING]
    log = log_folder / "recording.log"
    with SGLangServer(tiny_qwen3(), *args, env=PACED, log=log) as server:
        yield server


@pytest.fixture(scope="session")
def record_client(recording_server: SGLangServer) -> Iterator[RecordClient]:
    """A client of the recording server's `/records` that holds the admin key."""
    with RecordClient(recording_server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


@pytest.fixture(scope="session")
def plain_server(log_folder: Path) -> Iterator[SGLangServer]:
    """The recording server's twin, without recording."""
    with SGLangServer(tiny_qwen3(), *SERVING, log=log_folder / "plain.log") as server:
        yield server


@pytest.fixture(scope="session")
def moe_server(log_folder: Path) -> Iterator[SGLangServer]:
    """A mixture of experts behind an API key, that serves two at a time.

    It streams increments, and its logprobs are those before temperature.
    """
    args = [
        *["--enable-recording", "--recording-routed-experts", "--dtype", "float32"],
        *["--api-key", ENGINE_KEY, "--max-running-requests", "2"],
        *["--incremental-streaming-output", "--stream-interval", "4"],
    ]
    env = {**PACED, "RECORDER_ADMIN_KEY": ADMIN_KEY, "SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    with SGLangServer(tiny_qwen3_moe_wide(), *args, env=env, log=log_folder / "moe.log") as server:
        yield server


@pytest.fixture(scope="session")
def moe_client(moe_server: SGLangServer) -> Iterator[RecordClient]:
    """A client of the other server's `/records`."""
    with RecordClient(moe_server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


@pytest.fixture
def fresh_key(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Makes record keys that nothing else uses; those of one test share their batch and task."""
    task = re.sub(r"[^A-Za-z0-9_-]+", "-", request.node.name)[:100]
    batch = secrets.token_hex(4)
    runs = itertools.count()
    return lambda: f"{batch}/{task}/{next(runs)}"
