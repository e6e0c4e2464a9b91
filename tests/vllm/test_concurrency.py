"""Many clients at once: nothing is crossed, nothing is lost, and the counters add up."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import httpx
import pytest
from openai import APITimeoutError, AsyncOpenAI

from examples.vllm_server import VLLMServer
from recorder_core import FinishReason, Record, RecorderStats
from recorder_core.client import AsyncRecordClient, RecordClient
from tests.models import round_trip_ids, tiny_qwen3
from tests.records import whole_prompts
from tests.vllm.apis import LONG, settle
from tests.vllm.conftest import ADMIN_KEY

pytestmark = pytest.mark.server
FreshKey = Callable[[], str]

CLIENTS = 64
WHOLE, STREAMED, LEFT, TIMED_OUT = "whole", "streamed", "left", "timed_out"


class Agent:
    """One client with a key and a marker of its own."""

    def __init__(self, number: int, key: str, server: VLLMServer, http: httpx.AsyncClient) -> None:
        self.key = key
        self.marker = f"agent-{number:03}."
        self.kind = (WHOLE, STREAMED, WHOLE, STREAMED, LEFT, TIMED_OUT)[number % 6]
        self.samples = 1 + number % 3 if self.kind in (WHOLE, STREAMED) else 1
        self.texts: list[str] = []
        self._client = AsyncOpenAI(
            base_url=f"{server.base_url}/v1", api_key=key, http_client=http, max_retries=0
        )

    async def run(self) -> None:
        """Ask once, in the agent's own way."""
        gone = self.kind in (LEFT, TIMED_OUT)
        request = {
            "model": "model",
            "messages": [{"role": "user", "content": f"I am {self.marker}"}],
            "max_tokens": LONG["max_tokens"] if gone else random.Random(self.key).randrange(5, 40),
            "n": self.samples,
            "stream": self.kind in (STREAMED, LEFT),
            "extra_body": {"ignore_eos": True},
        }
        if self.kind == TIMED_OUT:
            with pytest.raises(APITimeoutError):
                await self._client.chat.completions.create(**request, timeout=1.5)
            return
        reply = await self._client.chat.completions.create(**request)
        if self.kind == WHOLE:
            self.texts = [choice.message.content for choice in reply.choices]
            return
        self.texts = [""] * self.samples
        chunks = 0
        async with reply:
            async for chunk in reply:
                for choice in chunk.choices:
                    self.texts[choice.index] += choice.delta.content or ""
                    chunks += bool(choice.delta.content)
                if self.kind == LEFT and chunks >= 4:
                    return


def counters(client: RecordClient) -> RecorderStats:
    [stats] = client.stats().values()
    return stats.recorder


async def test_sixty_four_clients_with_keys_of_their_own(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    before = counters(record_client)
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(limits=limits, timeout=120) as http:
        agents = [Agent(n, fresh_key(), recording_server, http) for n in range(CLIENTS)]
        await asyncio.gather(*(agent.run() for agent in agents))
    settle(record_client)

    batch = agents[0].key.split("/")[0]
    found: dict[str, list[Record]] = {}
    for record in record_client.get(batch):
        found.setdefault(str(record.key), []).append(record)
    for agent in agents:
        records = sorted(found.pop(agent.key, []), key=lambda record: record.sample_index)
        for record in records:
            assert len(record.logprobs) == len(record.response_ids)
        # Samples of one request share the prompt that one of them holds.
        for text in [record.prompt_text for record in records if record.base is None]:
            assert f"I am {agent.marker}" in text
            assert text.count("agent-") == 1
        if agent.kind in (WHOLE, STREAMED):
            assert len({tuple(prompt) for prompt in whole_prompts(records).values()}) == 1
            assert [record.response_text for record in records] == agent.texts
            assert {record.finish_reason for record in records} == {FinishReason.LENGTH}
        elif agent.kind == LEFT:
            [record] = records
            assert record.response_text.startswith(agent.texts[0])
            assert record.finish_reason is FinishReason.ABORT
        elif records:  # else it was gone before its first token
            assert [record.finish_reason for record in records] == [FinishReason.ABORT]
    assert found == {}

    after = counters(record_client)
    asked = sum(agent.samples for agent in agents)
    recorded = sum(entry.records for entry in record_client.keys(batch))
    dropped = Counter(after.dropped) - Counter(before.dropped)
    assert after.pending == 0
    assert after.started - before.started == asked
    assert after.recorded - before.recorded == recorded
    assert asked == recorded + dropped.total()
    assert set(dropped) <= {"empty"}
    assert after.errors == before.errors
    assert after.flagged == before.flagged


async def test_drains_by_prefix_while_agents_run_share_everything_out_once(
    recording_server: VLLMServer, fresh_key: FreshKey
) -> None:
    batch = fresh_key().split("/")[0]
    tasks = [f"{batch}/task-{n}" for n in range(4)]
    drained: dict[str, list[Record]] = {task: [] for task in tasks}
    running = True

    async def generate(http: httpx.AsyncClient, key: str) -> None:
        client = AsyncOpenAI(
            base_url=f"{recording_server.base_url}/v1", api_key=key, http_client=http
        )
        for turn in range(3):
            await client.completions.create(
                model="model", prompt=f"{key} {turn}", max_tokens=8, n=2
            )

    async def drain(records: AsyncRecordClient, task: str) -> None:
        done = False
        while not done:
            done = not running
            async with records.drain(task, wait_s=0.0 if running else 10.0) as lease:
                drained[task] += lease.records

    async with (
        httpx.AsyncClient(timeout=120) as http,
        AsyncRecordClient(recording_server.base_url, admin_key=ADMIN_KEY) as records,
    ):
        # Two schedulers to a task: what one has leased the other does not get.
        drains = [asyncio.create_task(drain(records, task)) for task in tasks * 2]
        await asyncio.gather(
            *(generate(http, f"{task}/{run}") for task in tasks for run in range(4))
        )
        running = False
        await asyncio.gather(*drains)
        assert await records.get(batch) == []

    for task, found in drained.items():
        assert len({record.id for record in found}) == len(found) == 4 * 3 * 2
        assert Counter(str(record.key) for record in found) == {
            f"{task}/{run}": 3 * 2 for run in range(4)
        }
        # Samples of one request share the prompt that one of them holds.
        asked = {(str(record.key), record.prompt_text) for record in found if not record.base}
        assert asked == {
            (f"{task}/{run}", f"{task}/{run} {turn}") for run in range(4) for turn in range(3)
        }


async def test_two_agents_that_share_a_key_have_a_trajectory_each(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key, digits = fresh_key(), round_trip_ids(tiny_qwen3())

    async def converse(client: AsyncOpenAI, topic: str) -> list[str]:
        messages, answers = [{"role": "system", "content": topic}], []
        for turn in range(4):
            messages.append({"role": "user", "content": f"Turn {turn}"})
            reply = await client.chat.completions.create(
                model="model",
                messages=messages,
                max_tokens=6,
                extra_body={"allowed_token_ids": digits},
            )
            answers.append(reply.choices[0].message.content)
            messages.append({"role": "assistant", "content": answers[-1]})
        return answers

    async with AsyncOpenAI(base_url=f"{recording_server.base_url}/v1", api_key=key) as client:
        topics = ["The main agent.", "A sub-agent, with a prompt of its own."]
        answers = await asyncio.gather(*(converse(client, topic) for topic in topics))

    experiences = record_client.experiences(key)
    assert len(experiences) == 2
    told = {
        tuple(turn.response_text for turn in each.turns): each.action_mask.sum()
        for each in experiences
    }
    assert told == {tuple(each): 4 * 6 for each in answers}
