"""Workflows that do harm: to their own run, to the wire, to the process; see test_wire.py."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import threading
from typing import Any

from recorder_core import Experience
from recorder_core.rollout import Failure, Status, Workflow, WorkflowBase
from tests.core.rollout.workflows import Player, complete


def reply_pipe() -> int:
    """Where the runner's replies go: the one pipe that it writes to, beside the standard ones."""
    (found,) = (number for number in range(3, 64) if is_written_to(number))
    return found


def is_written_to(descriptor: int) -> bool:
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    except OSError:
        return False
    return is_pipe and flags & os.O_ACCMODE == os.O_WRONLY


class Vandal(Player):
    """Does its worst before its only turn, and ends well, if it still can."""

    async def run_async(self) -> dict[str, float]:
        raw: dict[str, Any] = self.task.raw_task
        if "line" in raw:
            data = raw["line"].encode("latin-1") * raw.get("times", 1)
            await asyncio.to_thread(write, data)
        elif "harm" in raw:
            await getattr(self, raw["harm"])()
        await complete(self, [1])
        await self.update_reward(1.0)
        return {"length": 1.0}

    async def flood(self) -> None:
        """Write half a line, without end."""

        def flood() -> None:
            while True:
                write(b"x" * 65536)

        threading.Thread(target=flood, daemon=True).start()
        await asyncio.Event().wait()

    async def close_the_pipe(self) -> None:
        os.close(reply_pipe())

    async def cancel_everybody(self) -> None:
        for each in asyncio.all_tasks():
            each.cancel()

    async def exit_in_a_task(self) -> None:
        async def leave() -> None:
            raise SystemExit(3)

        await asyncio.create_task(leave())

    async def stop_the_loop(self) -> None:
        asyncio.get_running_loop().stop()


def write(data: bytes) -> None:
    with os.fdopen(reply_pipe(), "wb", buffering=0, closefd=False) as pipe:
        rest = memoryview(data)
        while rest:
            rest = rest[pipe.write(rest) :]


METRICS: dict[str, Any] = {
    "nan": {"accuracy": float("nan")},
    "infinity": {"accuracy": float("inf")},
    "huge": {"accuracy": 10**400},
    "none": {"accuracy": None},
    "surrogate": {"accuracy\udc80": 1.0},
    "text": "accuracy",
    "many": {f"accuracy of question {n}": 1.0 for n in range(100_000)},
}


class Measured(Player):
    """Gives metrics that cannot be sent."""

    async def run_async(self) -> Any:
        await complete(self, [1])
        return METRICS[str(self.task.raw_task["metrics"])]


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise SystemExit("no message")


class EndlessError(Exception):
    def __str__(self) -> str:
        return "x" * 30_000_000


class Unknown(BaseException):
    """Of no kind that anybody expects."""


ERRORS: dict[str, BaseException] = {
    "surrogate": OSError("no such file: b\udc80d"),
    "nul": ValueError("a\0b\x1b[2J"),
    "megabytes": ValueError("é" * 5_000_000),
    "unsayable": UnsayableError(),
    "endless": EndlessError(),
    "exit": SystemExit(0),
    "interrupt": KeyboardInterrupt(),
    "generator-exit": GeneratorExit(),
    "stop": StopIteration(1),
    "stop-async": StopAsyncIteration(),
    "unknown": Unknown("of no kind"),
    "cancelled": asyncio.CancelledError("\udc80"),
}


class Raises(Player):
    """Raises what its task names."""

    async def run_async(self) -> Any:
        raise ERRORS[str(self.task.raw_task["error"])]


class RaisesOnAThread(Workflow):
    """The same, where a workflow has a thread of its own."""

    def run(self) -> list[Experience]:
        raise ERRORS[str(self.task.raw_task["error"])]


STATUSES: dict[str, Any] = {
    "surrogate": {"failures": {Failure.ERROR: 1}, "message": "\udc80", "completed_runs": 0},
    "megabytes": {"failures": {Failure.ERROR: 1}, "message": "x" * 3_000_000, "completed_runs": 0},
    "undecided": {"completed_runs": 0},
    "no-id": {"completed_runs": 1},
    "two": {"completed_runs": 2, "total_runs": 2},
    "wrong": {"completed_runs": "all", "metrics": object()},
}


class Claims(WorkflowBase):
    """Returns a status that no check has seen."""

    async def execute(self) -> Status:
        given = STATUSES[str(self.task.raw_task["status"])]
        fields = {"total_runs": 1, "metrics": (), "successful_ids": (), "failures": {}}
        return Status.model_construct(**{**fields, "message": "", **given})
