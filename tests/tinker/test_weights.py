"""Each record names the weights that sampled it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from recorder_core import Record, encode_runs
from tests.tinker.conftest import API_KEY, finished
from tests.tinker.prompts import prompt, prompt_ids
from tinker_recorder import TinkerRecorder

pytestmark = pytest.mark.server

Key = Callable[[], str]
HAS_KINDS = hasattr(types, "SamplingClientKind")


@pytest.fixture(scope="module")
def training(service: tinker.ServiceClient, model: Path) -> tinker.TrainingClient:
    """A LoRA adapter in training."""
    return finished(service.create_lora_training_client(base_model=str(model), rank=8))


def train_one_step(training: tinker.TrainingClient) -> None:
    datum = types.Datum(
        model_input=prompt(),
        loss_fn_inputs={
            "target_tokens": [*prompt_ids()[1:], 7],
            "weights": [1.0] * len(prompt_ids()),
        },
    )
    training.forward_backward([datum, datum], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()


def versions(record: Record) -> list[tuple[int, int, str]]:
    return [tuple(span) for span in record.versions]


@pytest.mark.slow
def test_a_training_step_and_a_new_sampler_are_seen_in_the_records(
    recorder: TinkerRecorder,
    service: tinker.ServiceClient,
    training: tinker.TrainingClient,
    params: types.SamplingParams,
    fresh_key: Key,
    model: Path,
) -> None:
    seeded = params.model_copy(update={"seed": 1})
    train_one_step(training)
    first = training.save_weights_for_sampler(name="first").result().path
    train_one_step(training)
    samplers = [
        finished(service.create_sampling_client(base_model=str(model))),
        finished(service.create_sampling_client(model_path=first)),
        finished(training.save_weights_and_get_sampling_client()),
    ]
    records = []
    for sampler in samplers:
        key = fresh_key()
        with recorder.record_key(key):
            result = sampler.sample(prompt(), 1, seeded).result()
        (record,) = recorder.lease(key).records
        np.testing.assert_array_equal(record.logprobs, result.sequences[0].logprobs_np)
        records.append(record)
    base, saved, unnamed = records
    assert versions(base) == [(0, 8, str(model))]
    assert first.startswith("tinker://")
    assert versions(saved) == [(0, 8, first)]
    ((start, end, label),) = versions(unnamed)
    assert (start, end) == (0, 8)
    assert label.startswith("tinker://")
    assert label != first
    assert {record.flags for record in records} == {()}
    # They are other weights: the same seed samples other tokens, or with another probability.
    sampled = {(*each.response_ids.tolist(), *each.logprobs.tolist()) for each in records}
    assert len(sampled) == 3


@pytest.mark.slow
@pytest.mark.skipif(not HAS_KINDS, reason="this SDK has no in-flight samplers")
def test_an_in_flight_samplers_version_is_flagged_a_lower_bound(
    recorder: TinkerRecorder,
    training: tinker.TrainingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    key = fresh_key()
    sampler = finished(training.save_weights_and_get_sampling_client(kind="inflight"))
    with recorder.record_key(key):
        sampler.sample(prompt(), 1, params).result()
    (record,) = recorder.lease(key).records
    assert record.versions[0].version.startswith("tinker://")
    assert record.flags == ("version_lower_bound",)
    assert recorder.stats().recorder.flagged == {"version_lower_bound": 1}


def test_a_client_made_before_recording_began_is_asked_for_its_weights(
    service: tinker.ServiceClient, params: types.SamplingParams, fresh_key: Key, model: Path
) -> None:
    client = finished(service.create_sampling_client(base_model=str(model)))
    recorder = TinkerRecorder()
    recorder.instrument()
    try:
        key = fresh_key()
        with recorder.record_key(key):
            client.sample(prompt(), 1, params).result()
        (record,) = recorder.lease(key).records
        assert versions(record) == [(0, 8, str(model))]
        assert record.flags == ()
    finally:
        recorder.close()


SAMPLE_IN_A_PROCESS = """\
import pickle, sys
from tinker import types
from tinker_recorder import TinkerRecorder

recorder = TinkerRecorder()
recorder.instrument()
client, prompt, params = pickle.loads(sys.stdin.buffer.read())
result = client.sample(prompt, 1, params).result()
(record,) = recorder.lease().records
assert record.response_ids.tolist() == list(result.sequences[0].tokens)
print(str(record.key), record.versions[0].version, *record.flags, sep="|")
"""


def test_a_pickled_bound_client_is_recorded_in_the_process_that_it_goes_to(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
    model: Path,
) -> None:
    key = fresh_key()
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE_IN_A_PROCESS],
        input=pickle.dumps((recorder.bind(client, key), prompt(), params)),
        stdout=subprocess.PIPE,
        check=True,
    )
    assert done.stdout.decode().strip() == f"{key}|{model}"
    assert recorder.stats().recorder.started == 0


def test_an_unpickled_client_in_the_same_process_is_recorded_once(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
    model: Path,
) -> None:
    key = fresh_key()
    copy: Any = pickle.loads(pickle.dumps(client))
    with recorder.record_key(key):
        copy.sample(prompt(), 1, params).result()
    (record,) = recorder.lease(key).records
    assert versions(record) == [(0, 8, str(model))]


def test_a_client_that_cannot_say_its_weights_is_recorded_without_a_version(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tinker_recorder import samplers

    class Silent:
        """Asks for a sampler that the server does not know."""

        def __init__(self, holder: Any) -> None:
            self._rest = rest(holder)

        def get_sampler(self, sampler_id: str) -> Any:
            return self._rest.get_sampler("unknown")

    rest = samplers.RestClient
    monkeypatch.setattr(samplers, "RestClient", Silent)
    copy = pickle.loads(pickle.dumps(client))
    key = fresh_key()
    with recorder.record_key(key):
        copy.sample(prompt(), 1, params).result()
    (record,) = recorder.lease(key).records
    assert record.versions == ()
    assert record.flags == ("version_unknown",)


def test_the_key_of_the_service_is_in_no_record(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> None:
    key = fresh_key()
    with recorder.record_key(key):
        client.sample(prompt(), 1, params).result()
    assert API_KEY.encode() not in encode_runs(recorder.runs(key))
