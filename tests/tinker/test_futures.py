"""The SDK's futures keep their type, their cancellation, their errors and their threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
import tinker
from tinker import types

from recorder_core import MemoryStore, Record
from recorder_core.stores import AddOutcome
from tests.tinker.conftest import finished
from tests.tinker.prompts import prompt
from tinker_recorder import TinkerRecorder
from tinker_recorder.futures import plain

pytestmark = pytest.mark.server

Key = Callable[[], str]


class SlowStore(MemoryStore):
    """Takes its time."""

    def add(self, record: Record, epoch: int | None = None) -> AddOutcome:
        time.sleep(0.5)
        return super().add(record, epoch)


def test_a_future_is_of_the_type_that_the_sdk_returns(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    unrecorded = client.sample(prompt(), 1, params)
    with recorder.record_key(fresh_key()):
        recorded = client.sample(prompt(), 1, params)
    assert type(recorded) is type(unrecorded)
    assert type(recorded.result()) is type(unrecorded.result()) is types.SampleResponse


def test_a_cancelled_call_is_cancelled_and_leaves_no_record(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    fresh_key: Key,
) -> None:
    key = fresh_key()
    long = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[])
    with recorder.record_key(key):
        future = client.sample(prompt(), 2, long)
        assert plain(future).cancel()
    with pytest.raises(CancelledError):
        future.result()
    wait_for(lambda: recorder.stats().recorder.pending == 0)
    assert recorder.stats().recorder.dropped == {"cancelled": 2}
    assert recorder.lease(key).records == []


async def test_cancelling_the_task_that_awaits_cancels_the_sample(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    with recorder.record_key(fresh_key()):
        task = asyncio.create_task(as_coroutine(client, params))
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_for, lambda: recorder.stats().recorder.pending == 0)
    assert recorder.stats().recorder.dropped == {"cancelled": 1}


async def as_coroutine(client: tinker.SamplingClient, params: types.SamplingParams) -> Any:
    return await asyncio.wrap_future(plain(client.sample(prompt(), 1, params)))


def test_the_servers_refusal_is_the_callers_and_leaves_no_record(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    def refused() -> BaseException:
        # The server knows no such thing.
        future = client.sample(prompt(), 1, params, topk_prompt_logprobs=5)
        error = plain(future).exception()
        assert error is not None
        with pytest.raises(type(error), match="topk_prompt_logprobs is not supported"):
            future.result()
        return error

    unrecorded = refused()
    key = fresh_key()
    with recorder.record_key(key):
        recorded = refused()
    assert type(recorded) is type(unrecorded)
    assert recorder.stats().recorder.dropped == {"failed": 1}
    assert recorder.lease(key).records == []


def test_a_callers_callback_runs_on_the_sdks_thread_as_without_recording(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    def thread_of_callback() -> str:
        names: list[str] = []
        called = threading.Event()

        def callback(_: Any) -> None:
            names.append(threading.current_thread().name)
            called.set()

        plain(client.sample(prompt(), 1, params)).add_done_callback(callback)
        assert called.wait(60)
        return names[0]

    unrecorded = thread_of_callback()
    with recorder.record_key(fresh_key()):
        assert thread_of_callback() == unrecorded


def test_a_slow_store_does_not_hold_up_the_sdks_thread(
    service: tinker.ServiceClient, model: Any, params: types.SamplingParams, fresh_key: Key
) -> None:
    recorder = TinkerRecorder(SlowStore())
    recorder.instrument()
    try:
        client = finished(service.create_sampling_client(base_model=str(model)))
        client.sample(prompt(), 1, params).result()
        with recorder.record_key(fresh_key()):
            recorded = client.sample(prompt(1), 8, params)
        # Its eight records take four seconds; what is sampled meanwhile need not wait for them.
        latest = 0.0
        while not plain(recorded).done():
            began = time.monotonic()
            client.sample(prompt(2), 1, params).result()
            latest = max(latest, time.monotonic() - began)
        assert latest < 3
        assert len(recorded.result().sequences) == recorder.store.stats().records == 8
    finally:
        recorder.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
