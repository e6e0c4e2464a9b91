"""Agents that speak nothing but OpenAI's API, recorded by `tinker-recorder serve`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tinker
from fastapi.testclient import TestClient
from openai import AsyncOpenAI, OpenAI
from tinker import types

from recorder_core import FinishReason, KeyPrefix, Record, Recorder
from recorder_core.client import AsyncRecordClient, RecordClient
from recorder_core.local import LocalRecords
from tests.tinker.conftest import finished
from tests.tinker.servers import ADMIN_KEY, RecordingServer, SkyRLServer

pytestmark = pytest.mark.server

Key = Callable[[], str]
QUESTION = [{"role": "user", "content": "The licence?"}]
IDS = {"return_token_ids": True}


def agent(server: RecordingServer, key: str) -> OpenAI:
    return OpenAI(base_url=f"{server.base_url}/v1", api_key=key, max_retries=0)


def recorded(records: RecordClient, key: str) -> list[Record]:
    return records.get(key)


def sampled_text(record: Record, model: Path) -> str:
    """What was sampled as text, whatever a parser makes of it."""
    from transformers import AutoTokenizer

    ids = record.response_ids.tolist()
    stopped = record.finish_reason is FinishReason.STOP
    return str(AutoTokenizer.from_pretrained(model).decode(ids[:-1] if stopped else ids))


def test_a_chat_is_recorded_with_the_ids_and_logprobs_that_it_returns(
    recording_server: RecordingServer, records: RecordClient, fresh_key: Key, model: Path
) -> None:
    key = fresh_key()
    reply = agent(recording_server, key).chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0.7, logprobs=True, extra_body=IDS
    )
    (record,) = recorded(records, key)
    (choice,) = reply.choices
    assert record.prompt_ids.tolist() == reply.prompt_token_ids
    assert record.response_ids.tolist() == choice.token_ids
    assert choice.logprobs is not None
    shown = [each.logprob for each in choice.logprobs.content or []]
    np.testing.assert_array_equal(record.logprobs, np.float32(shown))
    assert record.response_text == sampled_text(record, model)
    assert record.finish_reason.value == choice.finish_reason
    assert record.sampling.temperature == pytest.approx(0.7)
    assert record.versions[0].version == str(model)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(record.response_ids) <= 8
    assert reply.usage.prompt_tokens == len(record.prompt_ids)


def test_a_streamed_chat_is_one_delta_and_is_recorded_alike(
    recording_server: RecordingServer, records: RecordClient, fresh_key: Key, model: Path
) -> None:
    key = fresh_key()
    chunks = list(
        agent(recording_server, key).chat.completions.create(
            model="tiny",
            messages=QUESTION,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=IDS,
        )
    )
    (record,) = recorded(records, key)
    first, last = chunks
    assert isinstance(first.choices[0].delta.content, str)
    assert record.response_text == sampled_text(record, model)
    assert first.choices[0].finish_reason == record.finish_reason.value
    assert first.choices[0].token_ids == record.response_ids.tolist()
    assert last.usage is not None
    assert last.usage.completion_tokens == len(record.response_ids)


def test_each_of_n_choices_is_a_record(
    recording_server: RecordingServer, records: RecordClient, fresh_key: Key
) -> None:
    key = fresh_key()
    reply = agent(recording_server, key).chat.completions.create(
        model="tiny", messages=QUESTION, n=3, extra_body=IDS
    )
    ids = [choice.token_ids for choice in reply.choices]
    found = recorded(records, key)
    assert [record.response_ids.tolist() for record in found] == ids
    assert [record.sample_index for record in found] == [0, 1, 2]


def test_a_stop_string_cuts_the_text_and_not_the_record(
    recording_server: RecordingServer, records: RecordClient, fresh_key: Key
) -> None:
    key = fresh_key()
    client = agent(recording_server, key)
    stops = ["e", "t", "s", "a"]
    reply = client.completions.create(
        model="tiny", prompt="The licence", n=8, stop=stops, extra_body=IDS
    )
    found = recorded(records, key)
    cut = 0
    for record, choice in zip(found, reply.choices, strict=True):
        assert record.response_ids.tolist() == choice.token_ids
        assert record.response_text == choice.text
        assert not any(stop in choice.text for stop in stops)
        if choice.stop_reason is not None:
            cut += 1
            assert choice.finish_reason == "stop"
            assert record.stop_reason == choice.stop_reason
            assert record.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert cut > 0


def test_a_completion_of_ids_is_sampled_from_these_ids(
    recording_server: RecordingServer, records: RecordClient, fresh_key: Key
) -> None:
    key = fresh_key()
    prompts = [[5, 6, 7], [8, 9]]
    reply = agent(recording_server, key).completions.create(
        model="tiny", prompt=prompts, logprobs=1, max_tokens=8, extra_body=IDS
    )
    by_prompt = {tuple(record.prompt_ids.tolist()): record for record in recorded(records, key)}
    for choice, prompt in zip(reply.choices, prompts, strict=True):
        record = by_prompt[tuple(prompt)]
        assert choice.logprobs is not None
        np.testing.assert_array_equal(record.logprobs, np.float32(choice.logprobs.token_logprobs))
        assert record.response_ids.tolist() == choice.token_ids


@pytest.mark.slow
async def test_64_agents_with_64_keys_are_64_trajectories(
    recording_server: RecordingServer, fresh_key: Key
) -> None:
    keys = [fresh_key() for _ in range(64)]
    batch = keys[0].split("/")[0]
    url = recording_server.base_url

    async def run(number: int, key: str, records: AsyncRecordClient) -> None:
        messages: list[Any] = [{"role": "user", "content": f"Number {number % 10}?"}]
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=300) as client:
            for _ in range(2):
                if number % 2:
                    stream = await client.chat.completions.create(
                        model="tiny", messages=messages, stream=True
                    )
                    text = "".join([each.choices[0].delta.content or "" async for each in stream])
                else:
                    reply = await client.chat.completions.create(model="tiny", messages=messages)
                    text = reply.choices[0].message.content or ""
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "And then?"},
                ]
        assert await records.update_reward(key, float(number)) == 2

    async with AsyncRecordClient(url, admin_key=ADMIN_KEY) as records:
        await asyncio.gather(*(run(number, key, records) for number, key in enumerate(keys)))
        async with records.drain(batch, wait_s=10) as drained:
            experiences = drained.experiences
        assert await records.keys(batch) == []
    assert drained.pending == 0
    assert {str(each.eid.key): each.reward for each in experiences} == {
        key: float(number) for number, key in enumerate(keys)
    }
    for each in experiences:
        # The second prompt is the first turn's ids and new ones: sampled tokens are kept as they
        # were, though their text would hardly ever give them back.
        assert len(each.turns) == 2
        assert each.action_mask is not None
        assert each.action_mask.sum() == sum(turn.end - turn.start for turn in each.turns)


def test_a_request_without_a_record_key_is_served_and_not_recorded(
    recording_server: RecordingServer, records: RecordClient
) -> None:
    def unkeyed() -> int:
        stats = records.stats()[recording_server.base_url].recorder
        return stats.unkeyed.get("not_a_key", 0)

    before = unkeyed()
    reply = agent(recording_server, "EMPTY").chat.completions.create(
        model="tiny", messages=QUESTION
    )
    assert reply.choices[0].message.role == "assistant"
    assert unkeyed() == before + 1


BAD: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str]] = {
    "another model": ({"model": "other"}, openai.NotFoundError, "'tiny' is"),
    "no messages": ({"messages": []}, openai.BadRequestError, "messages"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        openai.BadRequestError,
        "only text",
    ),
    "a penalty": ({"frequency_penalty": 0.5}, openai.BadRequestError, "frequency_penalty"),
    "top logprobs": (
        {"logprobs": True, "top_logprobs": 5},
        openai.BadRequestError,
        "top_logprobs",
    ),
    "a forced tool": ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice"),
    "no sample": ({"n": 0}, openai.BadRequestError, "n:"),
    "a temperature below zero": ({"temperature": -1}, openai.BadRequestError, "temperature"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_gets_an_error_that_the_client_understands(
    case: str, recording_server: RecordingServer, records: RecordClient, fresh_key: Key
) -> None:
    fields, kind, said = BAD[case]
    key = fresh_key()
    with pytest.raises(kind, match=said) as caught:
        agent(recording_server, key).chat.completions.create(
            **{"model": "tiny", "messages": QUESTION, **fields}
        )
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] in ("invalid_request_error", "not_found_error")
    assert recorded(records, key) == []


def test_the_model_is_listed(recording_server: RecordingServer) -> None:
    (model,) = agent(recording_server, "EMPTY").models.list().data
    assert model.id == "tiny"


def test_records_and_the_sampler_want_the_admin_key(
    recording_server: RecordingServer, fresh_key: Key
) -> None:
    for method, path in [
        ("GET", "/records/keys?prefix="),
        ("POST", "/records/drain"),
        ("POST", "/records/sampler"),
        ("GET", "/records/sampler"),
    ]:
        reply = httpx.request(
            method,
            recording_server.base_url + path,
            json={"prefix": "", "model_path": "tinker://x"} if method == "POST" else None,
            headers={"authorization": f"Bearer {fresh_key()}"},
        )
        assert reply.status_code == 401


def test_counters_are_on_the_servers_metrics(recording_server: RecordingServer) -> None:
    text = httpx.get(f"{recording_server.base_url}/metrics").text
    assert "recorder_started_total" in text


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def path_that_calls_a_tool(
    service: tinker.ServiceClient, recording_server: RecordingServer, model: Path
) -> str:
    """A LoRA adapter that has been trained to call the tool, whatever it is asked."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    reply = agent(recording_server, "EMPTY").chat.completions.create(
        model="tiny", messages=QUESTION, tools=[TOOL], extra_body=IDS
    )
    prompt = reply.prompt_token_ids
    call = tokenizer.encode(CALL, add_special_tokens=False)
    ids = [*prompt, *call]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": ids[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(call),
        },
    )
    training = finished(service.create_lora_training_client(base_model=str(model), rank=8))
    for _ in range(40):
        forward = training.forward_backward([datum, datum], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=0.02))
        forward.result(), step.result()
    return training.save_weights_for_sampler(name="calls").result().path


@pytest.mark.slow
def test_a_swapped_sampler_calls_a_tool_and_its_result_extends_the_recorded_ids(
    recording_server: RecordingServer,
    records: RecordClient,
    fresh_key: Key,
    path_that_calls_a_tool: str,
    model: Path,
) -> None:
    """E11."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    key = fresh_key()
    client = agent(recording_server, key)
    before = client.chat.completions.create(model="tiny", messages=QUESTION, tools=[TOOL])
    swapped = httpx.post(
        f"{recording_server.base_url}/records/sampler",
        json={"model_path": path_that_calls_a_tool},
        headers=headers,
        timeout=60,
    )
    assert swapped.json() == {"version": path_that_calls_a_tool}
    first = client.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[TOOL], temperature=0, max_tokens=48
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {})
    result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    messages: list[Any] = [*QUESTION, message.model_dump(exclude_none=True), result]
    client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL])
    old, called, after = recorded(records, key)
    assert before.choices[0].message.tool_calls is None
    assert old.response_text == sampled_text(old, model)
    assert [record.versions[0].version for record in (old, called, after)] == [
        str(model),
        path_that_calls_a_tool,
        path_that_calls_a_tool,
    ]
    assert called.finish_reason is FinishReason.STOP
    # What was sampled, markup and all, and not what the parser made of it.
    assert not message.content
    assert called.response_text == CALL.removesuffix("<|im_end|>")
    assert after.parent == called.id
    assert after.start == called.end


@pytest.fixture
def local(
    recording_server: RecordingServer, server: SkyRLServer, model: Path
) -> Iterator[tuple[TestClient, Recorder]]:
    """The application with an API key of its own, in this process."""
    from transformers import AutoTokenizer

    from tinker_recorder.serve import Rendering, SamplerPool, create_app

    recorder = Recorder()
    samplers = SamplerPool(str(model), base_url=server.base_url, api_key="tml-local")
    rendering = Rendering(AutoTokenizer.from_pretrained(model))
    app = create_app(samplers, rendering, recorder, name="tiny", api_key="K", max_tokens=8)
    this_machine = {"base_url": "http://localhost", "client": ("127.0.0.1", 1)}
    with TestClient(app, raise_server_exceptions=False, **this_machine) as client:
        yield client, recorder
    recorder.close()


def ask(client: TestClient, **headers: str) -> httpx.Response:
    body = {"model": "tiny", "prompt": [5, 6, 7]}
    return client.post("/v1/completions", json=body, headers=headers)


def test_an_api_key_of_the_servers_own_goes_before_the_record_key(
    local: tuple[TestClient, Recorder], fresh_key: Key
) -> None:
    client, recorder = local
    key = fresh_key()
    for refused in ({}, {"authorization": f"Bearer {key}"}, {"authorization": f"Bearer X:{key}"}):
        reply = ask(client, **refused)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
    assert ask(client, authorization="Bearer K").status_code == 200
    assert recorder.stats().started == 0
    assert ask(client, authorization=f"Bearer K:{key}").status_code == 200
    named = {"authorization": "Bearer K", "x-record-key": key}
    assert ask(client, **named).status_code == 200
    assert recorder.stats().recorded == 2


def test_without_an_admin_key_strangers_use_no_route_of_the_records(
    local: tuple[TestClient, Recorder],
) -> None:
    """The routes that are this server's own among them. E1, E2, E16."""
    client, _ = local
    strangers = [
        ({"x-forwarded-for": "127.0.0.1"}, 403),
        ({"host": "evil.example"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ([("authorization", "Bearer a"), ("authorization", "Bearer b")], 400),
    ]
    for headers, status in strangers:
        for method, path in [
            ("GET", "/records/stats"),
            ("DELETE", "/records?prefix="),
            ("GET", "/records/sampler"),
            ("POST", "/records/sampler"),
        ]:
            reply = client.request(method, path, headers=headers)
            assert reply.status_code == status, (method, path, headers)
    assert client.get("/records/stats").status_code == 200


def test_a_credential_that_is_no_record_key_hides_none_that_is(
    local: tuple[TestClient, Recorder], fresh_key: Key
) -> None:
    """And the server's own key is no part of one. E4, E16, E17."""
    client, recorder = local
    own, keys = {"authorization": "Bearer K"}, [fresh_key() for _ in range(3)]
    assert ask(client, **own, **{"x-api-key": keys[0]}).status_code == 200
    assert ask(client, **own, **{"x-record-key": f"K:{keys[1]}"}).status_code == 200
    named = {"x-record-key": "no-key", "x-api-key": f"K:{keys[2]}"}
    assert ask(client, **named).status_code == 200
    assert recorder.flush(10)
    assert [str(each.key) for each in recorder.store.keys(KeyPrefix())] == sorted(keys)


def test_weights_that_are_not_there_are_refused_and_the_old_ones_stay(
    local: tuple[TestClient, Recorder], fresh_key: Key, model: Path
) -> None:
    client, recorder = local
    for path in ("tinker://nowhere/sampler_weights/none", "checkpoint-7"):
        refused = client.post("/records/sampler", json={"model_path": path})
        assert refused.status_code in (400, 502)
        assert refused.json()["error"]["message"]
    assert client.get("/records/sampler").json() == {"version": str(model)}
    assert ask(client, authorization=f"Bearer K:{fresh_key()}").status_code == 200
    (record,) = LocalRecords(recorder).get()
    assert record.versions[0].version == str(model)


def test_a_refusal_of_the_services_is_an_error_that_the_client_understands(
    local: tuple[TestClient, Recorder], fresh_key: Key
) -> None:
    client, recorder = local
    headers = {"authorization": f"Bearer K:{fresh_key()}"}
    # More than the server takes for a seed.
    body = {"model": "tiny", "prompt": [5, 6, 7], "seed": 2**80}
    reply = client.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code in (400, 502)
    assert reply.json()["error"]["message"].startswith("Tinker ")
    stats = recorder.stats()
    assert (stats.dropped, stats.pending, stats.recorded) == ({"failed": 1}, 0, 0)


@pytest.mark.parametrize(
    "asked", [{"max_tokens": 0}, {"max_tokens": 0, "echo": True}, {"echo": True}]
)
def test_a_request_for_no_token_is_refused_and_is_no_sample(
    asked: dict[str, Any], local: tuple[TestClient, Recorder], fresh_key: Key
) -> None:
    """Scores have no token for the client.

    M2.
    """
    client, recorder = local
    headers = {"authorization": f"Bearer K:{fresh_key()}"}
    body = {"model": "tiny", "prompt": [5, 6, 7], **asked}
    reply = client.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] in asked
    assert recorder.stats().started == 0


@pytest.mark.slow
def test_a_server_of_saved_weights_finds_out_the_base_model(
    server: SkyRLServer, path_that_calls_a_tool: str, model: Path
) -> None:
    from tinker_recorder.serve import SamplerPool

    samplers = SamplerPool(
        model_path=path_that_calls_a_tool, base_url=server.base_url, api_key="tml-local"
    )
    assert samplers.base_model == str(model)
    assert samplers.current.weights.label == path_that_calls_a_tool
    assert samplers.tokenizer().vocab_size == 512
