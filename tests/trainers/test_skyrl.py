"""SkyRL's own validation, batching, advantage and loss on recorded experiences."""

from __future__ import annotations

import math
from importlib import metadata
from typing import Any

import numpy as np
import pytest
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import (
    compute_grpo_outcome_advantage,
    ppo_policy_loss,
)
from skyrl.train.config import AlgorithmConfig
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.utils.trainer_utils import validate_generator_output

from recorder_core import Experience, RoutedExperts, export
from recorder_core.export import ExportError, Rules
from recorder_core.export.skyrl import generator_output
from tests.trainers import policy

TESTED = "0.4"
"""The version of SkyRL that these tests were written for."""


@pytest.fixture(scope="module")
def recorded() -> list[Experience]:
    return policy.groups(policy.load())


def algorithm() -> AlgorithmConfig:
    config = AlgorithmConfig(loss_reduction="token_mean")
    config.off_policy_correction.tis_ratio_type = "token"
    return config


class Step:
    """One step, from a `GeneratorOutput` to the gradient."""

    def __init__(self, output: dict[str, Any]) -> None:
        validate_generator_output(len(policy.RUNS), output, step_wise=bool(output["is_last_step"]))
        responses = output["response_ids"]
        rewards = [
            [0.0] * (len(ids) - 1) + [reward]
            for ids, reward in zip(responses, output["rewards"], strict=True)
        ]
        ids, attention, _, rewards, mask, rollout, *_ = convert_prompts_responses_to_batch_tensors(
            0,
            output["prompt_token_ids"],
            responses,
            rewards,
            output["loss_masks"],
            output["rollout_logprobs"],
        )
        model = policy.load()
        positions = (attention.cumsum(1) - 1).clamp(min=0).long()
        logits = model(
            input_ids=ids.long(), attention_mask=attention.long(), position_ids=positions
        ).logits
        count = mask.shape[1]
        scored = torch.log_softmax(logits[:, -count - 1 : -1], -1)
        log_probs = scored.gather(-1, ids[:, -count:, None].long())[..., 0]
        index = np.array([each.instance_id for each in output["trajectory_ids"]])
        last = torch.tensor(output["is_last_step"] or [True] * len(responses))
        # As SkyRL's trainer: the last row of a run is compared, and its advantage goes to all.
        advantages, _ = compute_grpo_outcome_advantage(
            rewards[last], torch.ones_like(mask[last]), index[last.numpy()]
        )
        of_row = torch.cat([torch.tensor([False]), last[:-1]]).int().cumsum(0)
        self.advantages = advantages[of_row] * mask
        loss, self.metrics = ppo_policy_loss(
            log_probs, log_probs.detach(), self.advantages, algorithm(), mask, rollout
        )
        loss.backward()
        trained = mask.bool()
        self.ratio = (log_probs.detach() - rollout).exp()[trained]
        self.loss = loss.item()
        self.gradient = policy.gradient(model)


def output(experiences: list[Experience], rules: Rules | None = None, **options: Any) -> Any:
    return generator_output(export.rows(experiences, rules), policy.RUNS, **options)


def closed_form(experiences: list[Experience], scale: float = 1.0) -> float:
    """Less the advantage, summed over the trained tokens; SkyRL divides before, in its worker."""
    batch = export.group_advantages(export.rows(experiences))
    return -scale * sum((row.advantage or 0) * row.trained_tokens for row in batch)


def test_on_policy_the_ratio_is_one_and_the_loss_the_closed_form(
    recorded: list[Experience],
) -> None:
    step = Step(output(recorded))

    assert step.ratio.numpy() == pytest.approx(1, abs=1e-5)
    assert step.loss == pytest.approx(closed_form(recorded), abs=2e-3)  # another epsilon
    assert np.abs(step.gradient).max() > 1e-3


def test_shifted_logprobs_shift_the_ratio_and_the_loss(recorded: list[Experience]) -> None:
    step = Step(output(policy.shifted(recorded)))

    by = math.exp(-policy.SHIFT)
    assert step.ratio.numpy() == pytest.approx(by, rel=1e-5)
    assert step.loss == pytest.approx(closed_form(recorded, by), abs=2e-3)


@pytest.mark.parametrize("value", [-50.0, 40.0, -math.inf])
def test_logprobs_of_untrained_tokens_are_nobodys_business(
    recorded: list[Experience], value: float
) -> None:
    step, poisoned = Step(output(recorded)), Step(output(policy.poisoned(recorded, value)))

    assert poisoned.loss == step.loss
    np.testing.assert_array_equal(poisoned.gradient, step.gradient)


@pytest.mark.parametrize("aborted", ["drop", "mask"])
def test_an_abort_leaves_the_others_advantages(recorded: list[Experience], aborted: Any) -> None:
    cut = [recorded[0].replace(finish_reason="abort"), *recorded[1:]]

    whole, step = Step(output(recorded)), Step(output(cut, Rules(aborted=aborted)))

    torch.testing.assert_close(step.advantages[1:], whole.advantages[1:])
    assert not step.advantages[0].any()


def of_rows(advantages: torch.Tensor) -> list[float]:
    """The one value that stands at each row's trained tokens."""
    return [(row.sum() / (row != 0).sum().clamp(min=1)).item() for row in advantages]


def test_step_wise_a_branch_is_trained_and_leaves_the_others_advantages(
    recorded: list[Experience],
) -> None:
    branch = policy.trajectory(policy.load(), "sum", 3, reward=3.0, seed=9, suffix="branch")
    empty = branch.replace(action_mask=np.zeros_like(branch.action_mask))
    given = [*recorded, branch, empty]

    with pytest.raises(ExportError, match="b/sum/3; set generator"):
        output(given)
    made = output(given, Rules(empty="keep"), step_wise=True)
    step, alone = Step(made), Step(output(recorded))

    assert made["is_last_step"] == [True] * 3 + [False, False] + [True] * 5
    assert [sum(mask) for mask in made["loss_masks"][3:6]] == [0, 10, 10]
    assert step.ratio.numpy() == pytest.approx(1, abs=1e-5)
    ours, theirs = of_rows(step.advantages), of_rows(alone.advantages)
    assert [*ours[:3], *ours[5:]] == pytest.approx(theirs)
    assert ours[3:6] == pytest.approx([0, theirs[3], theirs[3]])


def test_experts_are_of_a_type_that_skyrl_knows(recorded: list[Experience]) -> None:
    def routed(each: Experience, expert: int) -> Experience:
        data = np.full((len(each.tokens) - 1, 2, 1), expert)
        return each.replace(routed_experts=RoutedExperts(data=data))

    narrow, wide = (output([routed(each, top) for each in recorded]) for top in (7, 300))

    assert {each.dtype for each in narrow["rollout_expert_indices"]} == {np.dtype(np.uint8)}
    assert {each.dtype for each in wide["rollout_expert_indices"]} == {np.dtype(np.int32)}
    Step(wide)
    with pytest.raises(ExportError, match="1 of 8 rows have no routed experts"):
        output([recorded[0], *(routed(each, 7) for each in recorded[1:])])


def test_what_skyrl_would_count_wrongly_is_refused(recorded: list[Experience]) -> None:
    with pytest.raises(ExportError, match="with the reward 0: b/sum/0"):
        output(recorded[1:])
    with pytest.raises(ExportError, match="these are not named: b/sort/3"):
        generator_output(export.rows(recorded), policy.RUNS[:-1])


def test_skyrl_still_has_what_is_relied_on(recorded: list[Experience]) -> None:
    moved = f"skyrl {metadata.version('skyrl')} differs from {TESTED}, the tested one"
    assert set(output(recorded)) <= set(GeneratorOutput.__annotations__), moved
