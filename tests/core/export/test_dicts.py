"""Trainers that take plain dicts: each value at its token, in the shape that was read of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from recorder_core import RoutedExperts, VersionSpan, export
from recorder_core.export import ExportError, Rules, dicts
from tests.core.export.experiences import experience

NAN = math.nan
ONE = experience(
    [1, 2],
    [3, 4, 5],
    logprobs=[-0.25, NAN, -0.5],
    action_mask=[True, False, True],
    model_versions=[VersionSpan(0, 1, "7"), VersionSpan(2, 3, "8")],
    routed_experts=RoutedExperts(data=np.arange(4, dtype=np.uint8)[:, None, None]),
    reward=1.0,
)
TWO = experience([1, 2], [6], run=1, reward=0.0)
BRANCH = experience([1, 2], [7], run=1, reward=0.0, suffix="branch")


def batch_of(*experiences: Any, **rules: Any) -> export.Batch:
    return export.group_advantages(export.rows(experiences, Rules(**rules)), scale="none")


def test_prime_rl_takes_full_length_and_no_shift() -> None:
    first, second = dicts.prime_rl(batch_of(ONE, TWO), env_name="sums")

    assert first["token_ids"] == [1, 2, 3, 4, 5]
    assert first["mask"] == [False, False, True, False, True]
    assert first["logprobs"] == [0, 0, -0.25, 0, -0.5]
    assert first["advantages"] == [0, 0, 0.5, 0, 0.5]
    assert first["temperatures"] == [1.0] * 5
    assert first["routed_experts"][:, 0, 0].tolist() == [0, 1, 2, 3, 0]
    assert second["routed_experts"] is None
    with pytest.raises(ExportError, match="group_advantages"):
        dicts.prime_rl(export.rows([ONE]), env_name="sums")


def test_slime_takes_the_response_and_one_sample_per_run() -> None:
    first, second = dicts.slime(batch_of(ONE, TWO))

    assert first["tokens"] == [1, 2, 3, 4, 5]
    assert first["response_length"] == 3
    assert first["loss_mask"] == [1, 0, 1]
    assert first["rollout_log_probs"] == [-0.25, 0, -0.5]
    assert first["weight_versions"] == ["7", "8"]
    assert first["rollout_routed_experts"].dtype == np.int32
    assert len(first["rollout_routed_experts"]) == 4
    assert (first["group_index"], second["group_index"]) == (0, 0)
    assert (first["index"], second["index"]) == (0, 1)
    with pytest.raises(ExportError, match="b/t/1; miles takes them all"):
        dicts.slime(batch_of(ONE, TWO, BRANCH))


def test_in_miles_the_trajectories_of_a_run_share_its_id() -> None:
    samples = dicts.miles(batch_of(ONE, TWO, BRANCH))

    assert [each["rollout_id"] for each in samples] == [0, 1, 1]
    assert [each["index"] for each in samples] == [0, 1, 2]
    assert samples[2]["status"] == "completed"


def test_areal_takes_a_version_for_each_token() -> None:
    (trajectory,) = dicts.areal(batch_of(ONE))

    assert trajectory["versions"].tolist() == [[-1, -1, 7, -1, 8]]
    assert trajectory["loss_mask"].tolist() == [[0, 0, 1, 0, 1]]
    assert trajectory["logprobs"].tolist() == [[0, 0, -0.25, 0, -0.5]]
    assert {each.shape for name, each in trajectory.items() if name != "rewards"} == {(1, 5)}
    assert trajectory["rewards"].tolist() == [1.0]
    unrewarded = experience([1], [2], reward=None)
    with pytest.raises(ExportError, match="has no reward, which AReaL"):
        dicts.areal(batch_of(unrewarded, missing_reward="keep"))


def test_in_openrlhf_a_value_stands_one_before_its_token() -> None:
    (group,) = dicts.openrlhf(batch_of(ONE, TWO), pad_token_id=9, n_samples_per_prompt=2)

    assert group["sequences"].tolist() == [[1, 2, 3, 4, 5], [1, 2, 6, 9, 9]]
    assert group["action_mask"].tolist() == [
        [False, True, False, True],
        [False, True] + [False] * 2,
    ]
    assert group["rollout_log_probs"].tolist() == [[0, -0.25, 0, -0.5], [0, -0.5, 0, 0]]
    assert group["attention_mask"].sum(1).tolist() == [5, 3]
    assert group["rewards"].tolist() == [1, 0]
    with pytest.raises(ExportError, match=r"b/t \(3\)"):
        dicts.openrlhf(batch_of(ONE, TWO, BRANCH), pad_token_id=9, n_samples_per_prompt=3)
    with pytest.raises(ExportError, match=r"counts on 4 runs"):
        dicts.openrlhf(batch_of(ONE, TWO), pad_token_id=9, n_samples_per_prompt=4)


def test_a_row_without_a_prompt_is_refused_everywhere() -> None:
    batch = batch_of(experience([], [2, 3]))
    takers = [
        dicts.slime,
        dicts.miles,
        dicts.areal,
        lambda given: dicts.prime_rl(given, env_name="x"),
        lambda given: dicts.openrlhf(given, pad_token_id=0, n_samples_per_prompt=1),
    ]
    for take in takers:
        with pytest.raises(ExportError, match="has no prompt"):
            take(batch)
