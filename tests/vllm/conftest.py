"""Real vLLM servers; each starts on first use (half a minute) and is shared by all that can."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vllm
from packaging.version import Version

from examples.vllm_server import VLLMServer
from recorder_core.client import RecordClient
from tests.models import tiny_lora, tiny_qwen3

ADMIN_KEY = "admin-key-of-the-tests"
ENGINE_KEY = "engine-key-of-the-tests"
"""What `--api-key` of the keyed server is."""
ADAPTER = "tiny-lora"
"""The name under which the servers serve the LoRA adapter."""
MAX_MODEL_LEN = 8192
"""Room for generations that still run when a starved client gets to leave them."""
UNTESTED = "99.0.0"
"""What is newer than any release that is tested."""
AS_UNTESTED = f"""\
import vllm
vllm.__version__ = "{UNTESTED}"
from vllm.entrypoints.cli.main import main
main()
"""
"""The `vllm` command of such a release."""
PACED = ["--logits-processors", "tests.vllm.pacing:Pace"]
"""Long generations take their time."""

# What the recording server and its twin without recording have in common.
SERVING = [
    *["--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)],
    "--enable-prefix-caching",
    *PACED,
    *["--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
]
if Version(vllm.__version__) >= Version("0.30.0"):
    SERVING += ["--enable-scale-out"]  # /inference/v1/generate; older releases always serve it
ENV = {
    "PYTHONPATH": os.pathsep.join(  # for `PACED`
        [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
    "RECORDER_ADMIN_KEY": ADMIN_KEY,
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


def lora_arguments() -> list[str]:
    return ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={tiny_lora()}"]


@pytest.fixture(scope="session")
def engine_version() -> Version:
    """The release of the engine, without the build's suffix."""
    return Version(Version(vllm.__version__).base_version)


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers' output goes."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def recording_server(log_folder: Path) -> Iterator[VLLMServer]:
    """The tiny model in float32, with recording, a LoRA adapter, tools and the dev routes."""
    args = ["--enable-recording", *SERVING, *lora_arguments()]
    args += ["--recording-adapter-versions", r"[-]v(\d+)$"]
    with VLLMServer(tiny_qwen3(), *args, env=ENV, log=log_folder / "recording.log") as server:
        yield server


@pytest.fixture(scope="session")
def record_client(recording_server: VLLMServer) -> Iterator[RecordClient]:
    """A client of the recording server's `/records` that holds the admin key."""
    with RecordClient(recording_server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


@pytest.fixture(scope="session")
def keyed_server(log_folder: Path) -> Iterator[VLLMServer]:
    """The tiny model behind the engine's own API key; two requests at a time, the rest queue.

    Its logprobs are those of the distribution that is sampled from.
    """
    args = ["--enable-recording", "--dtype", "float32", *PACED]
    args += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "2"]
    args += ["--api-key", ENGINE_KEY, "--logprobs-mode", "processed_logprobs"]
    with VLLMServer(tiny_qwen3(), *args, env=ENV, log=log_folder / "keyed.log") as server:
        yield server


@pytest.fixture(scope="session")
def keyed_client(keyed_server: VLLMServer) -> Iterator[RecordClient]:
    """A client of the keyed server's `/records` that holds the admin key."""
    with RecordClient(keyed_server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


@pytest.fixture
def fresh_key(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Makes record keys that nothing else uses; those of one test share their batch and task.

    The batch is the part of a key before its first slash: `key.split("/")[0]` is a prefix of all
    of them.
    """
    # The function's own name: its parameters may be what no log is to hold.
    task = request.node.originalname
    batch = secrets.token_hex(4)
    runs = itertools.count()
    return lambda: f"{batch}/{task}/{next(runs)}"
