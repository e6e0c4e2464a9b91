"""With recording on, a reply is the same as with it off, whoever asks and however many."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import APITimeoutError, AsyncOpenAI

from examples.sglang_server import SGLangServer
from recorder_core import FinishReason, Record
from recorder_core.client import AsyncRecordClient, RecordClient
from recorder_core.errors import ClientError, NotAuthorizedError
from tests.sglang.apis import (
    PROMPT,
    PROMPT_IDS,
    chat,
    completion,
    counters,
    generate,
    only,
    post,
    settle,
)
from tests.sglang.conftest import ADMIN_KEY, ENGINE_KEY, LONG_TOKENS

pytestmark = pytest.mark.server
FreshKey = Callable[[], str]

GREEDY = {"temperature": 0.0, "max_tokens": 8}
ENGINE_GREEDY = {"temperature": 0.0, "max_new_tokens": 8}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {"text": PROMPT, "sampling_params": ENGINE_GREEDY}),
    "generate with logprobs": (
        "/generate",
        {
            "input_ids": PROMPT_IDS,
            "sampling_params": ENGINE_GREEDY,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
        },
    ),
    "a batch": ("/generate", {"text": ["One.", "Two."], "sampling_params": ENGINE_GREEDY}),
    "n = 2": ("/generate", {"text": PROMPT, "sampling_params": {**ENGINE_GREEDY, "n": 2}}),
    "chat": ("/v1/chat/completions", chat(**GREEDY)),
    "chat with logprobs": ("/v1/chat/completions", chat(**GREEDY, logprobs=True, top_logprobs=3)),
    "completions": ("/v1/completions", completion(**GREEDY, echo=True)),
    "completions with logprobs": ("/v1/completions", completion(**GREEDY, logprobs=2)),
    "messages": ("/v1/messages", chat(**GREEDY)),
    "ollama": (
        "/api/generate",
        {
            "model": "model",
            "prompt": PROMPT,
            "options": {"num_predict": 8, "temperature": 0.0},
        },
    ),
    "a bad request": ("/v1/chat/completions", chat(**GREEDY, top_p=7.0)),
    "a request that is too long": ("/generate", {"input_ids": [5] * 3000}),
    "a bad grammar": (
        "/generate",
        {"text": PROMPT, "sampling_params": {**ENGINE_GREEDY, "json_schema": "{"}},
    ),
}
# SGLang merges the chunks of a stream when its consumer lags, and older releases then may repeat
# the last token: when is a matter of timing.
STREAM_TRIES = 20
# SGLang calls itself after the folder from which other tests have updated its weights.
VOLATILE = re.compile(
    "id|model|created|created_at|.*(latency|throughput|duration|time|wait|cached?_.*|_details|_ts|delay)"
    "|response_id|request_id"
)


def stable(value: Any) -> Any:
    """A reply without what differs between any two of them; floats to four digits."""
    if isinstance(value, dict):
        kept = {name: each for name, each in value.items() if not VOLATILE.fullmatch(name)}
        return {name: stable(each) for name, each in kept.items()}
    if isinstance(value, list):
        return [stable(each) for each in value]
    if isinstance(value, str):
        return re.sub(r"\[\d\d:\d\d:\d\d\]", "", value)  # messages of the grammar compiler
    return round(value, 4) if isinstance(value, float) else value


def chunks_of(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


def last_chunks(chunks: list[Any]) -> list[Any]:
    """The last chunk of a stream; of `/generate` that of each output."""
    last = {chunk.get("index", 0): chunk for chunk in chunks}
    return [last[index] for index in sorted(last)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("what", REQUESTS)
def test_a_reply_is_the_same_as_without_recording(
    recording_server: SGLangServer,
    plain_server: SGLangServer,
    fresh_key: FreshKey,
    what: str,
    stream: bool,
) -> None:
    path, body = REQUESTS[what]
    body = {**body, "stream": stream}
    for _ in range(STREAM_TRIES if stream else 1):
        recorded = post(recording_server, path, body, fresh_key())
        plain = post(plain_server, path, body, fresh_key())
        assert recorded.status_code == plain.status_code
        found, expected = stable(chunks_of(recorded)), stable(chunks_of(plain))
        if stream:  # how tokens share chunks is a matter of timing
            found, expected = last_chunks(found), last_chunks(expected)
        if found == expected:
            break
    assert found == expected


@pytest.mark.parametrize(
    "key",
    ["EMPTY", "sk-abc", None, "a/b", "ü/ö/1", "../../1", "a/b/0" * 1_000],
    ids=["EMPTY", "sk", "none", "two", "unicode", "dots", "long"],
)
def test_what_is_no_record_key_is_served_and_counted(
    recording_server: SGLangServer, record_client: RecordClient, key: str | None
) -> None:
    before = counters(record_client)
    headers = {} if key is None else {"X-Record-Key": key.encode()}
    body = {"input_ids": PROMPT_IDS, "sampling_params": ENGINE_GREEDY}
    with httpx.Client(base_url=recording_server.base_url, timeout=60) as http:
        response = http.post("/generate", json=body, headers=headers)
    assert response.status_code == 200
    after = counters(record_client)
    assert after.started == before.started
    assert sum(after.unkeyed.values()) == sum(before.unkeyed.values()) + 1
    assert after.errors == before.errors


def test_the_admin_key_opens_records_and_nothing_else_does(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    generate(recording_server, key, **ENGINE_GREEDY)
    for wrong in (key, "wrong", None):
        with (
            RecordClient(recording_server.base_url, admin_key=wrong) as client,
            pytest.raises(NotAuthorizedError),
        ):
            client.get(key)
        assert post(recording_server, "/flush_cache", {}, wrong).status_code == 401
    with httpx.Client(base_url=recording_server.base_url) as http:
        for path in ("/records", "/records/keys", "/records/stats"):
            assert http.get(path, params={"prefix": ""}).status_code == 401
        assert "/records/drain" in http.get("/openapi.json").json()["paths"]
    assert record_client.update_reward(key, 0.5) == 1
    with record_client.drain(key) as drained:
        assert [each.reward for each in drained.experiences] == [0.5]


def test_the_page_has_the_text_of_tokens_from_the_engines_tokenizer(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key, text = fresh_key(), "Grüße 🤖"
    body = {"text": text, "sampling_params": ENGINE_GREEDY}
    assert post(recording_server, "/generate", body, key).status_code == 200
    (record,) = record_client.get(key)
    asked = {"ids": record.prompt_ids.tolist()}
    reply = post(recording_server, "/records/pieces", asked, ADMIN_KEY)
    assert b"".join(map(base64.b64decode, reply.json()["pieces"])).decode() == text


def test_the_page_is_given_out_without_the_engines_own_key(moe_server: SGLangServer) -> None:
    assert httpx.get(f"{moe_server.base_url}/records/view").status_code == 200
    assert httpx.get(f"{moe_server.base_url}/records/view/app.js").status_code == 200
    assert httpx.get(f"{moe_server.base_url}/records/recent").status_code == 401


def test_a_composite_key_passes_the_engines_own_authentication(
    moe_server: SGLangServer, moe_client: RecordClient, fresh_key: FreshKey
) -> None:
    composite, named = fresh_key(), fresh_key()
    body = {"input_ids": PROMPT_IDS, "sampling_params": ENGINE_GREEDY}
    assert post(moe_server, "/generate", body, composite).status_code == 401
    assert post(moe_server, "/generate", body, f"wrong:{composite}").status_code == 401
    assert moe_client.get(composite) == []
    assert post(moe_server, "/generate", body, f"{ENGINE_KEY}:{composite}").status_code == 200
    assert len(moe_client.get(composite)) == 1
    # A router passes the engine's bearer on, and names the run in a header.
    headers = {"X-Record-Key": named}
    assert post(moe_server, "/generate", body, ENGINE_KEY, **headers).status_code == 200
    assert len(moe_client.get(named)) == 1
    with (
        RecordClient(moe_server.base_url, admin_key=ENGINE_KEY) as client,
        pytest.raises(ClientError),
    ):
        client.get("")


def test_metrics_hold_the_recorders_counters_beside_the_engines(
    recording_server: SGLangServer, fresh_key: FreshKey
) -> None:
    generate(recording_server, fresh_key(), **ENGINE_GREEDY)
    text = httpx.get(f"{recording_server.base_url}/metrics").text
    assert "recorder_started_total" in text
    assert "sglang:prompt_tokens_total" in text
    assert "sglang:time_to_first_token_seconds" in text


def test_a_request_that_is_sent_again_after_its_answer_went_out_keeps_both(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    before = counters(record_client).superseded
    for attempt in ("0", "1"):  # were the first answer lost on the way, the server would not know
        headers = {"X-Stainless-Retry-Count": attempt}
        post(recording_server, "/v1/chat/completions", chat(**GREEDY), key, **headers)
    records = record_client.get(key)
    assert sorted((record.attempt, record.delivered) for record in records) == [
        (0, True),
        (1, True),
    ]
    turns = [turn for each in record_client.experiences(key) for turn in each.turns]
    assert {turn.record_id for turn in turns} == {record.id for record in records}
    assert counters(record_client).superseded == before


CLIENTS = 24
WHOLE, STREAMED, LEFT, TIMED_OUT = "whole", "streamed", "left", "timed_out"


class Agent:
    """One client with a key and a marker of its own."""

    def __init__(
        self, number: int, key: str, server: SGLangServer, http: httpx.AsyncClient
    ) -> None:
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
            "max_tokens": 2 * LONG_TOKENS if gone else random.Random(self.key).randrange(5, 30),
            "n": self.samples,
            "stream": self.kind in (STREAMED, LEFT),
            "extra_body": {"ignore_eos": True},
        }
        if self.kind == TIMED_OUT:
            with pytest.raises(APITimeoutError):
                await self._client.chat.completions.create(**request, timeout=0.5)
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


async def test_many_clients_some_of_which_leave(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
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
        if agent.kind in (WHOLE, STREAMED):
            assert [record.response_text for record in records] == agent.texts
            assert {record.finish_reason for record in records} == {FinishReason.LENGTH}
        elif agent.kind == LEFT:
            [record] = records
            assert record.response_text.startswith(agent.texts[0])
    assert found == {}

    after = counters(record_client)
    asked = sum(agent.samples for agent in agents)
    dropped = Counter(after.dropped) - Counter(before.dropped)
    assert after.pending == 0
    assert after.started - before.started == asked
    assert after.recorded - before.recorded + dropped.total() == asked
    assert set(dropped) <= {"empty"}
    assert after.errors == before.errors


async def test_a_drain_waits_for_what_is_in_flight_or_says_how_much_is(
    recording_server: SGLangServer, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    url = recording_server.base_url
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as http,
        AsyncRecordClient(url, admin_key=ADMIN_KEY) as records,
    ):
        body = {"input_ids": PROMPT_IDS, "sampling_params": {"max_new_tokens": LONG_TOKENS}}
        body["sampling_params"]["ignore_eos"] = True
        headers = {"authorization": f"Bearer {key}"}
        running = asyncio.create_task(http.post("/generate", json=body, headers=headers))
        while not [each for each in await records.keys(key) if each.pending]:
            await asyncio.sleep(0.02)
        async with records.drain(key) as drained:
            assert (drained.records, drained.pending) == ([], 1)
        async with records.drain(key, wait_s=60) as drained:
            assert len(only(drained.records).response_ids) == LONG_TOKENS
            assert drained.pending == 0
        assert (await running).status_code == 200
