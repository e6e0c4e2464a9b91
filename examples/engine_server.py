"""An engine's server as a child process: started, waited for, stopped."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

STOP_GRACE_S = 15  # a SIGTERM while the engine starts can hang for minutes


class EngineServer:
    """One server on a free loopback port, stopped when the block ends.

    Args:
        command: What to run, without the port.
        env: Environment variables to set, or with None to unset.
        name: The model's name in the API.
        health: A path that answers 200 once the server is up.
        log: Where the output goes. A temporary file if None.
        start_timeout_s: How long the server may take until it is healthy.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str | None],
        name: str,
        health: str = "/health",
        log: Path | None = None,
        start_timeout_s: float = 300,
    ) -> None:
        self.name = name
        self._health = health
        self.port = _free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.start_timeout_s = start_timeout_s
        self.log_path = log or Path(tempfile.mkdtemp(prefix="engine-")) / "server.log"
        self.command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        environment = {**os.environ, **env}
        self.env = {key: value for key, value in environment.items() if value is not None}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id of the API server, which is also its process group."""
        assert self._process is not None, "the server is not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """What the server has printed so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def launch(self) -> None:
        """Start the process."""
        with self.log_path.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its own process group, so that stop() reaches all of it
            )

    def start(self) -> None:
        """Start the process and wait until it is healthy.

        Raises:
            RuntimeError: It ended, or was not healthy in time; the message ends with its log.
        """
        self.launch()
        assert self._process is not None
        deadline = time.monotonic() + self.start_timeout_s
        while not self._is_healthy():
            if not self.running:
                raise RuntimeError(
                    f"the server ended with {self._process.returncode}{self._tail()}"
                )
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(
                    f"the server was not healthy in {self.start_timeout_s:.0f} s{self._tail()}"
                )
            time.sleep(0.1)

    def wait(self, timeout_s: float) -> int:
        """Wait for the process to end by itself; its exit status."""
        assert self._process is not None, "the server is not started"
        return self._process.wait(timeout_s)

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

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", self._health)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone
            os.killpg(self.pid, number)

    def _tail(self, lines: int = 40) -> str:
        return "; the end of its log:\n" + "\n".join(self.log().splitlines()[-lines:])


def _free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        # SGLang derives more ports from it, up to ten thousand higher.
        if port < 55_000:
            return port
