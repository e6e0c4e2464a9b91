"""A record is what the engine did, whatever API asked for it and whatever the client was shown."""

from __future__ import annotations

import os
from collections.abc import Callable
from http.client import HTTPConnection

import anthropic
import numpy as np
import pytest
from openai import OpenAI
from packaging.version import Version
from transformers import AutoTokenizer

from examples.vllm_server import VLLMServer
from recorder_core import FinishReason, Record
from recorder_core.client import RecordClient
from recorder_core.records import BIASED
from tests.models import round_trip_ids, tiny_qwen3
from tests.vllm.apis import (
    LONG,
    PROMPT,
    Reply,
    Request,
    ask,
    assert_recorded,
    by_sample,
    chat,
    completions,
    float32,
    generate,
    hold,
    leave_after,
    load,
    only,
    responses,
    send,
    settle,
    streaming,
    wait_until,
)
from tests.vllm.conftest import ADAPTER, ENGINE_KEY

pytestmark = pytest.mark.server
FreshKey = Callable[[], str]

EOS = 2  # <|im_end|>
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        # One value only: decoding under this schema leaves a random model no choice.
        "properties": {"a": {"type": "integer", "enum": [7]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'

either_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
token_apis = pytest.mark.parametrize("api", [chat, completions, generate])


@pytest.fixture(scope="module")
def digits() -> list[int]:
    return round_trip_ids(tiny_qwen3())


@either_way
@token_apis
@pytest.mark.parametrize("n", [1, 3])
def test_a_record_holds_the_ids_and_logprobs_that_the_reply_shows(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    api: Callable[..., Request],
    stream: bool,
    n: int,
    engine_version: Version,
) -> None:
    if api is generate and n > 1 and engine_version < Version("0.32" if stream else "0.30"):
        pytest.skip("this vLLM itself loses samples of a token request")
    key = fresh_key()
    request = api(max_tokens=12, n=n, seed=5, temperature=1.0, logprobs=1)
    reply = ask(recording_server, key, request, stream=stream)

    records = by_sample(record_client.get(key))
    assert sorted(records) == sorted(reply.samples) == list(range(n))
    for index, sample in reply.samples.items():
        assert_recorded(records[index], reply.prompt_ids, sample)
        assert api is generate or records[index].response_text == sample.text
    # Where usage is not in the reply the ids above are: the API shows each of them.
    counted = reply.completion_tokens or sum(len(each.ids) for each in reply.samples.values())
    assert sum(len(record.response_ids) for record in records.values()) == counted == 12 * n


@either_way
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("api", [chat, completions, generate, responses])
def test_logprobs_that_nobody_asked_for_are_those_that_the_api_would_show(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    api: Callable[..., Request],
    temperature: float,
    stream: bool,
) -> None:
    asked, unasked = fresh_key(), fresh_key()
    fields = {"max_tokens": 12, "seed": 11, "temperature": temperature}
    assert send(recording_server, asked, api(**fields, logprobs=1)).status_code == 200
    if stream:
        with streaming(recording_server, unasked, api(**fields)) as chunks:
            text = "".join(map(str, chunks))
    else:
        text = send(recording_server, unasked, api(**fields)).text
    assert '"logprob":' not in text
    assert "'logprob':" not in text

    shown, hidden = only(record_client.get(asked)), only(record_client.get(unasked))
    assert hidden.prompt_ids.tolist() == shown.prompt_ids.tolist()
    assert hidden.response_ids.tolist() == shown.response_ids.tolist()
    np.testing.assert_array_equal(hidden.logprobs, shown.logprobs)
    assert len(set(hidden.logprobs.tolist())) > 6  # values, not a constant
    assert hidden.flags == shown.flags == ()


def test_logprobs_of_samples_that_nobody_asked_for(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    asked, unasked = fresh_key(), fresh_key()
    request = chat(max_tokens=12, seed=11, temperature=1.0, n=3)
    ask(recording_server, asked, request.updated(logprobs=True))
    ask(recording_server, unasked, request)

    shown, hidden = by_sample(record_client.get(asked)), by_sample(record_client.get(unasked))
    for index, record in hidden.items():
        assert record.response_ids.tolist() == shown[index].response_ids.tolist()
        # When each sample joined the batch is a matter of timing, and shows in the last bits.
        np.testing.assert_allclose(record.logprobs, shown[index].logprobs, atol=1e-5)


def test_how_logprobs_travel_is_said_where_it_costs_more(
    recording_server: VLLMServer, fresh_key: FreshKey
) -> None:
    for _ in range(2):  # vLLM's loop takes the first before our wrapper is in its way
        ask(recording_server, fresh_key(), chat(max_tokens=3))
    said = recording_server.log().count("Logprobs come one object per token")
    assert said == (os.environ.get("RECORDER_VLLM_COLUMN") == "0")


@either_way
def test_responses_are_recorded(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    stream: bool,
) -> None:
    key = fresh_key()
    client = OpenAI(base_url=f"{recording_server.base_url}/v1", api_key=key)
    fields = {
        "model": "model",
        "input": PROMPT,
        "max_output_tokens": 12,
        "temperature": 1.0,
        "include": ["message.output_text.logprobs"],
        "extra_body": {"seed": 5, "enable_response_messages": True, "top_logprobs": 1},
    }
    if stream:
        response = [*client.responses.create(**fields, stream=True)][-1].response
    else:
        response = client.responses.create(**fields)

    record = only(record_client.get(key))
    [output] = response.output[0].content
    assert record.response_text == output.text
    assert len(record.response_ids) == response.usage.output_tokens == 12
    assert len(record.prompt_ids) == response.usage.input_tokens
    # The same prompt as in a chat; the responses API shows its ids in whole replies only.
    twin = ask(recording_server, fresh_key(), chat(max_tokens=12, seed=5, temperature=1.0))
    assert record.prompt_ids.tolist() == twin.prompt_ids
    assert record.response_ids.tolist() == twin.samples[0].ids
    if not stream:
        assert record.response_ids.tolist() == response.output_messages[0]["tokens"]
        shown = [each.logprob for each in output.logprobs]
        np.testing.assert_array_equal(record.logprobs, float32(shown))


def test_a_response_in_the_background_is_recorded_for_the_client_that_asked(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    first, second = fresh_key(), fresh_key()
    fields = {"max_tokens": 12, "temperature": 0.0}
    started = send(recording_server, first, responses(**fields, background=True)).json()
    wait_until(lambda: record_client.get(first) != [])

    record = only(record_client.get(first))
    assert len(record.response_ids) == 12
    # The conversation is kept on the server; the next turn is its own client's.
    extra = {"previous_response_id": started["id"], "content": "More."}
    assert send(recording_server, second, responses(**fields, **extra)).status_code == 200
    follow_up = only(record_client.get(second))
    assert record.response_text in follow_up.prompt_text
    assert len(record_client.get(first)) == 1


@either_way
def test_anthropic_messages_are_recorded_under_the_x_api_key(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    stream: bool,
) -> None:
    key, twin = fresh_key(), fresh_key()
    client = anthropic.Anthropic(base_url=recording_server.base_url, api_key=key)
    message = {"role": "user", "content": PROMPT}
    fields = {"model": "model", "messages": [message], "max_tokens": 12}
    fields["extra_body"] = {"temperature": 0.0}
    if stream:
        with client.messages.stream(**fields) as events:
            reply = events.get_final_message()
    else:
        reply = client.messages.create(**fields)

    record = only(record_client.get(key))
    assert record.response_text == reply.content[0].text
    assert reply.stop_reason == "max_tokens"
    assert record.finish_reason is FinishReason.LENGTH
    assert len(record.response_ids) == reply.usage.output_tokens == 12
    assert len(record.prompt_ids) == reply.usage.input_tokens
    # The API shows neither ids nor logprobs: they are those of the same chat.
    shown = ask(recording_server, twin, chat(max_tokens=12, temperature=0.0, logprobs=0))
    assert_recorded(record, shown.prompt_ids, shown.samples[0])


@either_way
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_a_tool_call_is_recorded_with_the_tokens_that_its_parser_strips(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    choice: str,
    stream: bool,
) -> None:
    tool = {"type": "function", "function": ADD}
    fields = {"max_tokens": 100, "seed": 1, "logprobs": 0, "tools": [tool]}
    if choice == "auto":
        fields["structured_outputs"] = {"choice": [CALL]}
    else:
        named = {"type": "function", "function": {"name": "add"}}
        fields["tool_choice"] = named if choice == "named" else "required"
        fields["tools"] = [{**tool, "function": {**ADD, "strict": True}}]
    if send(recording_server, "EMPTY", chat(**fields)).status_code == 500:
        pytest.skip("this vLLM itself fails to constrain tool calls")
    key, twin = fresh_key(), fresh_key()
    reply = ask(recording_server, key, chat(**fields), stream=stream)
    other = ask(recording_server, twin, chat(**fields), stream=not stream)

    record, sample = only(record_client.get(key)), reply.samples[0]
    assert "".join(sample.calls.split()) == 'add{"a":7}'
    assert sample.text.strip() == ""
    assert record.response_text is not None
    assert len(record.response_ids) == reply.completion_tokens
    assert record.response_ids.tolist() == only(record_client.get(twin)).response_ids.tolist()
    # The reply that is not streamed shows every token.
    whole = other.samples[0] if stream else sample
    whole.finish_reason = "stop"  # the API's own is `tool_calls`
    assert_recorded(record, reply.prompt_ids, whole)
    decoded = AutoTokenizer.from_pretrained(tiny_qwen3()).decode(record.response_ids)
    assert decoded.removesuffix("<|im_end|>") == record.response_text
    if choice == "auto":
        assert record.response_text == CALL


@either_way
@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("api", [chat, completions])
def test_a_stop_string_that_spans_tokens_is_recorded_as_the_engine_counts(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    digits: list[int],
    api: Callable[..., Request],
    included: bool,
    stream: bool,
) -> None:
    request = api(max_tokens=40, seed=2, temperature=1.0, logprobs=1, allowed_token_ids=digits)
    unstopped = ask(recording_server, fresh_key(), request).samples[0]
    stop = unstopped.text[9:12]  # one token per digit: it spans three
    end = unstopped.text.index(stop) + len(stop)
    key = fresh_key()
    stopped = request.updated(stop=[stop], include_stop_str_in_output=included)
    reply = ask(recording_server, key, stopped, stream=stream)

    record, sample = only(record_client.get(key)), reply.samples[0]
    assert_recorded(record, reply.prompt_ids, sample)
    assert record.response_ids.tolist() == unstopped.ids[:end]
    assert len(record.logprobs) == reply.completion_tokens == end
    assert record.response_text == sample.text
    assert sample.text == unstopped.text[: end if included else end - len(stop)]
    assert record.finish_reason is FinishReason.STOP
    assert record.stop_reason == stop


def test_an_answer_cut_at_max_tokens_is_marked_truncated(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    ask(recording_server, key, chat(max_tokens=6))

    [experience] = record_client.experiences(key)
    assert experience.finish_reason is FinishReason.LENGTH
    assert experience.truncate_status == "response_truncated"
    assert experience.response_length == 6


@either_way
@pytest.mark.parametrize("stop", ["eos", "stop_token_ids"])
def test_the_stop_token_is_the_last_token_recorded(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    stop: str,
    stream: bool,
) -> None:
    token = EOS if stop == "eos" else 300
    # Sure to be sampled, once min_tokens allows it.
    fields = {"logit_bias": {str(token): 100.0}, "min_tokens": 5, "max_tokens": 20}
    if stop == "stop_token_ids":
        fields["stop_token_ids"] = [token]
    key = fresh_key()
    reply = ask(recording_server, key, chat(**fields, logprobs=0, seed=3), stream=stream)

    record = only(record_client.get(key))
    assert_recorded(record, reply.prompt_ids, reply.samples[0])
    assert record.response_ids[-1] == token
    assert len(record.response_ids) == reply.completion_tokens == 6
    assert record.finish_reason is FinishReason.STOP
    assert record.stop_reason == (None if stop == "eos" else token)
    assert record_client.experiences(key)[0].truncate_status is None
    # The bias is no part of what the model thought.
    assert record.logprobs[-1] < -1


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_its_client_leaves_is_recorded_up_to_there(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey, n: int
) -> None:
    key, seen = fresh_key(), Reply()
    request = chat(**LONG, seed=4, temperature=1.0, n=n)
    with streaming(recording_server, key, request) as chunks:
        while len(seen.samples) < n or min(len(each.ids) for each in seen.samples.values()) < 5:
            seen.add(next(chunks))
    settle(record_client)

    records = by_sample(record_client.get(key))
    longest = max(len(record.response_ids) for record in records.values())
    twin = ask(recording_server, fresh_key(), request.updated(max_tokens=longest))
    assert sorted(records) == list(range(n))
    for index, record in records.items():
        count = len(record.response_ids)
        assert record.finish_reason is FinishReason.ABORT
        assert len(seen.samples[index].ids) <= count < LONG["max_tokens"]
        assert record.response_ids.tolist() == twin.samples[index].ids[:count]
        assert len(record.logprobs) == count
        assert record.flags == ()
    for experience in record_client.experiences(key):
        assert experience.action_mask.all()
        assert experience.truncate_status is None


@pytest.mark.parametrize("api", [chat, completions, generate, responses])
def test_an_answer_whose_client_is_gone_is_recorded_up_to_there(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    api: Callable[..., Request],
) -> None:
    key = fresh_key()
    request = api(**LONG, temperature=0.0)
    leave_after(recording_server, 5, lambda: hold(recording_server, key, request))
    settle(record_client)

    record = only(record_client.get(key))
    assert record.finish_reason is FinishReason.ABORT
    assert 5 <= len(record.response_ids) < LONG["max_tokens"]
    assert len(record.logprobs) == len(record.response_ids)
    assert not np.isnan(record.logprobs).any()


def test_a_request_aborted_in_the_queue_leaves_a_count_and_no_record(
    keyed_server: VLLMServer, keyed_client: RecordClient, fresh_key: FreshKey
) -> None:
    def start(key: str, request: Request) -> HTTPConnection:
        return hold(keyed_server, f"{ENGINE_KEY}:{key}", request)

    def wait_for(running: int, waiting: int) -> None:
        wait_until(lambda: load(keyed_server)[:2] == (running, waiting))

    before = keyed_client.stats()[keyed_server.base_url].recorder
    *occupants, queued = [fresh_key() for _ in range(3)]
    # The server runs two requests at a time.
    held = [start(key, chat(**LONG)) for key in occupants]
    wait_for(2, 0)
    left = start(queued, chat(max_tokens=3))
    wait_for(2, 1)
    left.close()
    wait_for(2, 0)
    for each in held:
        each.close()
    settle(keyed_client)

    after = keyed_client.stats()[keyed_server.base_url].recorder
    assert keyed_client.get(queued) == []
    assert after.dropped.get("empty", 0) == before.dropped.get("empty", 0) + 1
    assert after.started == before.started + 3
    assert after.recorded == before.recorded + 2
    for key in occupants:
        assert only(keyed_client.get(key)).finish_reason is FinishReason.ABORT


OPTIONS = {
    "allowed_token_ids": {"allowed_token_ids": [20, 21, 22]},
    "bad_words": {"bad_words": [" Contributor", "!"]},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {str(EOS): 100.0}},
    "logprob_token_ids": {"logprob_token_ids": [5, 9]},
    "logit_bias": {"logit_bias": {"300": 6.0}},
    "min_p": {"min_p": 0.05, "temperature": 2.0},
    "min_tokens": {"min_tokens": 12, "logit_bias": {str(EOS): 9.0}},
    "penalties": {"presence_penalty": 1.5, "repetition_penalty": 1.3, "frequency_penalty": 1.0},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {"1": 7.0, "3": 7.0}},
    "structured_outputs": {"structured_outputs": {"regex": "[a-z]{8}[0-9]{4}"}},
    "top_k_and_top_p": {"top_k": 7, "top_p": 0.8},
    "tokens_as_ids": {"return_tokens_as_token_ids": True},
}


@pytest.mark.parametrize("api", [chat, completions])
@pytest.mark.parametrize("option", OPTIONS)
def test_whatever_a_request_asks_for_its_record_is_what_it_shows(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    api: Callable[..., Request],
    option: str,
) -> None:
    key, twin = fresh_key(), fresh_key()
    request = api(**{"max_tokens": 12, "seed": 8, "temperature": 1.0, **OPTIONS[option]})
    reply = ask(recording_server, key, request.updated(logprobs=1))
    record = only(record_client.get(key))
    assert_recorded(record, reply.prompt_ids, reply.samples[0])
    assert record.response_text == reply.samples[0].text
    unasked = Request(request.path, {**request.body})
    unasked.body.pop("logprob_token_ids", None)  # allowed with logprobs only
    ask(recording_server, twin, unasked)
    hidden = only(record_client.get(twin))
    assert hidden.response_ids.tolist() == record.response_ids.tolist()
    np.testing.assert_array_equal(hidden.logprobs, record.logprobs)
    asked = {"seed": 8, "temperature": 1.0, **OPTIONS[option]}
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
        assert getattr(record.sampling, name) == asked.get(
            name, {"top_p": 1.0, "top_k": 0, "min_p": 0.0}.get(name)
        )
    assert record.sampling.logprobs_mode == "raw_logprobs"


@either_way
def test_an_echoed_prompt_is_no_part_of_the_response(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    stream: bool,
) -> None:
    key = fresh_key()
    request = completions(max_tokens=6, seed=8, logprobs=1, echo=True)
    reply = ask(recording_server, key, request, stream=stream)

    record, sample = only(record_client.get(key)), reply.samples[0]
    assert sample.text == record.response_text  # where ids are asked for, they echo the prompt
    assert len(sample.logprobs) == len(record.prompt_ids) + 6
    sample.logprobs = sample.logprobs[-6:]
    assert_recorded(record, reply.prompt_ids, sample)


@pytest.mark.parametrize("fields", [{"detokenize": False}, {"flat_logprobs": True}], ids=str)
def test_token_requests_with_options_of_their_own(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    fields: dict[str, bool],
) -> None:
    key = fresh_key()
    request = generate(max_tokens=6, seed=8, logprobs=1, **fields)
    reply = ask(recording_server, key, request)

    record = only(record_client.get(key))
    assert_recorded(record, reply.prompt_ids, reply.samples[0])
    assert (record.response_text is None) == ("detokenize" in fields)


def test_a_sampled_token_below_the_top_five_is_found_by_its_id(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    request = completions(max_tokens=30, seed=6, temperature=2.0, logprobs=5)
    [choice] = send(recording_server, key, request).json()["choices"]
    # The top five, and a sixth if the sampled token is none of them.
    assert sum(len(top) == 6 for top in choice["logprobs"]["top_logprobs"]) >= 3

    record = only(record_client.get(key))
    assert record.response_ids.tolist() == choice["token_ids"]
    np.testing.assert_array_equal(record.logprobs, float32(choice["logprobs"]["token_logprobs"]))


def test_each_prompt_of_a_batch_is_a_record(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    request = completions(["One.", "Two, and more."], max_tokens=4, logprobs=1)
    body = send(recording_server, key, request).json()

    records = {record.prompt_text: record for record in record_client.get(key)}
    assert sorted(records) == ["One.", "Two, and more."]
    for text, choice in zip(sorted(records), body["choices"], strict=True):
        assert records[text].prompt_ids.tolist() == choice["prompt_token_ids"]
        assert records[text].response_ids.tolist() == choice["token_ids"]


def test_a_prompt_with_two_begin_tokens_is_recorded_as_it_is(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    ask(recording_server, key, completions([1, 1, 89, 87], max_tokens=2))
    assert only(record_client.get(key)).prompt_ids.tolist() == [1, 1, 89, 87]


def test_the_steps_of_a_beam_search_are_counted_and_not_recorded(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    before = record_client.stats()[recording_server.base_url].recorder.dropped
    request = completions(max_tokens=4, use_beam_search=True, n=2, temperature=0.0)
    body = send(recording_server, key, request).json()
    assert len(body["choices"]) == 2

    assert record_client.get(key) == []
    after = record_client.stats()[recording_server.base_url].recorder.dropped
    # One request for the first step, then one for each of two beams and step.
    assert after["beam_search"] - before.get("beam_search", 0) == 7


def test_a_generation_that_repeats_itself_is_ended_and_flagged(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    detection = {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 3}
    request = chat(max_tokens=40, allowed_token_ids=[20], repetition_detection=detection)
    reply = ask(recording_server, key, request)

    record = only(record_client.get(key))
    assert record.response_ids.tolist() == reply.samples[0].ids
    assert 3 <= len(record.response_ids) < 40
    assert record.finish_reason is FinishReason.STOP
    assert record.flags == (BIASED, "repetition")


def test_a_prompt_from_the_prefix_cache_is_recorded_whole(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    first, second = fresh_key(), fresh_key()
    request = chat("A long story. " * 80, max_tokens=4, temperature=0.0, logprobs=0)
    ask(recording_server, first, request)
    reply = ask(recording_server, second, request)

    record = only(record_client.get(second))
    assert 0 < record.cached_tokens < len(record.prompt_ids)
    assert_recorded(record, reply.prompt_ids, reply.samples[0])


def test_an_adapter_is_recorded_and_its_turns_never_continue_the_base_models(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
) -> None:
    key = fresh_key()
    start = generate(max_tokens=5, seed=1, logprobs=0)
    reply = ask(recording_server, key, start)
    longer = (*reply.prompt_ids, *reply.samples[0].ids, 9)
    adapted = generate(longer, max_tokens=5, seed=1, logprobs=0).updated(model=ADAPTER)
    shown = ask(recording_server, key, adapted)
    plain = ask(recording_server, key, generate(longer, max_tokens=5, seed=1, logprobs=0))

    base, with_adapter, continued = sorted(record_client.get(key), key=lambda r: r.created_at)
    assert (base.adapter, with_adapter.adapter, continued.adapter) == (None, ADAPTER, None)
    assert_recorded(with_adapter, list(longer), shown.samples[0])
    assert continued.parent == base.id
    assert plain.samples[0].logprobs != shown.samples[0].logprobs  # the adapter does something
    assert len(record_client.experiences(key)) == 2


def test_a_turn_that_continues_a_sample_has_that_sample_as_its_parent(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    prompt = [5, 300, 7, 8]
    request = completions(prompt, max_tokens=6, n=3, seed=9)
    first = ask(recording_server, key, request, stream=True)
    longer = [*prompt, *first.samples[1].ids, 20, 21]
    second = ask(recording_server, key, completions(longer, max_tokens=6, seed=9))

    records = record_client.get(key)
    siblings = by_sample([record for record in records if record.parent is None])
    [child] = [record for record in records if record.parent is not None]
    assert sorted(siblings) == [0, 1, 2]
    assert child.parent == siblings[1].id
    assert child.start == len(longer) - 2
    assert child.prompt_ids.tolist() == [20, 21]
    assert child.response_ids.tolist() == second.samples[0].ids
    experiences = record_client.experiences(key)
    assert len(experiences) == 3
    [extended] = [each for each in experiences if len(each.turns) == 2]
    assert extended.tokens.tolist() == [*longer, *second.samples[0].ids]
    assert extended.action_mask.tolist() == [True] * 6 + [False] * 2 + [True] * 6


def test_a_chat_that_sends_the_answers_back_is_one_trajectory(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    digits: list[int],
) -> None:
    key = fresh_key()
    messages, reply = [{"role": "user", "content": "Count."}], None
    for turn in range(3):
        # The second turn ends with the stop token, the others are cut.
        ending = {"min_tokens": 4, "logit_bias": {str(EOS): 100.0}} if turn == 1 else {}
        allowed = {"allowed_token_ids": [*digits, EOS] if turn == 1 else digits}
        request = chat(max_tokens=7, seed=turn, logprobs=0, **allowed, **ending)
        reply = ask(recording_server, key, request.updated(messages=messages))
        messages += [
            {"role": "assistant", "content": reply.samples[0].text},
            {"role": "user", "content": "Go on."},
        ]

    records = sorted(record_client.get(key), key=lambda record: record.created_at)
    assert [record.parent for record in records] == [None, records[0].id, records[1].id]
    [experience] = record_client.experiences(key)
    assert experience.tokens.tolist() == [*reply.prompt_ids, *reply.samples[0].ids]
    assert experience.prompt_length == len(records[0].prompt_ids)
    mask = [True] * 7
    for record in records[1:]:
        mask += [False] * len(record.prompt_ids) + [True] * len(record.response_ids)
    assert experience.action_mask.tolist() == mask
    assert [len(record.response_ids) for record in records] == [7, 5, 7]
    # What joins the turns is the template's, by the engine's own ids: <|im_end|>\n<|im_start|>user…
    assert records[1].prompt_ids[:4].tolist() == [EOS, 203, 1, 89]
    assert records[2].prompt_ids[:3].tolist() == [203, 1, 89]
    np.testing.assert_array_equal(
        experience.logprobs[experience.action_mask],
        np.concatenate([record.logprobs for record in records]),
    )
    assert np.isnan(experience.logprobs[~experience.action_mask]).all()


def test_thinking_that_the_template_leaves_out_breaks_the_prefix(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    before = record_client.stats()[recording_server.base_url].recorder
    # Zeros and ends of thoughts: of those the template keeps what follows the last.
    thinking = {"allowed_token_ids": [20, 4], "skip_special_tokens": False}
    request = chat(max_tokens=20, seed=1, temperature=1.0, **thinking)
    messages = [{"role": "user", "content": "What?"}]
    reply = ask(recording_server, key, request.updated(messages=messages))
    assert "</think>" in reply.samples[0].text
    messages += [
        {"role": "assistant", "content": reply.samples[0].text},
        {"role": "user", "content": "Why?"},
    ]
    ask(recording_server, key, chat(max_tokens=4).updated(messages=messages))

    records: list[Record] = record_client.get(key)
    assert [record.parent for record in records] == [None, None]
    assert len(record_client.experiences(key)) == 2
    after = record_client.stats()[recording_server.base_url].recorder
    assert after.prefix_break == before.prefix_break + 1
    assert after.errors == before.errors
