"""The task, and the agent that plays it over two turns; nothing here knows what is trained.

Each turn asks for six digits of a kind. The reward is the share of six that are right.
"""

from __future__ import annotations

import itertools
from typing import Any

from openai import AsyncOpenAI

from examples.grpo_cpu.game import DIGITS_PER_TURN, RULES

PROMPTS = [f"{first} {second}" for first, second in itertools.permutations(RULES, 2)]
"""Two rules, one for each turn."""


async def play(client: AsyncOpenAI, prompt: str) -> float:
    """Play one run against any OpenAI-compatible server; its reward.

    Args:
        client: Its API key is the run's record key.
        prompt: Two rules.
    """
    messages: list[Any] = []
    right = 0
    for opening, rule in zip(("write", "now"), prompt.split(), strict=True):
        messages.append({"role": "user", "content": f"{opening} {rule} digits"})
        reply = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=DIGITS_PER_TURN, temperature=1.0
        )
        answer = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        right += sum(RULES[rule](int(word)) for word in answer.split() if word.isdigit())
    return right / (2 * DIGITS_PER_TURN)
