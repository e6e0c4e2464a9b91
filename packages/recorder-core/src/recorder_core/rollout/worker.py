"""The process behind a local runner: reads runs from its standard input, a line of JSON each.

It ends when its standard input does, so that it never outlives the scheduler.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import BinaryIO

from pydantic import BaseModel

from recorder_core.rollout.engine import Engine
from recorder_core.rollout.runner import WorkflowRunner
from recorder_core.rollout.status import Status
from recorder_core.rollout.task import Task


class RunRequest(BaseModel):
    """One run, as a runner is sent it."""

    task: Task
    engine: Engine
    timeout_s: float


class Command(BaseModel):
    """A line to the process: a run to carry out, or without one, to cancel."""

    number: int
    request: RunRequest | None = None


class Reply(BaseModel):
    """A line from the process: what became of a run; number -1 says that it is ready."""

    number: int
    status: Status | None = None


class Worker:
    """Carries out runs against any engine: one `WorkflowRunner` for each."""

    def __init__(self) -> None:
        self._runners: dict[Engine, WorkflowRunner] = {}

    async def run(self, request: RunRequest) -> Status:
        """Carry out one run; whatever goes wrong is in the status."""
        if request.engine not in self._runners:
            self._runners[request.engine] = WorkflowRunner(request.engine)
        return await self._runners[request.engine].run_once(request.task, request.timeout_s)


async def _serve(commands: BinaryIO, replies: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        for line in commands:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        # From this thread: a workflow may block the loop for ever.
        os._exit(0)

    def reply(number: int, status: Status | None = None) -> None:
        replies.write(Reply(number=number, status=status).model_dump_json().encode() + b"\n")
        replies.flush()

    async def carry_out(number: int, request: RunRequest) -> None:
        try:
            reply(number, await worker.run(request))
        finally:
            del running[number]

    worker = Worker()
    running: dict[int, asyncio.Task[None]] = {}
    threading.Thread(target=read, name="commands", daemon=True).start()
    reply(-1)
    while True:
        command = Command.model_validate_json(await lines.get())
        if command.request is not None:
            task = asyncio.create_task(carry_out(command.number, command.request))
            running[command.number] = task
        elif command.number in running:
            running[command.number].cancel()


def main() -> None:
    """Serve until the standard input ends."""
    # What a workflow prints goes to the log, not between the replies.
    replies = os.fdopen(os.dup(1), "wb")
    commands = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a file descriptor is wanted
        os.dup2(nothing.fileno(), 0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    asyncio.run(_serve(commands, replies))
