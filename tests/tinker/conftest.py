"""One Tinker API server for all tests (half a minute), and recorders of their own."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Read when the SDK is imported: nothing is to leave this machine.
os.environ["TINKER_TELEMETRY"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import tinker
from packaging.version import Version
from tinker import types

from recorder_core.client import RecordClient
from tests.models import tiny_qwen3_float32
from tests.tinker.servers import ADMIN_KEY, RecordingServer, SkyRLServer
from tinker_recorder import TinkerRecorder

SDK = Version(tinker.__version__)
API_KEY = "tml-tests"


def finished(value: Any) -> Any:
    """What the SDK gives at once in older versions and as a future in newer ones."""
    return value.result() if hasattr(value, "result") else value


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of the base model, which is also its name."""
    return tiny_qwen3_float32()


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyRLServer]:
    """SkyRL's Tinker API server: as released for the SDK that it was made for."""
    log = tmp_path_factory.mktemp("skyrl") / "server.log"
    with SkyRLServer(model, sequence_ids=Version("0.26") <= SDK, log=log) as running:
        yield running


@pytest.fixture(scope="session")
def service(server: SkyRLServer) -> Iterator[tinker.ServiceClient]:
    """The SDK's own client of the server."""
    client = tinker.ServiceClient(base_url=server.base_url, api_key=API_KEY)
    yield client
    # An answer that its HTTP client's own threads get while the interpreter ends aborts it, with or
    # without a recorder: no request begins after this, and the server's end answers the last ones.
    loop = client.holder.get_loop()
    loop.call_soon_threadsafe(loop.stop)
    while loop.is_running():
        time.sleep(0.01)


@pytest.fixture
def recorder() -> Iterator[TinkerRecorder]:
    """A recorder at work."""
    with_records = TinkerRecorder()
    with_records.instrument()
    yield with_records
    with_records.close()


@pytest.fixture
def client(
    recorder: TinkerRecorder, service: tinker.ServiceClient, model: Path
) -> tinker.SamplingClient:
    """A sampling client of the base model, made while recording."""
    return finished(service.create_sampling_client(base_model=str(model)))


@pytest.fixture
def fresh_key(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Makes record keys that nothing else uses; those of one test share their batch."""
    task = re.sub(r"[^A-Za-z0-9_-]+", "-", request.node.name)[:100]
    batch = secrets.token_hex(4)
    runs = itertools.count()
    return lambda: f"{batch}/{task}/{next(runs)}"


@pytest.fixture
def params() -> types.SamplingParams:
    """Always of this length: the server compiles once for each."""
    return types.SamplingParams(max_tokens=8, temperature=1.0, stop=[])


@pytest.fixture(scope="session")
def recording_server(
    server: SkyRLServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RecordingServer]:
    """`tinker-recorder serve` as it is started at the command line."""
    log = tmp_path_factory.mktemp("serve") / "server.log"
    args = [
        *["--served-model-name", "tiny", "--max-tokens", "8"],
        *["--renderer", '{"name": "qwen3", "enable_thinking": false}'],
    ]
    with RecordingServer(server, *args, log=log) as running:
        yield running


@pytest.fixture
def records(recording_server: RecordingServer) -> Iterator[RecordClient]:
    """A client of its `/records` that holds the admin key."""
    with RecordClient(recording_server.base_url, admin_key=ADMIN_KEY) as client:
        yield client
