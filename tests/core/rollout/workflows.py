"""Workflows that end as their task says; runners import them by name."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import httpx

from recorder_core import EID, Experience
from recorder_core.rollout import (
    Metrics,
    Status,
    Task,
    Workflow,
    WorkflowBase,
    WorkflowWithRecording,
)


async def complete(workflow: Any, prompt: list[int]) -> dict[str, Any]:
    """Ask the engine for one token."""
    async with httpx.AsyncClient(timeout=None, verify=False) as client:
        reply = await client.post(
            f"{workflow.base_url}/completions",
            json={"prompt": prompt},
            headers={"authorization": f"Bearer {workflow.api_key}"},
        )
    return reply.raise_for_status().json()


class Player(WorkflowWithRecording):
    """Plays some turns, and then ends as `raw_task["end"]` says, as often as `raw_task["times"]`.

    Whatever the end, something is recorded before it.
    """

    async def run_async(self) -> Metrics:
        raw: dict[str, Any] = self.task.raw_task
        prompt = [9] if raw.get("held") else [1, 2, 3]
        for turn in range(raw.get("turns", 2)):
            reply = await complete(self, prompt)
            prompt = [*prompt, *reply["ids"], 10 + turn]
        if "end" in raw and self.task.attempt < raw.get("times", 1_000_000):
            await getattr(self, raw["end"])()
        else:
            await self.update_reward(raw.get("reward", 1.0), info={"attempt": self.task.attempt})
        return {"length": float(len(prompt)), "pid": float(os.getpid())}

    async def fail(self) -> None:
        raise ValueError(f"task {self.task.task_id} cannot be solved")

    async def hang(self) -> None:
        await asyncio.Event().wait()

    async def hang_on(self) -> None:
        """Refuse to be cancelled, at first: the end of the event loop waits for every task."""
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def block(self) -> None:
        """Keep the event loop, and with it every run of the runner."""
        time.sleep(3600)  # noqa: ASYNC251

    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def nap(self) -> None:
        await asyncio.sleep(0.5)
        await self.update_reward(1.0)

    async def say_nothing(self) -> None:
        """Write no reward."""

    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    async def shout(self) -> None:
        """Write to where the runner's replies go."""
        print('{"number": 0, "status": null}')
        child = [sys.executable, "-c", "print('not a reply')"]
        await asyncio.to_thread(subprocess.run, child, check=True)
        await self.update_reward(1.0)

    async def leave_running(self) -> None:
        """End well, while a generation is still in flight."""
        self.background = asyncio.get_running_loop().create_task(complete(self, [9]))
        while not any(each.pending for each in await self.records.keys(self.task.record_key)):
            await asyncio.sleep(0.01)
        await self.update_reward(1.0)

    async def leave_late(self) -> None:
        """Fail, while a generation is still in flight."""
        asyncio.get_running_loop().create_task(complete(self, [9]))
        raise ValueError("gave up")


class Unheard(WorkflowWithRecording):
    """An agent that never asks the engine."""

    async def run_async(self) -> None:
        await self.update_reward(1.0)


class TurnRewards(WorkflowWithRecording):
    """Rewards each turn by the id of the API's reply."""

    async def run_async(self) -> None:
        first = await complete(self, [1])
        second = await complete(self, [1, *first["ids"], 5])
        await self.update_reward(0.25, sample_ids=[first["id"]])
        await self.update_reward(0.75, info={"judge": "exact"}, sample_ids=[second["id"]])
        if self.task.raw_task.get("unknown"):
            await self.update_reward(1.0, sample_ids=["cmpl-of-somebody-else"])


class Reused(WorkflowWithRecording):
    """Counts the runs that one instance has played."""

    reusable = True
    made = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        type(self).made += 1
        self.runs = 1

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.runs += 1

    async def run_async(self) -> Metrics:
        await complete(self, [1])
        await self.update_reward(1.0)
        return {"runs": self.runs}


def experience(task: Task, **fields: Any) -> Experience:
    """Prompt [1, 2], two sampled tokens, one from the environment, one more sampled."""
    given = {
        "eid": EID(batch=task.batch_id, task=task.task_id, run=task.run_id),
        "tokens": [1, 2, 30, 31, 4, 32],
        "prompt_length": 2,
        "logprobs": [-0.1, -0.2, float("nan"), -0.3],
        "action_mask": [True, True, False, True],
        "reward": 0.5,
        "metrics": {"steps": 2.0},
    }
    return Experience(**{**given, **fields})


class ByHand(Workflow):
    """The old way, on a thread: what the engine recorded on the way is replaced."""

    def run(self) -> list[Experience]:
        asyncio.run(complete(self, [7, 7]))
        assert threading.current_thread() is not threading.main_thread()
        if self.task.raw_task.get("hang"):
            threading.Event().wait()
        if self.task.raw_task.get("empty"):
            return []
        return [experience(self.task)]

    @property
    def base_url(self) -> str:
        return self.engine.agent_url

    @property
    def api_key(self) -> str:
        return self.engine.api_key(self.task)


class Impostor(WorkflowBase):
    """Answers for another run."""

    async def execute(self) -> Status:
        await complete(self, [1])
        return Status.success(self.task.retried(99))

    @property
    def base_url(self) -> str:
        return self.engine.agent_url

    @property
    def api_key(self) -> str:
        return self.engine.api_key(self.task)


class Together(Workflow):
    """Ends once so many runs of one process are there, on threads of their own."""

    barrier = threading.Barrier(40)

    def run(self) -> list[Experience]:
        self.barrier.wait()
        return [experience(self.task)]


NOT_A_WORKFLOW = 5
