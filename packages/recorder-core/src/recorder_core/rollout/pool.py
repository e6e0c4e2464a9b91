"""Where runs are carried out: a pool of runners, here local processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from typing_extensions import Self

from recorder_core.errors import RunnerLostError
from recorder_core.rollout.status import Status
from recorder_core.rollout.worker import Command, Reply, RunRequest

_PROGRAM = "from recorder_core.rollout.worker import main; main()"
_MAX_LINE_BYTES = 1 << 24
_STOP_GRACE_S = 5.0


class Runner(Protocol):
    """A process that carries out runs, many at once; started when needed, and again if it died."""

    async def start(self) -> None:
        """Be ready for runs; does nothing if it is.

        Raises:
            RunnerLostError: It could not be started.
        """
        ...

    async def run(self, request: RunRequest) -> Status:
        """Carry out one run; cancelling this cancels the run.

        Raises:
            RunnerLostError: The process ended first.
        """
        ...

    def kill(self) -> None:
        """End the process, whatever it does."""
        ...


class RunnerPool(Protocol):
    """Some runners."""

    runners: Sequence[Runner]

    async def close(self) -> None:
        """End them all."""
        ...


class LocalRunnerPool:
    """Runners that are processes of this machine.

    They import workflows by name, with this process's `sys.path` and environment, and are sent
    tasks and send back statuses as JSON. What workflows print goes to standard error. They end
    with this process, however it ends.

    Args:
        count: How many processes.
        start_timeout_s: Seconds that one may take to start.
    """

    def __init__(self, count: int = 1, *, start_timeout_s: float = 120.0) -> None:
        if count < 1:
            raise ValueError(f"count is {count}, at least one runner is needed")
        self.runners: Sequence[LocalRunner] = [LocalRunner(start_timeout_s) for _ in range(count)]

    async def close(self) -> None:
        """End the processes and what they have started."""
        await asyncio.gather(*(runner.close() for runner in self.runners))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class LocalRunner:
    """A runner that is a process of this machine; see `Runner`."""

    def __init__(self, start_timeout_s: float) -> None:
        self._start_timeout_s = start_timeout_s
        self._starting = asyncio.Lock()
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """The process, if it is there."""
        return self._child.process.pid if self._child is not None and self._child.alive else None

    async def start(self) -> None:
        """See `Runner.start`."""
        async with self._starting:
            if self._child is None or not self._child.alive:
                self._child = await _Child.started(self._start_timeout_s)

    async def run(self, request: RunRequest) -> Status:
        """See `Runner.run`."""
        await self.start()
        assert self._child is not None
        return await self._child.run(request)

    def kill(self) -> None:
        """See `Runner.kill`; what the process has started is ended too."""
        if self._child is not None:
            self._child.kill()

    async def close(self) -> None:
        """End the process: politely, then not."""
        async with self._starting:
            if self._child is not None:
                await self._child.close()


class _Child:
    """One process, and the runs that it has not answered."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.alive = True
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Status]] = {}
        self._ready = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def started(cls, timeout_s: float) -> _Child:
        path = os.pathsep.join(each for each in ("", *sys.path))
        child = cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _PROGRAM),
                stdin=PIPE,
                stdout=PIPE,
                limit=_MAX_LINE_BYTES,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # its own process group, so that `kill` reaches all of it
            )
        )
        try:
            await asyncio.wait_for(child._ready, timeout_s)
        except asyncio.TimeoutError:
            raise RunnerLostError(f"the runner was not ready after {timeout_s:g} s") from None
        finally:
            if not child._ready.done() or child._ready.cancelled():
                await child.close()
        return child

    async def run(self, request: RunRequest) -> Status:
        number = next(self._numbers)
        answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._send(Command(number=number, request=request))
            return await answer
        except asyncio.CancelledError:
            with suppress(RunnerLostError):
                await self._send(Command(number=number))
            raise
        finally:
            del self._waiting[number]

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it is gone already
            os.killpg(self.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        done, _ = await asyncio.wait({self._reading}, timeout=_STOP_GRACE_S)
        if not done:
            self.kill()
            await asyncio.wait({self._reading})

    async def _send(self, command: Command) -> None:
        if not self.alive:
            raise RunnerLostError(f"the runner's process {self.process.pid} has ended")
        assert self.process.stdin is not None
        self.process.stdin.write(command.model_dump_json().encode() + b"\n")
        try:
            await self.process.stdin.drain()
        except ConnectionError as error:
            raise RunnerLostError(f"the runner does not read: {error}") from error

    async def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            async for line in self.process.stdout:
                self._take(Reply.model_validate_json(line))
        finally:
            self.alive = False
            self.kill()  # what it has started too
            status = await self.process.wait()
            for answer in (self._ready, *self._waiting.values()):
                if not answer.done():
                    answer.set_exception(
                        RunnerLostError(
                            f"the runner's process {self.process.pid} ended with {status}"
                        )
                    )

    def _take(self, reply: Reply) -> None:
        if reply.status is None:
            if not self._ready.done():
                self._ready.set_result(None)
        elif (answer := self._waiting.get(reply.number)) is not None and not answer.done():
            answer.set_result(reply.status)
