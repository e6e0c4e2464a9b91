"""Where runs are carried out: a pool of runners, here local processes."""

from __future__ import annotations

import asyncio
import logging
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
from recorder_core.rollout.wire import READY, Command, Lines, Reply, RunRequest

logger = logging.getLogger(__name__)

_PROGRAM = "from recorder_core.rollout.worker import main; main()"
_CHUNK_BYTES = 1 << 16
_MAX_UNREAD_BYTES = 1 << 26
"""Of a runner's stream, without one reply that can be read: then it is beyond repair."""
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
        # The number of a process that has ended may be another's by now.
        if self._child is not None and self._child.alive:
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
        self._given = 0
        """How many runs it was given; their numbers are those below."""
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
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
        number, self._given = self._given, self._given + 1
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._send(Command(number=number, request=request))
            reply = await answer
            if reply.status is None:  # it may go on all the same
                await self._send(Command(number=number))
            return reply.status_of(request.task)
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
        self.process.stdin.write(command.line)
        try:
            await self.process.stdin.drain()
        except ConnectionError as error:
            raise RunnerLostError(f"the runner does not read: {error}") from error

    async def _read(self) -> None:
        assert self.process.stdout is not None
        lines, unread = Lines(), 0
        try:
            while unread <= _MAX_UNREAD_BYTES and (
                chunk := await self.process.stdout.read(_CHUNK_BYTES)
            ):
                unread += len(chunk)
                for line in lines.feed(chunk):
                    if (reply := Reply.read(line)) is not None:
                        unread = 0
                        self._take(reply)
        finally:
            self.alive = False
            self.kill()  # what it has started too
            status = await self.process.wait()
            why = f"ended with {status}"
            if unread > _MAX_UNREAD_BYTES:
                why = f"was ended: of its last {unread} bytes none could be read as a reply"
                logger.error("the runner's process %d %s", self.process.pid, why)
            for answer in (self._ready, *self._waiting.values()):
                if not answer.done():
                    answer.set_exception(
                        RunnerLostError(f"the runner's process {self.process.pid} {why}")
                    )

    def _take(self, reply: Reply) -> None:
        if reply.number == READY:
            if not self._ready.done():
                self._ready.set_result(None)
        elif (answer := self._waiting.get(reply.number)) is not None:
            if not answer.done():
                answer.set_result(reply)
        elif not 0 <= reply.number < self._given:  # else it was cancelled, or failed before
            logger.warning(
                "the runner's process %d answers for run %d, and was given %d",
                *(self.process.pid, reply.number, self._given),
            )
