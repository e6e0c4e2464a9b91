"""What a record means: what counts as a sample, and from which distribution its tokens came."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM

from examples.sglang_server import SGLangServer
from recorder_core import Record
from recorder_core.client import RecordClient
from recorder_core.records import BIASED, CONSTRAINED
from tests.models import round_trip_ids, tiny_qwen3
from tests.sglang.apis import (
    PROMPT_IDS,
    by_sample,
    chat,
    completion,
    counters,
    generate,
    only,
    post,
    settle,
    streaming,
)
from tests.sglang.conftest import ADMIN_KEY, LONG_TOKENS

pytestmark = pytest.mark.server
FreshKey = Callable[[], str]

SAMPLED = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 1.0}
GRAMMARS_SINCE = Version("0.5.19")
"""Before, grammars have no CPU kernel."""


@pytest.fixture(scope="module")
def tiny() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3(), dtype=torch.float32).eval()


def logits_of(model: Any, record: Record) -> torch.Tensor:
    """What the model says at each sampled token of a root record: [response tokens, vocabulary]."""
    ids = torch.tensor([[*record.prompt_ids.tolist(), *record.response_ids.tolist()]])
    with torch.no_grad():
        return model(ids).logits[0].float()[len(record.prompt_ids) - 1 : -1]


def chosen(logits: torch.Tensor, record: Record) -> np.ndarray[Any, Any]:
    """The logprob of each sampled token under `logits`."""
    ids = torch.tensor(record.response_ids.tolist())[:, None]
    return logits.log_softmax(-1).gather(1, ids)[:, 0].numpy()


# What counts as a sample.


def test_what_shows_its_client_no_token_is_counted_and_not_recorded(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    """Scores and echoes of a finished run would extend it and corrupt it.

    M2.
    """
    key, before = fresh_key(), counters(record_client)
    [output] = generate(recording_server, key, **SAMPLED)
    whole = [*PROMPT_IDS, *output["output_ids"]]
    empty = {"max_new_tokens": 0}
    score = {"query": whole, "items": [[5], [6, 7]], "label_token_ids": [8, 9], "model": "model"}
    asked = {
        "/generate": {"input_ids": whole, "sampling_params": empty},
        "/v1/score": score,
    }
    for path, body in asked.items():
        response = post(recording_server, path, body, key)
        assert response.status_code == 200, response.text
    echo = completion(whole, max_tokens=0, echo=True, logprobs=1)
    assert post(recording_server, "/v1/completions", echo, key).status_code == 400
    both = {"input_ids": [whole, whole], "sampling_params": {**empty, "n": 2}}
    assert post(recording_server, "/generate", both, key).status_code == 200

    assert only(record_client.get(key)).response_ids.tolist() == output["output_ids"]
    [experience] = record_client.experiences(key)
    assert experience.tokens.tolist() == whole
    after = counters(record_client)
    # One; two items that are scored; two prompts of two.
    assert after.dropped["no_sample"] - before.dropped.get("no_sample", 0) == 1 + 2 + 4
    assert after.started - before.started == 1 + 7
    assert after.pending == 0


def test_what_the_engine_does_ahead_of_samples_is_no_generation(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    """It fills the cache with the prompt before it sends more than one sample.

    M2.
    """
    key, before = fresh_key(), counters(record_client)
    generate(recording_server, key, input_ids=[[5, 6, 7], [8, 9]], n=3, **SAMPLED)
    assert len(by_sample(record_client.get(key))) == 6
    after = counters(record_client)
    assert after.started - before.started == 6
    assert after.dropped == before.dropped


def test_a_probe_is_told_by_its_route_and_not_by_its_id(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    """A client may name its request as the engine names its own.

    M3.
    """
    named, probing = fresh_key(), fresh_key()
    before = counters(record_client)
    body = {"input_ids": PROMPT_IDS, "sampling_params": SAMPLED}
    rid = "HEALTH_CHECK_of_an_agent"
    reply = post(recording_server, "/generate", {**body, "rid": rid}, named).json()
    record = only(record_client.get(named))
    assert record.response_ids.tolist() == reply["output_ids"]
    assert record.request_id == rid

    with httpx.Client(base_url=recording_server.base_url, timeout=60) as http:
        headers = {"authorization": f"Bearer {probing}"}
        assert http.get("/health_generate", headers=headers).status_code == 200
        assert http.get("/health_generate").status_code == 200
    assert record_client.get(probing) == []
    after = counters(record_client)
    assert after.dropped["no_sample"] - before.dropped.get("no_sample", 0) == 1
    assert after.unkeyed == before.unkeyed


def test_a_request_that_the_engine_passes_over_does_not_stay_pending(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    """A busy scheduler takes any request so named for a probe, and never answers.

    M3.
    """
    busy, ignored = fresh_key(), fresh_key()
    before = counters(record_client)
    long = {**SAMPLED, "max_new_tokens": 3 * LONG_TOKENS}
    started = threading.Event()

    def occupy() -> None:
        body = {"input_ids": PROMPT_IDS, "sampling_params": long}
        with streaming(recording_server, "/generate", body, busy) as chunks:
            for _ in chunks:
                started.set()

    thread = threading.Thread(target=occupy)
    thread.start()
    assert started.wait(30)
    body = {"input_ids": PROMPT_IDS, "sampling_params": SAMPLED, "rid": f"HEALTH_CHECK_{ignored}"}
    with (
        httpx.Client(base_url=recording_server.base_url, timeout=1.0) as http,
        pytest.raises(httpx.ReadTimeout),
    ):
        http.post("/generate", json=body, headers={"authorization": f"Bearer {ignored}"})
    thread.join()
    settle(record_client)
    after = counters(record_client)
    assert record_client.get(ignored) == []
    assert after.dropped.get("lost", 0) == before.dropped.get("lost", 0) + 1


# From which distribution a token came.


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


SCHEMA = '{"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}'
TAG = {
    "type": "structural_tag",
    "format": {"type": "const_string", "value": "yes"},
}
CONSTRAINED_REQUESTS = {
    "json": {"json_schema": SCHEMA},
    "regex": {"regex": "[0-9]{8}"},
    "grammar": {"ebnf": 'root ::= "yes" | "no"'},
}


@pytest.mark.parametrize("kind", CONSTRAINED_REQUESTS)
def test_a_grammar_is_named_as_the_mask_is_in_the_logprobs(
    recording_server: SGLangServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    engine_version: Version,
    tiny: Any,
    kind: str,
) -> None:
    """SGLang masks what it takes logprobs from: a token that had to come has logprob 0.

    M5.
    """
    if engine_version < GRAMMARS_SINCE:
        pytest.skip("the grammars of this release have no CPU kernel")
    key = fresh_key()
    fields = {"max_new_tokens": 30, "temperature": 0.7, **CONSTRAINED_REQUESTS[kind]}
    generate(recording_server, key, **fields)
    record = only(record_client.get(key))
    assert record.sampling.constraint == kind
    assert record.flags == (CONSTRAINED,)
    logits = logits_of(tiny, record) / 0.7
    assert record.logprobs.sum() > chosen(logits, record).sum() + 10
    if kind == "regex":
        digits = torch.full_like(logits, -torch.inf)
        ids = round_trip_ids(tiny_qwen3())
        digits[:, ids] = logits[:, ids]
        np.testing.assert_allclose(record.logprobs[:8], chosen(digits, record)[:8], atol=1e-3)


def test_tools_and_formats_that_constrain_are_named(
    recording_server: SGLangServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    engine_version: Version,
) -> None:
    """Whatever API asks, it ends up in a grammar; a tool that may be called is none.

    M5.
    """
    if engine_version < GRAMMARS_SINCE:
        pytest.skip("the grammars of this release have no CPU kernel")
    schema = {"name": "answer", "schema": {"type": "object", "properties": {}}}
    named = {"type": "function", "function": {"name": "add"}}
    asked = {
        "required": {"tools": [tool("add")], "tool_choice": "required"},
        "named": {"tools": [tool("add")], "tool_choice": named},
        "schema": {"response_format": {"type": "json_schema", "json_schema": schema}},
        "object": {"response_format": {"type": "json_object"}},
        "tag": {"response_format": TAG},
    }
    for name, fields in asked.items():
        key = fresh_key()
        body = chat(max_tokens=20, temperature=1.0, **fields)
        response = post(recording_server, "/v1/chat/completions", body, key)
        assert response.status_code == 200, response.text
        record = only(record_client.get(key))
        assert record.sampling.constraint in ("json", "structural_tag"), name
        assert record.flags == (CONSTRAINED,), name
    free = fresh_key()
    body = chat(max_tokens=20, temperature=1.0, tools=[tool("add")], tool_choice="auto")
    post(recording_server, "/v1/chat/completions", body, free)
    record = only(record_client.get(free))
    assert (record.sampling.constraint, record.flags) == (None, ())


SHAPING = {
    "presence_penalty": (0.5, "presence_penalty", 0.5),
    "frequency_penalty": (-0.5, "frequency_penalty", -0.5),
    "repetition_penalty": (1.3, "repetition_penalty", 1.3),
    "min_new_tokens": (3, "min_tokens", 3),
    "logit_bias": ({"7": 2.5}, "logit_bias", {7: 2.5}),
}


@pytest.mark.parametrize("name", SHAPING)
def test_what_shapes_the_distribution_is_recorded_where_it_is_not_neutral(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey, name: str
) -> None:
    """M7."""
    value, field, recorded = SHAPING[name]
    shaped, plain = fresh_key(), fresh_key()
    generate(recording_server, shaped, **SAMPLED, **{name: value})
    neutral = {"presence_penalty": 0, "repetition_penalty": 1, "min_new_tokens": 0}
    generate(recording_server, plain, **SAMPLED, **neutral, logit_bias=None)
    record = only(record_client.get(shaped))
    assert getattr(record.sampling, field) is not None
    assert getattr(record.sampling, field) == recorded
    assert record.flags == (BIASED,)
    others = {each for _, each, _ in SHAPING.values()} - {field}
    assert all(getattr(record.sampling, each) is None for each in others)

    record = only(record_client.get(plain))
    assert record.flags == ()
    assert all(getattr(record.sampling, each) is None for _, each, _ in SHAPING.values())


def test_a_bias_is_in_the_logprobs(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey, tiny: Any
) -> None:
    """M7."""
    key = fresh_key()
    generate(recording_server, key, **SAMPLED, logit_bias={"7": 4.0})
    record = only(record_client.get(key))
    logits = logits_of(tiny, record)
    logits[:, 7] += 4.0
    np.testing.assert_allclose(record.logprobs, chosen(logits, record), atol=1e-3)


def test_the_start_says_which_logprobs_are_recorded(
    recording_server: SGLangServer, moe_server: SGLangServer
) -> None:
    """M9."""
    at = "Logprobs are recorded at the request's temperature, before top_k, top_p and min_p"
    assert recording_server.log().count(at) == 1
    before = "Logprobs are recorded before temperature (SGLANG_RETURN_ORIGINAL_LOGPROB)"
    assert moe_server.log().count(before) == 1


def test_weights_that_nobody_named_have_another_label(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    """The engine's own label does not change; the hook sees that the weights did.

    M10.
    """
    keys = [fresh_key() for _ in range(4)]
    update = {"model_path": str(tiny_qwen3())}

    def labels(key: str) -> list[str]:
        generate(recording_server, key, **SAMPLED)
        return [span.version for span in only(record_client.get(key)).versions]

    def load(**fields: Any) -> None:
        path = "/update_weights_from_disk"
        reply = post(recording_server, path, {**update, **fields}, ADMIN_KEY)
        assert reply.json()["success"], reply.text

    load(weight_version="named")
    assert labels(keys[0]) == ["named"]
    load()
    assert labels(keys[1]) == ["named+1"]
    load()
    assert labels(keys[2]) == ["named+2"]
    load(weight_version="named")
    assert labels(keys[3]) == ["named"]
    load(weight_version="default")
