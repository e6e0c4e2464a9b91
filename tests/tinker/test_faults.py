"""The sample comes first: a recorder's fault costs a record, or, if so asked, is raised."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from recorder_core import KeyPrefix, MemoryStore, Record
from recorder_core.errors import NotRecordedError
from recorder_core.stores import AddOutcome
from tests.tinker.conftest import finished
from tests.tinker.prompts import prompt
from tinker_recorder import TinkerRecorder
from tinker_recorder.recorder import OnError

pytestmark = pytest.mark.server

Key = Callable[[], str]
Make = Callable[[MemoryStore, OnError], tuple[TinkerRecorder, tinker.SamplingClient]]


class BrokenStore(MemoryStore):
    """Takes nothing."""

    def add(self, record: Record, epoch: int | None = None) -> AddOutcome:
        raise OSError("the disk is gone")


@pytest.fixture
def make(service: tinker.ServiceClient, model: Path) -> Iterator[Make]:
    """Makes a recorder over a store, and a client that it records."""
    made: list[TinkerRecorder] = []

    def over(store: MemoryStore, on_error: OnError) -> tuple[TinkerRecorder, tinker.SamplingClient]:
        recorder = TinkerRecorder(store, on_error=on_error)
        made.append(recorder)
        recorder.instrument()
        return recorder, finished(service.create_sampling_client(base_model=str(model)))

    yield over
    for recorder in made:
        recorder.close()


def test_a_broken_store_does_not_fail_the_sample(
    make: Make, params: types.SamplingParams, fresh_key: Key
) -> None:
    recorder, client = make(BrokenStore(), "count")
    with recorder.record_key(fresh_key()):
        result = client.sample(prompt(), 2, params).result()
    assert len(result.sequences) == 2
    stats = recorder.stats().recorder
    assert (stats.recorded, stats.dropped, stats.errors, stats.pending) == (0, {"error": 2}, 2, 0)


def test_a_broken_store_fails_the_sample_of_who_asked_for_that(
    make: Make, params: types.SamplingParams, fresh_key: Key
) -> None:
    recorder, client = make(BrokenStore(), "raise")
    with recorder.record_key(fresh_key()):
        future = client.sample(prompt(), 2, params)
    with pytest.raises(NotRecordedError, match="the disk is gone") as caught:
        future.result()
    assert isinstance(caught.value.__cause__, OSError)


def test_a_full_store_fails_the_sample_of_who_asked_for_that(
    make: Make, params: types.SamplingParams, fresh_key: Key
) -> None:
    recorder, client = make(MemoryStore(max_bytes=1, when_full="reject"), "raise")
    with recorder.record_key(fresh_key()), pytest.raises(NotRecordedError, match="full"):
        client.sample(prompt(), 1, params).result()


def test_a_blocked_key_is_no_fault(
    make: Make, params: types.SamplingParams, fresh_key: Key
) -> None:
    recorder, client = make(MemoryStore(), "raise")
    key = fresh_key()
    recorder.store.block(KeyPrefix(key))
    with recorder.record_key(key):
        assert client.sample(prompt(), 1, params).result()
    assert recorder.stats().recorder.dropped == {"blocked": 1}


def test_a_closed_recorder_lets_samples_in_flight_pass(
    make: Make, params: types.SamplingParams, fresh_key: Key
) -> None:
    recorder, client = make(MemoryStore(), "count")
    with recorder.record_key(fresh_key()):
        future = client.sample(prompt(), 1, params)
    recorder.close()
    assert len(future.result().sequences) == 1
    assert recorder.stats().recorder.pending == 0


def test_a_prompt_that_cannot_be_read_costs_its_record_alone(
    make: Make,
    params: types.SamplingParams,
    fresh_key: Key,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tinker_recorder import hook

    recorder, client = make(MemoryStore(), "count")
    monkeypatch.setattr(hook, "read_prompt", lambda prompt: 1 / 0)
    with recorder.record_key(fresh_key()):
        assert client.sample(prompt(), 1, params).result().sequences
    assert (recorder.stats().recorder.dropped, recorder.stats().recorder.errors) == (
        {"error": 1},
        1,
    )


def test_a_forked_process_is_not_recorded_and_does_not_wait(make: Make) -> None:
    recorder, _ = make(MemoryStore(), "count")
    assert recorder._hook.active
    pid = os.fork()
    if not pid:
        # The recorder's thread is not here: nothing may wait for it.
        os._exit(int(recorder._hook.active))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
