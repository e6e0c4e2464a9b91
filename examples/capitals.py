"""A small task with a checkable answer, and an agent for it: nothing here knows the recorder.

The agent asks for a country's capital and, whatever it hears, once more for the single word. It
is any program that speaks to an OpenAI API: what makes its run recorded is its API key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI


@dataclass(frozen=True)
class Task:
    """A question and the answer that is right."""

    id: str
    country: str
    capital: str

    def reward(self, answers: list[str]) -> float:
        """The share of the answers that name the capital."""
        return sum(self.capital.lower() in answer.lower() for answer in answers) / len(answers)


TASKS = [
    Task(country.lower(), country, capital)
    for country, capital in {
        "France": "Paris",
        "Japan": "Tokyo",
        "Italy": "Rome",
        "Egypt": "Cairo",
        "Spain": "Madrid",
        "Peru": "Lima",
        "Kenya": "Nairobi",
        "Canada": "Ottawa",
    }.items()
]


async def play(task: Task, *, base_url: str, api_key: str, model: str, stream: bool) -> list[str]:
    """One episode: two turns of one conversation; returns the model's answers."""
    messages: list[dict[str, Any]] = []
    answers: list[str] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for question in (
            f"What is the capital of {task.country}? Answer in one short sentence.",
            "Now give only the name of the city.",
        ):
            messages.append({"role": "user", "content": question})
            answer = await _complete(client, model, messages, stream=stream)
            messages.append({"role": "assistant", "content": answer})
            answers.append(answer)
    return answers


async def _complete(
    client: AsyncOpenAI, model: str, messages: list[dict[str, Any]], *, stream: bool
) -> str:
    request: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": 32,
        "temperature": 0.8,
    }
    if not stream:
        reply = await client.chat.completions.create(**request)
        return reply.choices[0].message.content or ""
    chunks = await client.chat.completions.create(**request, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
