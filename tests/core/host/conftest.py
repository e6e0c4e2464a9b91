"""A real recorder process, and front ends over it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fastapi import FastAPI

from recorder_core.client import RecordClient
from recorder_core.host.passing import passing_router
from recorder_core.host.process import HostProcess
from recorder_core.host.relay import Relay
from recorder_core.options import RecordingOptions
from recorder_core.recorder import RecorderStats
from recorder_core.server import AdminGuard
from tests.core.client.servers import ADMIN_KEY, serving
from tests.signals import as_usual

MakeHost = Callable[..., "Host"]


class FrontEnd:
    """One in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.core.host.front_end", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=as_usual,
        )
        self._answer("ready")

    def do(self, command: str, *keys: str) -> None:
        self.process.stdin.write(" ".join([command, *keys]) + "\n")
        self.process.stdin.flush()
        self._answer("done")

    def _answer(self, expected: str) -> None:
        assert self.process.stdout.readline().strip() == expected

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Host:
    """A recorder process with two front ends in this process, and a client of one of them."""

    def __init__(self, stack: ExitStack, options: RecordingOptions) -> None:
        self._stack = stack
        self.process = HostProcess(options)
        stack.callback(self.process.close)
        self.folder = self.process.folder
        self.relays = [self.relay(), self.relay()]
        self.versions: list[str] = []

        async def set_version(version: str) -> None:
            self.versions.append(version)

        app = FastAPI()
        app.include_router(
            passing_router(
                self.folder,
                guard=AdminGuard(ADMIN_KEY),
                set_version=set_version,
                pieces=lambda ids: [b"x" for _ in ids],
                count_error=self.relays[0].count_error,
            )
        )
        self.url = stack.enter_context(serving(app))
        self.client = stack.enter_context(RecordClient(self.url, admin_key=ADMIN_KEY))

    def relay(self) -> Relay:
        relay = Relay(self.folder)
        self._stack.callback(relay.close)
        return relay

    def front_end(self) -> FrontEnd:
        front_end = FrontEnd(self.folder.path)
        self._stack.callback(front_end.kill)
        return front_end

    def stats(self) -> RecorderStats:
        """Of the recorder process."""
        (reply,) = self.client.stats().values()
        return reply.recorder

    def kill(self) -> None:
        """The recorder process dies as by the kernel's hand."""
        os.kill(self.process.pid, signal.SIGKILL)


@pytest.fixture
def make_host() -> Iterator[MakeHost]:
    with ExitStack() as stack:
        yield lambda **options: Host(stack, RecordingOptions(enabled=True, **options))


@pytest.fixture
def host(make_host: MakeHost) -> Host:
    return make_host()
