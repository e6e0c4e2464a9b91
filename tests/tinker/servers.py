"""The servers that the tests and the demo start, each as a child process on a free loopback port.

with SkyRLServer(model, sequence_ids=True) as tinker_api:
    with RecordingServer(tinker_api) as server:
        client = OpenAI(base_url=f"{server.base_url}/v1", api_key="batch/task/0")
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

SKYRL_PYTHON = "RECORDER_SKYRL_PYTHON"
"""The environment variable that names the interpreter that has SkyRL; nox sets it."""
ADMIN_KEY = "admin-key-of-the-tests"

BACKEND = {
    "max_lora_adapters": 8,
    "max_lora_rank": 8,
    "train_micro_batch_size": 2,
    "sample_max_num_sequences": 16,
}
STOP_GRACE_S = 15


class Server:
    """A child process that serves HTTP, stopped with its own children when the block ends.

    Args:
        command: What to run; `--port` is added.
        health: A path that answers 200 once it is up.
        env: Environment variables to set.
        log: Where the output goes. A temporary file if None.
        start_timeout_s: How long it may take until it is up.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        health: str,
        env: Mapping[str, str],
        log: Path | None,
        start_timeout_s: float = 300,
    ) -> None:
        self.port = _free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.command = [*command, "--port", str(self.port)]
        self.log_path = log or Path(tempfile.mkdtemp(prefix="server-")) / "server.log"
        self._health = health
        self._env = {**os.environ, **env}
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """What the server has printed so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def start(self) -> None:
        """Start the process and wait until it is up.

        Raises:
            RuntimeError: It ended, or was not up in time; the message ends with its log.
        """
        with self.log_path.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its own process group, so that stop() reaches all of it
            )
        deadline = time.monotonic() + self._start_timeout_s
        while not self._healthy():
            if not self.running:
                raise RuntimeError(f"it ended with {self._process.returncode}{self._tail()}")
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"not up in {self._start_timeout_s:.0f} s{self._tail()}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End the server and its children: politely, then not."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_GRACE_S)
        self._signal(signal.SIGKILL)  # also whatever outlived its parent
        self._process.wait()

    def __enter__(self) -> Self:
        """Start."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop."""
        self.stop()

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", self._health)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone
            os.killpg(self._process.pid, number)

    def _tail(self, lines: int = 40) -> str:
        return "; the end of its log:\n" + "\n".join(self.log().splitlines()[-lines:])


class SkyRLServer(Server):
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
        self.base_model = str(model)
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
        super().__init__(command, health="/api/v1/healthz", env=env, log=log)


class RecordingServer(Server):
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
            *["--base-model", service.base_model, "--base-url", service.base_url],
            *args,
        ]
        env = {
            "HF_HUB_OFFLINE": "1",
            "RECORDER_ADMIN_KEY": admin_key,
            "TINKER_API_KEY": "tml-local",
            "TINKER_TELEMETRY": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }
        super().__init__(command, health="/health", env=env, log=log)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
