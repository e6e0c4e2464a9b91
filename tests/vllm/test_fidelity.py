"""Recorded logprobs are the model's own: transformers computes the same from the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.smollm2 import smollm2
from examples.vllm_server import VLLMServer
from recorder_core import Record
from recorder_core.client import RecordClient
from tests.models import tiny_qwen3
from tests.vllm.apis import ask, assert_recorded, chat, only
from tests.vllm.conftest import ADMIN_KEY, ENGINE_KEY, ENV

pytestmark = pytest.mark.server
FreshKey = Callable[[], str]


@pytest.fixture(scope="module")
def tiny() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3(), dtype=torch.float32).eval()


def logits_of(model: Any, record: Record) -> torch.Tensor:
    """float32 [response tokens, vocabulary]: what each token of a root record was sampled from."""
    ids = torch.tensor([[*record.prompt_ids.tolist(), *record.response_ids.tolist()]])
    with torch.inference_mode():
        logits = model(ids).logits[0].float()
    return logits[len(record.prompt_ids) - 1 : -1]


def logprobs_of(logits: torch.Tensor, record: Record) -> np.ndarray[Any, Any]:
    chosen = torch.tensor(record.response_ids.tolist())[:, None]
    return logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()


def only_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of tokens that holds `top_p` of the probability; -inf outside it."""
    values, order = logits.sort(-1)
    outside = values.softmax(-1).cumsum(-1) <= 1 - top_p
    return logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)


SAMPLED = {"max_tokens": 60, "temperature": 0.6, "top_p": 0.9, "seed": 13}


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 60, "temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"]
)
def test_raw_logprobs_are_the_models_whatever_the_sampling(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    tiny: Any,
    fields: dict[str, Any],
) -> None:
    key = fresh_key()
    ask(recording_server, key, chat(**fields))

    record = only(record_client.get(key))
    logits = logits_of(tiny, record)
    np.testing.assert_allclose(record.logprobs, logprobs_of(logits, record), atol=1e-4)
    assert record.sampling.logprobs_mode == "raw_logprobs"
    assert record.sampling.temperature == fields["temperature"]
    if fields["temperature"]:
        scaled = logprobs_of(only_top_p(logits / 0.6, 0.9), record)
        assert np.abs(record.logprobs - scaled).mean() > 0.3


def test_processed_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    keyed_server: VLLMServer, keyed_client: RecordClient, fresh_key: FreshKey, tiny: Any
) -> None:
    asked, unasked = fresh_key(), fresh_key()
    reply = ask(keyed_server, f"{ENGINE_KEY}:{asked}", chat(**SAMPLED, logprobs=0))
    ask(keyed_server, f"{ENGINE_KEY}:{unasked}", chat(**SAMPLED))

    shown, hidden = only(keyed_client.get(asked)), only(keyed_client.get(unasked))
    assert_recorded(shown, reply.prompt_ids, reply.samples[0])
    np.testing.assert_array_equal(hidden.logprobs, shown.logprobs)
    for record in (shown, hidden):
        sampling = record.sampling
        assert sampling.logprobs_mode == "processed_logprobs"
        assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.6, 0.9, 13)
    scaled = only_top_p(logits_of(tiny, shown) / 0.6, 0.9)
    np.testing.assert_allclose(shown.logprobs, logprobs_of(scaled, shown), atol=2e-4)


@pytest.fixture(scope="module")
def smol_server(log_folder: Path) -> Iterator[VLLMServer]:
    """A real model in bfloat16."""
    args = ["--enable-recording", "--dtype", "bfloat16"]
    with VLLMServer(smollm2(), *args, env=ENV, log=log_folder / "smollm2.log") as server:
        yield server


@pytest.fixture(scope="module")
def smol_client(smol_server: VLLMServer) -> Iterator[RecordClient]:
    with RecordClient(smol_server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


def test_a_real_models_logprobs_agree_within_the_precision_of_bfloat16(
    smol_server: VLLMServer, smol_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    request = chat("Tell me about the sea.", max_tokens=80, temperature=1.0, seed=1)
    ask(smol_server, key, request)

    record = only(smol_client.get(key))
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.bfloat16).eval()
    difference = np.abs(record.logprobs - logprobs_of(logits_of(model, record), record))
    # Logits near 16 are 1/16 apart in bfloat16; 0.04 and 0.24 were seen.
    assert difference.mean() < 0.08
    assert difference.max() < 0.5
    assert record.logprobs.mean() < -0.5  # far more than the tolerance


def test_a_conversation_is_one_trajectory_when_the_client_repeats_the_engines_text(
    smol_server: VLLMServer, smol_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    messages: list[dict[str, str]] = []
    questions = ["What is the capital of France?", "And of Italy?", "Which is larger?"]
    texts, reply = [], None
    for question in questions:
        messages.append({"role": "user", "content": question})
        request = chat(max_tokens=40, temperature=0.0, logprobs=0)
        reply = ask(smol_server, key, request.updated(messages=messages))
        texts.append(reply.samples[0].text)
        messages.append({"role": "assistant", "content": texts[-1]})

    records = sorted(smol_client.get(key), key=lambda record: record.created_at)
    [experience] = smol_client.experiences(key)
    assert "Paris" in texts[0]
    assert experience.tokens.tolist() == [*reply.prompt_ids, *reply.samples[0].ids]
    assert [turn.response_text for turn in experience.turns] == texts
    # Read with the mask, the tokens are what the model said, stop tokens included.
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    response = experience.tokens[experience.prompt_length :]
    said = tokenizer.decode(response[experience.action_mask])
    assert said.replace("<|im_end|>", "") == "".join(texts)
    rest = tokenizer.decode(response[~experience.action_mask])
    assert [question in rest for question in questions] == [False, True, True]
    assert all(text not in rest for text in texts)
    assert sum(len(record.prompt_ids) for record in records) == experience.prompt_length + int(
        (~experience.action_mask).sum()
    )


def test_a_conversation_whose_history_is_rewritten_breaks_and_says_so(
    smol_server: VLLMServer, smol_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    before = smol_client.stats()[smol_server.base_url].recorder.prefix_break
    first = [{"role": "user", "content": "What is the capital of France?"}]
    request = chat(max_tokens=40, temperature=0.0)
    text = ask(smol_server, key, request.updated(messages=first)).samples[0].text
    for history in (text.upper(), text):
        again = [
            *first,
            {"role": "assistant", "content": history},
            {"role": "user", "content": "Thanks."},
        ]
        ask(smol_server, key, request.updated(messages=again))

    root, broken, continued = sorted(smol_client.get(key), key=lambda record: record.created_at)
    assert (root.parent, broken.parent, continued.parent) == (None, None, root.id)
    assert smol_client.stats()[smol_server.base_url].recorder.prefix_break == before + 1
    assert len(smol_client.experiences(key)) == 2
