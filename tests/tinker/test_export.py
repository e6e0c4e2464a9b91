"""Recorded samples go back to Tinker as training data, and its losses are what they should be."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from recorder_core import Experience, ExperienceTurn, Sampling, export
from recorder_core.export import ExportError, Rules
from recorder_core.export.tinker import datums
from tests.tinker.conftest import finished
from tests.tinker.prompts import prompt
from tinker_recorder import TinkerRecorder

pytestmark = pytest.mark.server

Key = Callable[[], str]
REWARDS = [0.0, 1.0, 3.0]


@pytest.fixture(scope="module")
def training(service: tinker.ServiceClient, model: Path) -> tinker.TrainingClient:
    """A LoRA adapter that has not been trained: the base model's own policy."""
    return finished(service.create_lora_training_client(base_model=str(model), rank=8))


@pytest.fixture
def recorded(
    recorder: TinkerRecorder,
    client: tinker.SamplingClient,
    params: types.SamplingParams,
    fresh_key: Key,
) -> list[Experience]:
    """A group of three runs of one turn."""
    experiences = []
    for reward in REWARDS:
        key = fresh_key()
        with recorder.record_key(key):
            client.sample(prompt(), 1, params).result()
        (experience,) = recorder.experiences(key)
        experiences.append(experience.replace(reward=reward))
    return experiences


def batch_of(experiences: list[Experience]) -> export.Batch:
    return export.group_advantages(export.rows(experiences))


def step(
    training: tinker.TrainingClient, data: list[Any], loss: str
) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """The trainer's logprobs and losses of each datum's tokens."""
    result = training.forward_backward(data, loss).result()
    return [
        (np.array(each["logprobs"].data), np.array(each["elementwise_loss"].data))
        for each in result.loss_fn_outputs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_on_policy_the_ratio_is_one_and_the_loss_the_advantage(
    training: tinker.TrainingClient, recorded: list[Experience], loss: str
) -> None:
    batch = batch_of(recorded)

    for row, (logprobs, losses) in zip(batch, step(training, datums(batch), loss), strict=True):
        trained = row.mask[1:]
        assert np.exp(logprobs - row.logprobs[1:])[trained] == pytest.approx(1, abs=1e-5)
        assert losses[trained] == pytest.approx(-(row.advantage or 0), abs=1e-4)
        assert not losses[~trained].any()


@pytest.mark.slow
def test_shifted_logprobs_shift_the_loss(
    training: tinker.TrainingClient, recorded: list[Experience]
) -> None:
    shifted = [each.replace(logprobs=each.logprobs + 0.3) for each in recorded]
    batch = batch_of(shifted)

    for row, (_, losses) in zip(
        batch, step(training, datums(batch), "importance_sampling"), strict=True
    ):
        assert losses[row.mask[1:]] == pytest.approx(
            -(row.advantage or 0) * math.exp(-0.3), abs=1e-4
        )


@pytest.mark.slow
def test_logprobs_of_untrained_tokens_reach_no_loss(
    training: tinker.TrainingClient, recorded: list[Experience]
) -> None:
    def masked(value: float) -> list[Experience]:
        mask = np.array([True] * 4 + [False] * 4)
        return [
            each.replace(action_mask=mask, logprobs=np.where(mask, each.logprobs, value))
            for each in recorded
        ]

    clean = step(training, datums(batch_of(masked(-1.0))), "importance_sampling")
    poisoned = step(training, datums(batch_of(masked(math.nan))), "importance_sampling")

    for (_, losses), (_, others) in zip(clean, poisoned, strict=True):
        assert np.isfinite(others).all()
        np.testing.assert_array_equal(losses, others)


def test_a_row_with_nothing_to_train_gives_no_datum(recorded: list[Experience]) -> None:
    cut = [recorded[0].replace(finish_reason="abort"), *recorded[1:]]
    batch = export.group_advantages(export.rows(cut, Rules(aborted="mask")))

    assert len(batch) == 3
    assert len(datums(batch)) == 2
    assert [row.advantage for row in batch] == [row.advantage for row in batch_of(recorded)]


def test_what_tinker_would_train_wrongly_is_refused(recorded: list[Experience]) -> None:
    with pytest.raises(ExportError, match="group_advantages"):
        datums(export.rows(recorded))
    warm = [
        each.replace(
            turns=(
                ExperienceTurn(
                    turn.start, turn.end, turn.record.replace(sampling=Sampling(temperature=0.5))
                ),
            )
        )
        for each in recorded
        for turn in each.turns
    ]
    batch = export.group_advantages(export.rows(warm, Rules(inexact_logprobs="keep")))
    with pytest.raises(ExportError, match="sample at temperature 1"):
        datums(batch)


def test_the_sdk_still_has_what_is_relied_on(recorded: list[Experience]) -> None:
    moved = f"tinker {metadata.version('tinker')} differs from 0.25 and 0.38, the tested ones"
    datum = datums(batch_of(recorded))[0]
    assert {"target_tokens", "logprobs", "advantages"} == set(datum.loss_fn_inputs), moved
    assert datum.model_input.length == len(recorded[0].tokens) - 1, moved
    assert datum.loss_fn_inputs["target_tokens"].dtype == "int64", moved
