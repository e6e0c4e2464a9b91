"""Whose sample it is: keys in force, bound clients, threads, and samples without a key."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tinker
from tinker import types

from recorder_core.errors import InvalidKeyError, MissingKeyError
from tests.tinker.conftest import finished
from tests.tinker.prompts import prompt
from tinker_recorder import TinkerRecorder, skip_recording

pytestmark = pytest.mark.server

Key = Callable[[], str]


@pytest.fixture
def strict() -> Iterator[TinkerRecorder]:
    """A recorder that wants a key with every sample."""
    recorder = TinkerRecorder(strict=True)
    recorder.instrument()
    yield recorder
    recorder.close()


def sample(client: tinker.SamplingClient, params: types.SamplingParams, seed: int = 0) -> None:
    client.sample(prompt(seed), 1, params).result()


def test_a_thread_pool_does_not_inherit_the_key_in_force(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    with ThreadPoolExecutor(2) as threads, recorder.record_key(fresh_key()):
        list(threads.map(functools.partial(sample, client, params), range(4)))
    stats = recorder.stats().recorder
    assert (stats.recorded, stats.unkeyed) == (0, {"missing": 4})


def test_a_bound_client_is_recorded_on_any_thread(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    keys = [fresh_key() for _ in range(8)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda key: sample(recorder.bind(client, key), params), keys))
    assert sorted(str(record.key) for record in recorder.lease().records) == sorted(keys)


@pytest.mark.filterwarnings("ignore::FutureWarning")
async def test_a_bound_client_is_the_client_otherwise(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
    model: Path,
) -> None:
    key = fresh_key()
    bound = recorder.bind(client, key)
    assert isinstance(bound, tinker.SamplingClient)
    assert bound.get_base_model() == str(model)
    assert bound.compute_logprobs(prompt()).result() == client.compute_logprobs(prompt()).result()
    await bound.sample_async(prompt(), 1, params)
    sample(client, params)
    assert [str(record.key) for record in recorder.lease().records] == [key]


def test_a_bound_key_is_checked_at_once(
    recorder: TinkerRecorder, client: tinker.SamplingClient
) -> None:
    with pytest.raises(InvalidKeyError):
        recorder.bind(client, "no-key")


def test_strict_recording_refuses_a_sample_without_a_key_before_it_is_sampled(
    strict: TinkerRecorder,
    service: tinker.ServiceClient,
    params: types.SamplingParams,
    model: Path,
    fresh_key: Key,
) -> None:
    client = finished(service.create_sampling_client(base_model=str(model)))
    with pytest.raises(MissingKeyError, match="bind"):
        client.sample(prompt(), 1, params)
    with ThreadPoolExecutor(1) as threads, strict.record_key(fresh_key()):
        failed = threads.submit(sample, client, params)
        assert isinstance(failed.exception(), MissingKeyError)
    with skip_recording():
        sample(client, params)
    sample(strict.bind(client, fresh_key()), params)
    assert strict.stats().recorder.recorded == 1
    assert strict.stats().recorder.unkeyed == {"skipped": 1}


def test_a_sample_under_skip_recording_is_not_recorded(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    with recorder.record_key(fresh_key()):
        with skip_recording():
            sample(client, params)
        sample(client, params)
    stats = recorder.stats().recorder
    assert (stats.recorded, stats.unkeyed) == (1, {"skipped": 1})
