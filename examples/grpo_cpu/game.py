"""The task, and the agent that plays it over two turns; nothing here knows what is trained.

Each turn asks for six digits of a kind. The reward is the share of the digits that are right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI

from recorder_core.rollout import Metrics, Task, WorkflowWithRecording

RULES: dict[str, Callable[[int], bool]] = {
    "even": lambda digit: digit % 2 == 0,
    "odd": lambda digit: digit % 2 == 1,
    "low": lambda digit: digit < 5,
    "high": lambda digit: digit >= 5,
}
DIGITS_PER_TURN = 6


def tasks(runs: int, allowed_ids: list[int]) -> list[Task]:
    """One task for each ordered pair of rules, for so many runs each."""
    return [
        Task(
            task_id=f"{first}-{second}",
            workflow=DigitGame,
            raw_task={"rules": [first, second]},
            rollout_args={"allowed_token_ids": allowed_ids, "temperature": 1.0},
            repeat_times=runs,
        )
        for first, second in itertools.permutations(RULES, 2)
    ]


class DigitGame(WorkflowWithRecording):
    """Asks for digits of one kind, then of another, in one conversation."""

    async def run_async(self) -> Metrics:
        rules: Any = self.task.raw_task["rules"]
        messages: list[Any] = []
        right = []
        async with AsyncOpenAI(base_url=self.base_url, api_key=self.api_key) as client:
            for opening, rule in zip(("write", "now"), rules, strict=True):
                messages.append({"role": "user", "content": f"{opening} {rule} digits"})
                reply = await client.chat.completions.create(
                    model=self.model_name,
                    messages=messages,
                    max_tokens=DIGITS_PER_TURN,
                    extra_body=self.task.rollout_args,
                )
                answer = reply.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": answer})
                digits = [int(each) for each in answer if each.isdigit()]
                right.append(sum(map(RULES[rule], digits)) / DIGITS_PER_TURN)
        await self.update_reward(sum(right) / 2)
        return {"first_turn": right[0], "second_turn": right[1]}
