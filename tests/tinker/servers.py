"""The servers that the tests and the demo start, each as a child process on a free loopback port.

with SkyRLServer(model, sequence_ids=True) as tinker_api:
    with RecordingServer(tinker_api) as server:
        client = OpenAI(base_url=f"{server.base_url}/v1", api_key="batch/task/0")
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from examples.engine_server import EngineServer

SKYRL_PYTHON = "RECORDER_SKYRL_PYTHON"
"""The environment variable that names the interpreter that has SkyRL; nox sets it."""
ADMIN_KEY = "admin-key-of-the-tests"

BACKEND = {
    "max_lora_adapters": 8,
    "max_lora_rank": 8,
    "train_micro_batch_size": 2,
    "sample_max_num_sequences": 16,
}


class SkyRLServer(EngineServer):
    """SkyRL's Tinker API on the CPU, in an environment of its own.

    Args:
        model: The folder of the base model; also its name.
        sequence_ids: Name the sequences of a sample, as SDKs after 0.25 demand.
        log: Where the output goes.
    """

    def __init__(self, model: Path, *, sequence_ids: bool, log: Path | None = None) -> None:
        python = os.environ.get(SKYRL_PYTHON)
        if not python:
            raise RuntimeError(f"{SKYRL_PYTHON} is not set: nox -s tinker sets it")
        folder = Path(tempfile.mkdtemp(prefix="skyrl-"))
        command = [
            *[python, str(Path(__file__).with_name("skyrl_app.py"))],
            *["--base-model", str(model)],
            *["--backend", "jax", "--backend-config", json.dumps(BACKEND)],
            *["--database-url", f"sqlite:///{folder / 'tinker.db'}"],
            *["--checkpoints-base", str(folder / "checkpoints")],
            *(["--sequence-ids"] if sequence_ids else []),
        ]
        env = {
            "HF_HUB_OFFLINE": "1",
            "JAX_PLATFORMS": "cpu",
            "TOKENIZERS_PARALLELISM": "false",
        }
        super().__init__(command, env=env, name=str(model), health="/api/v1/healthz", log=log)


class RecordingServer(EngineServer):
    """`tinker-recorder serve` over a server of the Tinker API.

    Args:
        service: What samples.
        *args: More arguments of the command.
        admin_key: The key of `/records`.
        log: Where the output goes.
    """

    def __init__(
        self,
        service: SkyRLServer,
        *args: str,
        admin_key: str = ADMIN_KEY,
        log: Path | None = None,
    ) -> None:
        command = [
            *[sys.executable, "-m", "tinker_recorder.cli", "serve"],
            *["--base-model", service.name, "--base-url", service.base_url],
            *args,
        ]
        env = {
            "HF_HUB_OFFLINE": "1",
            "RECORDER_ADMIN_KEY": admin_key,
            "TINKER_API_KEY": "tml-local",
            "TINKER_TELEMETRY": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }
        super().__init__(command, env=env, name=service.name, log=log)
