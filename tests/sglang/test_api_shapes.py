"""A record is what the engine did, whatever API asked for it and whatever the client was shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import numpy as np
import pytest
import torch
from openai import OpenAI
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.sglang_server import SGLangServer
from recorder_core import FinishReason, Record
from recorder_core.client import RecordClient
from tests.models import round_trip_ids, tiny_qwen3
from tests.records import whole_prompts
from tests.sglang.apis import (
    PROMPT,
    PROMPT_IDS,
    assert_recorded,
    by_sample,
    chat,
    completion,
    generate,
    only,
    post,
    settle,
    shown_ids,
    shown_logprobs,
    streaming,
)
from tests.sglang.conftest import ADMIN_KEY

pytestmark = pytest.mark.server
FreshKey = Callable[[], str]

EOS = 2  # <|im_end|>
GREEDY = {"temperature": 0.0, "ignore_eos": True}
either_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_qwen3())


@pytest.fixture(scope="module")
def tiny() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3(), dtype=torch.float32).eval()


def model_logprobs(model: Any, record: Record, temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """What transformers computes for the tokens of a root record: float32 [response tokens]."""
    ids = torch.tensor([[*record.prompt_ids.tolist(), *record.response_ids.tolist()]])
    with torch.inference_mode():
        logits = model(ids).logits[0].float()[len(record.prompt_ids) - 1 : -1]
    chosen = torch.tensor(record.response_ids.tolist())[:, None]
    return (logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0].numpy()


@either_way
@pytest.mark.parametrize("n", [1, 3])
def test_a_record_holds_the_ids_and_logprobs_that_the_reply_shows(
    recording_server: SGLangServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    n: int,
    stream: bool,
) -> None:
    key = fresh_key()
    fields = {"max_new_tokens": 12, "temperature": 1.0, "n": n}
    outputs = generate(
        recording_server, key, text=PROMPT, return_logprob=True, stream=stream, **fields
    )
    records = by_sample(record_client.get(key))
    assert len(records) == len(outputs) == n
    for record, output in zip(records, outputs, strict=True):
        assert_recorded(record, output)
    # One of them holds the prompt that they share.
    assert [record.prompt_text for record in records if record.base is None] == [PROMPT]
    assert len({record.request_id for record in records}) == 1
    assert records[0].request_id == outputs[0]["meta_info"]["id"]


@either_way
def test_logprobs_that_nobody_asked_for_are_those_that_the_api_would_show(
    recording_server: SGLangServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    tiny: Any,
    stream: bool,
) -> None:
    asked, unasked = fresh_key(), fresh_key()
    fields = {"max_new_tokens": 12, **GREEDY}
    [shown] = generate(recording_server, asked, return_logprob=True, stream=stream, **fields)
    [hidden] = generate(recording_server, unasked, stream=stream, **fields)

    record = only(record_client.get(unasked))
    assert "output_token_logprobs" not in hidden["meta_info"]
    assert record.response_ids.tolist() == hidden["output_ids"] == shown_ids(shown)
    np.testing.assert_allclose(record.logprobs, shown_logprobs(shown), atol=1e-5)
    np.testing.assert_allclose(record.logprobs, model_logprobs(tiny, record), atol=1e-4)
    assert len(set(record.logprobs.tolist())) > 6  # values, not a constant
    assert record.flags == ()


def test_logprobs_are_of_the_distribution_at_the_temperature_over_the_whole_vocabulary(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey, tiny: Any
) -> None:
    key = fresh_key()
    sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
    generate(recording_server, key, max_new_tokens=40, ignore_eos=True, **sampling)

    record = only(record_client.get(key))
    np.testing.assert_allclose(record.logprobs, model_logprobs(tiny, record, 0.6), atol=1e-4)
    assert np.abs(record.logprobs - model_logprobs(tiny, record)).mean() > 0.05
    kept = {name: getattr(record.sampling, name) for name in sampling}
    assert kept == sampling
    assert record.sampling.logprobs_mode == "temperature_logprobs"


@either_way
@pytest.mark.parametrize("n", [1, 2])
def test_chats_and_completions_are_recorded(
    recording_server: SGLangServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    n: int,
    stream: bool,
) -> None:
    chat_key, text_key = fresh_key(), fresh_key()
    common = {"max_tokens": 10, "temperature": 1.0, "n": n, "ignore_eos": True}
    bodies = {
        chat_key: ("/v1/chat/completions", chat(**common, logprobs=True, top_logprobs=2)),
        text_key: ("/v1/completions", completion(**common, logprobs=2)),
    }
    for key, (path, body) in bodies.items():
        texts, logprobs = [""] * n, [[] for _ in range(n)]
        if stream:
            with streaming(recording_server, path, body, key) as chunks:
                choices = [each for chunk in chunks for each in chunk["choices"]]
        else:
            choices = post(recording_server, path, body, key).json()["choices"]
        for choice in choices:
            shown = choice.get("delta") or choice.get("message") or choice
            texts[choice["index"]] += shown.get("content") or shown.get("text") or ""
            values = choice.get("logprobs") or {}
            logprobs[choice["index"]] += values.get("token_logprobs") or []
            logprobs[choice["index"]] += [each["logprob"] for each in values.get("content") or ()]

        records = by_sample(record_client.get(key))
        assert [record.response_text for record in records] == texts
        prompts = whole_prompts(records)
        for record, values in zip(records, logprobs, strict=True):
            shown = iter(record.logprobs.tolist())
            # Streamed, some releases leave out those of chunks without text.
            assert len(values) == 10 or (stream and len(values) > 4)
            assert all(value in shown for value in np.array(values, dtype=np.float32).tolist())
            # The ids are the engine's: what it samples for the same ids, it calls the same.
            [twin] = generate(
                recording_server,
                fresh_key(),
                input_ids=[*prompts[record.id], *record.response_ids.tolist()],
                max_new_tokens=1,
                **GREEDY,
            )
            assert twin["meta_info"]["prompt_tokens"] == record.end


def test_a_chat_prompt_is_the_rendered_template(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey, tokenizer: Any
) -> None:
    key = fresh_key()
    post(recording_server, "/v1/chat/completions", chat(max_tokens=4), key)
    messages = [{"role": "user", "content": PROMPT}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert only(record_client.get(key)).prompt_ids.tolist() == tokenizer.encode(text)


@either_way
def test_responses_and_anthropic_messages_are_recorded(
    recording_server: SGLangServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    stream: bool,
) -> None:
    twin = fresh_key()
    post(recording_server, "/v1/chat/completions", chat(max_tokens=10, temperature=0.0), twin)
    expected = only(record_client.get(twin))

    keys = {"responses": fresh_key(), "anthropic": fresh_key()}
    url, texts = recording_server.base_url, {}
    with OpenAI(base_url=f"{url}/v1", api_key=keys["responses"]) as openai:
        fields = {"model": "model", "input": PROMPT, "max_output_tokens": 10, "temperature": 0.0}
        if stream:
            [*_, last] = openai.responses.create(**fields, stream=True)
            response = last.response
        else:
            response = openai.responses.create(**fields)
        texts["responses"] = response.output_text
    with anthropic.Anthropic(base_url=url, api_key=keys["anthropic"]) as client:
        message = {"role": "user", "content": PROMPT}
        fields = {"model": "model", "messages": [message], "max_tokens": 10}
        fields["extra_body"] = {"temperature": 0.0}
        if stream:
            with client.messages.stream(**fields) as shown:
                reply = shown.get_final_message()
        else:
            reply = client.messages.create(**fields)
        texts["anthropic"] = reply.content[0].text
    for name, key in keys.items():
        record = only(record_client.get(key))
        assert record.prompt_ids.tolist() == expected.prompt_ids.tolist(), name
        # The responses API keeps two of the tokens asked for to itself.
        count = 8 if name == "responses" else 10
        assert record.response_ids.tolist() == expected.response_ids[:count].tolist(), name
        np.testing.assert_allclose(record.logprobs, expected.logprobs[:count], atol=1e-5)
        assert record.response_text == texts[name], name
        assert record.finish_reason is FinishReason.LENGTH


@either_way
def test_ollamas_apis_are_recorded(
    recording_server: SGLangServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    engine_version: Version,
    stream: bool,
) -> None:
    common = {"options": {"num_predict": 10, "temperature": 0.0}, "stream": stream}
    common["model"] = "model"
    twins = {
        "/api/generate": ({"prompt": PROMPT}, ("/generate", {"text": PROMPT})),
        "/api/chat": (chat(), ("/v1/chat/completions", chat(max_tokens=10, temperature=0.0))),
    }
    if engine_version < Version("0.5.23"):
        del twins["/api/chat"]  # fails in SGLang, which takes the tokenizer's output for a list
    for path, (body, (twin_path, twin_body)) in twins.items():
        key, twin = fresh_key(), fresh_key()
        params = {"sampling_params": {"max_new_tokens": 10, "temperature": 0.0}}
        post(recording_server, twin_path, {**twin_body, **params}, twin)
        reply = post(recording_server, path, {**body, **common}, key)
        parts = [json.loads(line) for line in reply.text.split("\n") if line]
        shown = [part.get("message") or {"content": part["response"]} for part in parts]
        text = "".join(each["content"] for each in shown)

        record, expected = only(record_client.get(key)), only(record_client.get(twin))
        assert record.prompt_ids.tolist() == expected.prompt_ids.tolist()
        assert record.response_ids.tolist() == expected.response_ids.tolist()
        np.testing.assert_allclose(record.logprobs, expected.logprobs, atol=1e-5)
        # Streamed, some releases leave out the last piece, whatever it holds.
        assert record.response_text.startswith(text)
        assert text if stream else text == record.response_text
        assert record.finish_reason is FinishReason.LENGTH


def test_each_prompt_of_a_batch_is_a_record_in_the_order_of_the_reply(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    outputs = generate(
        recording_server, key, input_ids=prompts, return_logprob=True, n=2, max_new_tokens=5
    )
    records = by_sample(record_client.get(key))
    whole = whole_prompts(records)
    assert [whole[record.id] for record in records] == [
        prompt for prompt in prompts for _ in range(2)
    ]
    for record, output in zip(records, outputs, strict=True):
        assert_recorded(record, output)


@either_way
def test_a_stop_string_that_spans_tokens_is_recorded_as_the_engine_counts(
    recording_server: SGLangServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    tokenizer: Any,
    stream: bool,
) -> None:
    bias = {str(token): 100.0 for token in round_trip_ids(tiny_qwen3())}
    fields = {"max_new_tokens": 30, **GREEDY, "logit_bias": bias, "repetition_penalty": 1.9}
    [unstopped] = generate(recording_server, fresh_key(), **fields)
    text = unstopped["text"]
    stop = next(text[i : i + 3] for i in range(5, 20) if text.index(text[i : i + 3]) == i)
    key = fresh_key()
    [output] = generate(
        recording_server, key, return_logprob=True, stream=stream, **fields, stop=[stop]
    )
    record = only(record_client.get(key))
    assert_recorded(record, output)
    assert record.response_text == text[: text.index(stop)]
    assert record.response_ids.tolist() == unstopped["output_ids"][: text.index(stop) + 3]
    assert record.finish_reason is FinishReason.STOP
    assert record.stop_reason == stop


def test_the_stop_token_is_the_last_token_recorded(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    bias = {str(EOS): 100.0}
    [output] = generate(
        recording_server, key, max_new_tokens=9, return_logprob=True, logit_bias=bias
    )
    record = only(record_client.get(key))
    assert_recorded(record, output)
    assert record.response_ids.tolist() == [EOS]
    assert (record.finish_reason, record.stop_reason) == (FinishReason.STOP, EOS)


def test_an_answer_cut_at_max_tokens_is_marked_truncated(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    generate(recording_server, key, max_new_tokens=6, ignore_eos=True)
    [experience] = record_client.experiences(key)
    assert experience.finish_reason is FinishReason.LENGTH
    assert experience.truncate_status == "response_truncated"
    assert experience.response_length == 6


def test_a_sampled_token_below_the_top_asked_for_has_its_own_logprob(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    fields = {"return_logprob": True, "top_logprobs_num": 1, "temperature": 2.0}
    [output] = generate(recording_server, key, max_new_tokens=40, ignore_eos=True, **fields)
    best = [each[0][1] for each in output["meta_info"]["output_top_logprobs"]]
    record = only(record_client.get(key))
    assert sum(a != b for a, b in zip(best, record.response_ids.tolist(), strict=True)) >= 3
    assert_recorded(record, output)


def test_turns_that_continue_are_one_trajectory_and_a_cached_prefix_is_whole(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key, fields = fresh_key(), {"max_new_tokens": 8, "ignore_eos": True, "return_logprob": True}
    prompt = [7, 7, *range(100, 160)]  # begins with the same token twice
    outputs = generate(recording_server, key, input_ids=prompt, n=2, **fields)
    longer = [*prompt, *outputs[1]["output_ids"], 9, 10]
    [last] = generate(recording_server, key, input_ids=longer, **fields)

    first, second, third = sorted(record_client.get(key), key=lambda each: each.created_at)
    parent = next(each for each in (first, second) if each.sample_index == 1)
    assert (third.parent, third.start) == (parent.id, parent.end)
    assert third.prompt_ids.tolist() == [9, 10]
    assert 0 < third.cached_tokens < len(longer)
    assert_recorded(third, last)
    experiences = record_client.experiences(key)
    assert len(experiences) == 2
    assert max((each.tokens.tolist() for each in experiences), key=len) == [
        *longer,
        *last["output_ids"],
    ]


@either_way
def test_a_tool_call_is_recorded_with_the_tokens_that_its_parser_strips(
    recording_server: SGLangServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    tokenizer: Any,
    engine_version: Version,
    stream: bool,
) -> None:
    if engine_version < Version("0.5.19"):
        pytest.skip("the grammars of this release have no CPU kernel")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'
    tool = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    body = chat(
        max_tokens=100,
        temperature=0.0,
        tools=[{"type": "function", "function": tool}],
        regex=call.replace("{", r"\{").replace("}", r"\}"),
    )
    key = fresh_key()
    if stream:
        with streaming(recording_server, "/v1/chat/completions", body, key) as chunks:
            shown = [each["delta"] for chunk in chunks for each in chunk["choices"]]
    else:
        reply = post(recording_server, "/v1/chat/completions", body, key).json()
        shown = [each["message"] for each in reply["choices"]]
    assert "tool_call>" not in "".join(each.get("content") or "" for each in shown)
    assert any(each.get("tool_calls") for each in shown)

    record = only(record_client.get(key))
    assert tokenizer.decode(record.response_ids).removesuffix("<|im_end|>") == call
    assert record.response_text == call
    assert len(record.logprobs) == len(record.response_ids)


def test_a_stream_that_its_client_leaves_is_recorded_up_to_there(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key, seen = fresh_key(), []
    body = {"input_ids": PROMPT_IDS, "sampling_params": {"max_new_tokens": 500, **GREEDY}}
    with streaming(recording_server, "/generate", body, key) as chunks:
        for chunk in chunks:
            seen = chunk["output_ids"]
            if len(seen) >= 5:
                break
    settle(record_client)

    record = only(record_client.get(key))
    # Some releases notice at once, others run to the end of what was asked.
    assert record.finish_reason is FinishReason.ABORT or "client_disconnected" in record.flags
    assert record.response_ids[: len(seen)].tolist() == seen
    assert len(record.logprobs) == len(record.response_ids)
    [twin] = generate(recording_server, fresh_key(), max_new_tokens=40, **GREEDY)
    count = min(40, len(record.response_ids))
    assert record.response_ids[:count].tolist() == twin["output_ids"][:count]


def test_an_abort_by_request_keeps_what_was_sampled(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key, seen = fresh_key(), []
    body = {
        "rid": key.replace("/", "-"),
        "input_ids": PROMPT_IDS,
        "sampling_params": {"max_new_tokens": 1500, **GREEDY},
    }
    with streaming(recording_server, "/generate", body, key) as chunks:
        for chunk in chunks:
            if not seen:
                post(recording_server, "/abort_request", {"rid": body["rid"]}, ADMIN_KEY)
            seen = chunk["output_ids"]
    record = only(record_client.get(key))
    assert record.finish_reason is FinishReason.ABORT
    assert 1 <= len(record.response_ids) < 1500
    # A stream's last chunk may repeat a token; a record does not.
    [twin] = generate(
        recording_server, fresh_key(), max_new_tokens=len(record.response_ids), **GREEDY
    )
    assert record.response_ids.tolist() == twin["output_ids"]
    assert record.flags == ()
