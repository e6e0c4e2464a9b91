"""The process behind a local runner: reads runs from its standard input, a line of JSON each.

It ends when its standard input does, so that it never outlives the scheduler, and by nothing that
a workflow raises.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading

from pydantic import ValidationError

from recorder_core.rollout.address import EngineAddress
from recorder_core.rollout.messages import described
from recorder_core.rollout.runner import WorkflowRunner
from recorder_core.rollout.wire import READY, Command, Reply, RunRequest, number_of

logger = logging.getLogger(__name__)


class Worker:
    """Carries out runs against any engine: one `WorkflowRunner` for each."""

    def __init__(self) -> None:
        self._runners: dict[EngineAddress, WorkflowRunner] = {}

    async def carry_out(self, number: int, request: RunRequest) -> bytes:
        """Carry out one run; gives its reply as a line, whatever becomes of the run."""
        try:
            if request.engine not in self._runners:
                self._runners[request.engine] = WorkflowRunner(request.engine)
            runner = self._runners[request.engine]
            status = await runner.run_once(request.task, request.timeout_s)
            return Reply(number=number, status=status).line
        except asyncio.CancelledError:
            return Reply(number=number, error="it was cancelled from within its runner").line
        except BaseException as error:  # noqa: BLE001 - who waits for the reply must get one
            return Reply(number=number, error=described(error)).line


class _Service:
    """Takes commands and gives replies, on the event loop.

    Not a coroutine: a workflow that cancels every task of the loop must not end it.
    """

    def __init__(self, commands: int, replies: int) -> None:
        self._commands = commands
        self._replies = replies
        self._worker = Worker()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)

    def run(self) -> None:
        """Serve until the commands end."""
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        self._write(Reply(number=READY).line)
        while True:
            self._turn()

    def _turn(self) -> None:
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            # Of what a workflow has left to the loop; whoever waits for that is told.
            logger.warning("a workflow raised %s on the event loop", described(error))

    def _read(self) -> None:
        with os.fdopen(self._commands, "rb") as commands:
            for line in commands:
                self._loop.call_soon_threadsafe(self._take, line)
        # From this thread: a workflow may block the loop for ever.
        os._exit(0)

    def _take(self, line: bytes) -> None:
        try:
            command = Command.model_validate_json(line)
        except ValidationError as error:
            number = number_of(line)
            assert number is not None, line[:100]
            self._write(Reply(number=number, error=f"cannot be read: {described(error)}").line)
            return
        number = command.number
        if command.request is not None:
            task = self._loop.create_task(self._carry_out(number, command.request))
            self._running[number] = task
            task.add_done_callback(lambda _: self._running.pop(number, None))
        elif number in self._running:
            self._running[number].cancel()

    async def _carry_out(self, number: int, request: RunRequest) -> None:
        self._write(await self._worker.carry_out(number, request))

    def _write(self, line: bytes) -> None:
        try:
            while line:
                line = line[os.write(self._replies, line) :]
        except OSError:
            # Nobody would ever hear of these runs; this way they are lost at once, and known to be.
            logger.exception("replies cannot be written")
            os._exit(1)


def main() -> None:
    """Serve until the standard input ends."""
    # What a workflow prints goes to the log, not between the replies.
    replies = os.dup(1)
    commands = os.dup(0)
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a file descriptor is wanted
        os.dup2(nothing.fileno(), 0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # So that a KeyboardInterrupt is always a workflow's own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _Service(commands, replies).run()
