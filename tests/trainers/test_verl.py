"""verl's own advantage, correction and loss on recorded experiences."""

from __future__ import annotations

import inspect
import math
from importlib import metadata
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import AdvantageEstimator, get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.config import ActorConfig

from recorder_core import Experience, RoutedExperts, export
from recorder_core.export import ExportError, Rules
from recorder_core.export.verl import agent_loop_outputs, dataproto
from tests.trainers import policy

TESTED = "0.8 to 0.9"
"""The versions of verl that these tests were written for."""

in_v1 = pytest.mark.skipif(
    Version(metadata.version("verl")) < Version("0.9"), reason="there is no V1 before verl 0.9"
)
ACTOR = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1)


@pytest.fixture(scope="module")
def recorded() -> list[Experience]:
    return policy.groups(policy.load())


class Step:
    """One step of verl's classic trainer, from a `DataProto` to the gradient."""

    def __init__(self, data: DataProto, *, advantages: bool = False) -> None:
        model = policy.load()
        batch = data.batch
        responses = batch["responses"]
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
        ).logits
        logits = logits[:, -responses.shape[1] - 1 : -1] / data.meta_info["temperature"]
        log_probs = logprobs_from_logits(logits, responses)
        batch["old_log_probs"] = log_probs.detach()
        batch["token_level_rewards"] = batch["rm_scores"]
        if not advantages:
            data = compute_advantage(data, AdvantageEstimator.GRPO)
        self.advantages = data.batch["advantages"]
        correction = RolloutCorrectionConfig(rollout_is="token")
        data, self.metrics = compute_rollout_correction_and_add_to_batch(data, correction)
        mask = data.batch["response_mask"].bool()
        self.ratio = data.batch["rollout_is_weights"][mask]
        loss, _ = get_policy_loss_fn("vanilla")(
            old_log_prob=data.batch["old_log_probs"],
            log_prob=log_probs,
            advantages=self.advantages,
            response_mask=data.batch["response_mask"],
            config=ACTOR,
            rollout_is_weights=data.batch["rollout_is_weights"],
        )
        loss.backward()
        self.loss = loss.item()
        self.gradient = policy.gradient(model)


def proto(experiences: list[Experience], rules: Rules | None = None, **options: Any) -> DataProto:
    return dataproto(export.rows(experiences, rules), pad_token_id=0, **options)


def closed_form(batch: export.Batch) -> float:
    """The loss on policy: less the advantage, in the mean over the trained tokens."""
    total = sum(row.trained_tokens for row in batch)
    return -sum((row.advantage or 0) * row.trained_tokens for row in batch) / total


def test_on_policy_the_ratio_is_one_and_the_loss_the_closed_form(
    recorded: list[Experience],
) -> None:
    step = Step(proto(recorded))

    assert step.ratio.numpy() == pytest.approx(1, abs=1e-5)
    batch = export.group_advantages(export.rows(recorded))
    assert step.loss == pytest.approx(closed_form(batch), abs=1e-3)  # verl adds another epsilon
    assert np.abs(step.gradient).max() > 1e-3


def test_our_advantages_give_the_same_step(recorded: list[Experience]) -> None:
    batch = export.group_advantages(export.rows(recorded))

    step = Step(dataproto(batch, pad_token_id=0), advantages=True)

    assert step.loss == pytest.approx(closed_form(batch), abs=1e-6)
    np.testing.assert_allclose(step.advantages, Step(proto(recorded)).advantages, atol=1e-3)


def test_at_another_temperature_the_ratio_is_one_where_verl_knows_it() -> None:
    warm = policy.groups(policy.load(), temperature=0.7)

    assert Step(proto(warm, temperature=0.7)).ratio.numpy() == pytest.approx(1, abs=1e-5)
    with pytest.raises(ExportError, match=r"sampled at temperature 0\.7"):
        proto(warm)


def test_shifted_logprobs_shift_the_ratio(recorded: list[Experience]) -> None:
    step, straight = Step(proto(policy.shifted(recorded))), Step(proto(recorded))

    assert step.ratio.numpy() == pytest.approx(math.exp(-policy.SHIFT), rel=1e-5)
    assert step.loss == pytest.approx(math.exp(-policy.SHIFT) * straight.loss, rel=1e-4)


@pytest.mark.parametrize("value", [-50.0, 40.0, -math.inf])
def test_logprobs_of_untrained_tokens_are_nobodys_business(
    recorded: list[Experience], value: float
) -> None:
    step, poisoned = Step(proto(recorded)), Step(proto(policy.poisoned(recorded, value)))

    assert poisoned.loss == step.loss
    np.testing.assert_array_equal(poisoned.gradient, step.gradient)


def test_an_aborted_run_stays_in_verls_baseline_when_it_is_masked(
    recorded: list[Experience],
) -> None:
    cut = [recorded[0].replace(finish_reason="abort"), *recorded[1:]]

    whole, masked = Step(proto(recorded)), Step(proto(cut, Rules(aborted="mask")))

    torch.testing.assert_close(masked.advantages[1:], whole.advantages[1:])
    assert not masked.advantages[0].any()


def test_a_branch_needs_advantages_and_then_leaves_the_others(recorded: list[Experience]) -> None:
    branch = policy.trajectory(policy.load(), "sum", 3, reward=3.0, seed=9, suffix="branch")
    batch = export.rows([*recorded, branch])

    with pytest.raises(ExportError, match="several trajectories: b/sum/3; call"):
        dataproto(batch, pad_token_id=0)
    step = Step(dataproto(export.group_advantages(batch), pad_token_id=0), advantages=True)

    alone = export.group_advantages(export.rows(recorded))
    assert step.advantages[:8].amax(1).numpy() + step.advantages[:8].amin(1).numpy() == (
        pytest.approx([row.advantage for row in alone], abs=1e-6)
    )
    assert step.ratio.numpy() == pytest.approx(1, abs=1e-5)


def test_what_verl_would_count_as_reward_zero_is_refused(recorded: list[Experience]) -> None:
    unrewarded = [recorded[0].replace(reward=None), *recorded[1:]]
    with pytest.raises(ExportError, match="with the reward 0: b/sum/0"):
        proto(unrewarded, Rules(missing_reward="keep"))
    with pytest.raises(ExportError, match="no rows"):
        proto([])


def test_a_dataproto_says_which_weights_and_which_group(recorded: list[Experience]) -> None:
    data = proto(recorded)

    assert data.non_tensor_batch["uid"].tolist() == ["b/sum"] * 4 + ["b/sort"] * 4
    assert data.non_tensor_batch["min_global_steps"].tolist() == [1] * 8
    assert data.non_tensor_batch["max_global_steps"].tolist() == [2] * 8
    assert data.batch["rm_scores"].sum(1).tolist() == [each.reward for each in recorded]


def experts(each: Experience, top: int = 300) -> Experience:
    """The same with experts that name their row."""
    rows = np.arange(len(each.tokens) - 1, dtype=np.uint16)[:, None, None]
    return each.replace(routed_experts=RoutedExperts(data=rows + np.uint16(top)))


def test_experts_stand_at_their_token_and_end_with_zero(recorded: list[Experience]) -> None:
    data = proto([experts(each) for each in recorded[:2]])

    found = data.batch["routed_experts"]
    assert found.dtype == torch.int16
    assert found.shape == (*data.batch["input_ids"].shape, 1, 1)
    length = len(recorded[0].tokens)
    assert found[0, :length, 0, 0].tolist() == [*range(300, 300 + length - 1), 0]
    with pytest.raises(ExportError, match="rows without any: b/sum/1"):
        proto([experts(recorded[0]), recorded[1]])
    with pytest.raises(ExportError, match="int16"):
        proto([experts(recorded[0], top=40_000)])


# Agent loops


def as_v1_sees_it(outputs: dict[str, list[AgentLoopOutput]]) -> tuple[DataProto, list[str]]:
    """The outputs as verl's V1 puts them into its data plane, padded again."""
    found = [(key, n, each) for key, each_run in outputs.items() for n, each in enumerate(each_run)]
    fields = [each.as_dict() for _, _, each in found]

    def padded(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([each[name] for each in fields], batch_first=True)

    tensors = {name: padded(name) for name in ("response_mask", "rm_scores", "rollout_log_probs")}
    tensors["token_level_rewards"] = tensors["rm_scores"]
    uids = [key.rsplit("/", 1)[0] for key, _, _ in found]
    keys = [f"{'_'.join(key.rsplit('/', 1))}_{n}" for key, n, _ in found]
    return DataProto.from_dict(tensors, {"uid": np.array(uids, dtype=object)}), keys


@in_v1
def test_in_agent_loops_each_run_counts_once_and_every_row_is_trained(
    recorded: list[Experience],
) -> None:
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    branch = policy.trajectory(policy.load(), "sum", 3, reward=3.0, seed=9, suffix="branch")
    empty = branch.replace(action_mask=np.zeros_like(branch.action_mask))
    batch = export.rows([*recorded, branch, empty], Rules(empty="keep"))

    outputs = agent_loop_outputs(batch)
    data, keys = as_v1_sees_it(outputs)
    data = compute_advantage_for_multi_trajectories(data, keys, AdvantageEstimator.GRPO)

    assert [sum(each.response_mask) for each in outputs["b/sum/3"]] == [0, 10, 10]
    expected = export.group_advantages(export.rows(recorded))
    mask, advantages = data.batch["response_mask"].bool(), data.batch["advantages"]
    of_run = {row.run: row.advantage for row in expected}
    for key, row_mask, row in zip(
        [key for key, each in outputs.items() for _ in each], mask, advantages, strict=True
    ):
        assert row[row_mask].numpy() == pytest.approx(of_run[key], abs=1e-3)


@in_v1
def test_an_agent_loop_output_is_what_was_recorded(recorded: list[Experience]) -> None:
    (output,) = agent_loop_outputs(export.rows([experts(recorded[0])]))["b/sum/0"]

    start = recorded[0].prompt_length
    assert output.prompt_ids + output.response_ids == recorded[0].tokens.tolist()
    assert output.response_mask == recorded[0].action_mask.astype(int).tolist()
    assert np.array(output.response_logprobs) == pytest.approx(np.nan_to_num(recorded[0].logprobs))
    assert output.extra_fields["min_global_steps"] == 1
    experts_of_all = output.as_dict()["routed_experts"]
    assert len(experts_of_all) == len(recorded[0].tokens)
    assert experts_of_all[start, 0, 0] == 300 + start
    assert not experts_of_all[-1].any()


# Canary


def test_verl_still_has_what_is_relied_on() -> None:
    moved = f"verl {metadata.version('verl')} differs from {TESTED}, with which this was tested"
    assert {
        *["prompt_ids", "response_ids", "response_mask", "response_logprobs", "routed_experts"],
        *["reward_score", "num_turns", "metrics", "extra_fields"],
    } <= set(AgentLoopOutput.model_fields), moved
    given = inspect.signature(DataProto.from_dict).parameters
    assert {"tensors", "non_tensors", "meta_info"} <= set(given), moved
