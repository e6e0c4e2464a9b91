"""What is recorded is what the SDK returned, and what the model did."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from packaging.version import Version
from tinker import types

from recorder_core import FinishReason, KeyPrefix, Record
from tests.tinker.conftest import SDK, finished
from tests.tinker.prompts import prompt, prompt_ids
from tinker_recorder import TinkerRecorder, with_text
from tinker_recorder.futures import plain

pytestmark = pytest.mark.server

Key = Callable[[], str]


def assert_same(record: Record, sequence: Any, seed: int) -> None:
    """A record holds what the SDK returned for a prompt, bit for bit."""
    assert record.prompt_end == len(prompt_ids(seed))
    np.testing.assert_array_equal(record.prompt_ids, prompt_ids(seed)[record.start :])
    np.testing.assert_array_equal(record.response_ids, sequence.tokens_np)
    np.testing.assert_array_equal(record.logprobs, sequence.logprobs_np)
    assert record.response_ids.dtype == np.int32
    assert record.logprobs is not None
    assert record.logprobs.dtype == np.float32


def test_a_sample_is_recorded_as_it_was_returned(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
    model: Path,
) -> None:
    key, before = fresh_key(), time.time()
    with recorder.record_key(key):
        result = client.sample(prompt(), 1, params).result()
    (record,) = recorder.lease(key).records
    assert_same(record, result.sequences[0], 0)
    assert str(record.key) == key
    assert record.finish_reason is FinishReason.LENGTH
    assert len(record.response_ids) == 8
    assert [(span.start, span.end, span.version) for span in record.versions] == [
        (0, 8, str(model))
    ]
    assert (record.sampling.temperature, record.sampling.top_k) == (1.0, -1)
    assert before <= record.created_at <= record.finished_at <= time.time()
    assert record.flags == ()
    assert record.response_text is None


def test_each_of_n_samples_is_a_record(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    key = fresh_key()
    with recorder.record_key(key):
        result = client.sample(prompt(), num_samples=4, sampling_params=params).result()
    records = recorder.lease(key).records
    assert [record.sample_index for record in records] == [0, 1, 2, 3]
    for record, sequence in zip(records, result.sequences, strict=True):
        assert_same(record, sequence, 0)
        assert record.request_id == (getattr(sequence, "sequence_id", None) or "")
    assert len({record.request_id for record in records}) == (4 if Version("0.26") <= SDK else 1)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("way", ["sample_async", "await", "wrap_future"])
async def test_async_samples_are_recorded_once(
    way: str,
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    key = fresh_key()
    with recorder.record_key(key):
        if way == "sample_async":
            result = await client.sample_async(prompt(3), 1, params)
        else:
            future = client.sample(prompt(3), 1, params)
            can_be_awaited = way == "await" and hasattr(future, "__await__")
            result = await (future if can_be_awaited else asyncio.wrap_future(future))
    (record,) = recorder.get(key)
    assert_same(record, result.sequences[0], 3)


async def test_64_concurrent_samples_under_64_keys(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    async def run(seed: int) -> tuple[str, Any]:
        key = fresh_key()
        with recorder.record_key(key):
            result = await asyncio.wrap_future(plain(client.sample(prompt(seed), 1, params)))
        return key, result.sequences[0]

    done = await asyncio.gather(*(run(seed) for seed in range(64)))
    for seed, (key, sequence) in enumerate(done):
        (record,) = recorder.get(key)
        assert_same(record, sequence, seed)
    assert recorder.stats().recorder.recorded == 64


@pytest.mark.slow
def test_a_drain_right_after_a_sample_has_it_in_1000_of_1000_calls(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    def run(number: int) -> int:
        key = fresh_key()
        with recorder.record_key(key):
            result = client.sample(prompt(number), 1, params).result()
        # The store itself is asked: `drain` would wait for the recorder.
        lease = recorder.store.drain(KeyPrefix(key), key, lease_s=60)
        return sum(len(each.response_ids) for each in lease.records) == len(
            result.sequences[0].tokens_np
        )

    with ThreadPoolExecutor(64) as threads:
        found = list(threads.map(run, range(1000)))
    assert sum(found) == 1000
    stats = recorder.stats().recorder
    assert (stats.recorded, stats.dropped, stats.pending, stats.errors) == (1000, {}, 0, 0)


def test_logprobs_are_the_models_own(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    fresh_key: Key,
    model: Path,
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    key = fresh_key()
    sharp = types.SamplingParams(max_tokens=8, temperature=0.6, stop=[])
    with recorder.record_key(key):
        futures = [client.sample(prompt(seed), 4, sharp) for seed in range(3)]
        for future in futures:
            future.result()
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    (run,) = recorder.lease(key).runs
    for record in run.records.values():
        ids = torch.tensor(run.token_ids(record)[None])
        with torch.no_grad():
            logits = own(ids).logits[0, record.prompt_end - 1 : -1]
        # Before temperature: as the server gives them, and as they are recorded.
        chosen = logits.log_softmax(-1)[range(8), ids[0, record.prompt_end :]]
        np.testing.assert_allclose(record.logprobs, chosen.numpy(), atol=1e-4)
        assert record.sampling.temperature == pytest.approx(0.6)


def test_a_second_turn_continues_the_first(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    key = fresh_key()
    with recorder.record_key(key):
        first = client.sample(prompt(), 2, params).result().sequences[1]
        history = [*prompt_ids(), *first.tokens, 7, 8, 9]
        second = client.sample(types.ModelInput.from_ints(history), 1, params).result()
    assert recorder.update_reward(key, 1.0) == 3
    with recorder.drain(key.split("/")[0]) as drained:
        experiences = drained.experiences
    assert len(experiences) == 2
    (longer,) = [each for each in experiences if len(each.turns) == 2]
    np.testing.assert_array_equal(longer.tokens, [*history, *second.sequences[0].tokens])
    assert longer.action_mask is not None
    assert longer.action_mask.tolist() == [True] * 8 + [False] * 3 + [True] * 8
    assert {each.reward for each in experiences} == {1.0}
    assert recorder.store.stats().records == 0


def test_a_stop_token_is_the_last_recorded_id(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    key = fresh_key()
    every_third = types.SamplingParams(max_tokens=8, temperature=1.0, stop=list(range(0, 512, 3)))
    with recorder.record_key(key):
        result = client.sample(prompt(), 4, every_third).result()
    stopped = 0
    for record, sequence in zip(recorder.lease(key).records, result.sequences, strict=True):
        assert_same(record, sequence, 0)
        assert record.finish_reason.value == sequence.stop_reason
        if record.finish_reason is FinishReason.STOP:
            stopped += 1
            assert record.response_ids[-1] % 3 == 0
    assert stopped > 0


def test_log_probabilities_of_a_prompt_are_no_sample(
    recorder: TinkerRecorder, client: tinker.SamplingClient, fresh_key: Key
) -> None:
    with recorder.record_key(fresh_key()):
        assert client.compute_logprobs(prompt()).result()[-1] < 0
    stats = recorder.stats().recorder
    assert (stats.started, stats.unkeyed) == (0, {})


@pytest.mark.parametrize("theirs_first", [True, False])
def test_another_patch_of_sample_stacks_with_ours(
    theirs_first: bool,
    service: tinker.ServiceClient,
    params: types.SamplingParams,
    fresh_key: Key,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def patch() -> None:
        beneath = tinker.SamplingClient.sample

        @functools.wraps(beneath)
        def sample(*args: Any, **kwargs: Any) -> Any:
            future = beneath(*args, **kwargs)
            plain(future).add_done_callback(lambda done: seen.append(done.result()))
            return future

        monkeypatch.setattr(tinker.SamplingClient, "sample", sample)

    recorder = TinkerRecorder()
    for step in (patch, recorder.instrument) if theirs_first else (recorder.instrument, patch):
        step()
    key = fresh_key()
    client = finished(service.create_sampling_client(base_model=str(model)))
    with recorder.record_key(key):
        result = client.sample(prompt(), 1, params).result()
    (record,) = recorder.lease(key).records
    assert_same(record, result.sequences[0], 0)
    assert seen == [result]
    monkeypatch.undo()
    recorder.close()


def test_text_is_decoded_when_it_is_asked_for(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
    model: Path,
) -> None:
    from transformers import AutoTokenizer

    key = fresh_key()
    with recorder.record_key(key):
        result = client.sample(prompt(), 1, params).result()
    (record,) = with_text(recorder.lease(key).records, AutoTokenizer.from_pretrained(model))
    own = AutoTokenizer.from_pretrained(model)
    assert record.prompt_text == own.decode(prompt_ids())
    assert record.response_text == own.decode(result.sequences[0].tokens)
