"""An agent for a real engine that ends as its task says; runners import it by name."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from openai import AsyncOpenAI

from recorder_core.rollout import Metrics, WorkflowWithRecording

TURNS = 2
TOKENS = 8
"""Sampled in each turn."""


class DigitAgent(WorkflowWithRecording):
    """Two turns of digits; the reward is their sum, which no other run is likely to have.

    Ends as `raw_task["end"]` says while its attempt is below `raw_task["times"]`, with something
    recorded. With `raw_task["gate"]`, waits between the turns until that file is there.
    """

    async def run_async(self) -> Metrics:
        raw: Any = self.task.raw_task
        messages: list[Any] = [{"role": "user", "content": f"Digits for {self.task.task_id}"}]
        answers = []
        async with AsyncOpenAI(base_url=self.base_url, api_key=self.api_key) as client:
            for turn in range(TURNS):
                answer = await self._ask(client, messages)
                answers.append(answer)
                messages.append({"role": "assistant", "content": answer})
                messages.append({"role": "user", "content": "More"})
                if turn == 0 and self.task.attempt < raw.get("times", 0):
                    await getattr(self, raw["end"])()
                while turn == 0 and "gate" in raw and not os.path.exists(raw["gate"]):  # noqa: ASYNC240, PTH110
                    await asyncio.sleep(0.1)
        reward = float(sum(int(digit) for answer in answers for digit in answer))
        await self.update_reward(reward, info={"answers": answers, "attempt": self.task.attempt})
        return {"sum": reward}

    async def _ask(self, client: AsyncOpenAI, messages: list[Any]) -> str:
        reply = await client.chat.completions.create(
            model=self.model_name,
            messages=messages,
            max_tokens=TOKENS,
            extra_body={"ignore_eos": True, **self.task.rollout_args},
        )
        return reply.choices[0].message.content or ""

    async def fail(self) -> None:
        raise ValueError("the agent has failed")

    async def hang(self) -> None:
        await asyncio.Event().wait()

    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
