"""TRL's own trainers on recorded experiences."""

from __future__ import annotations

import dataclasses
import inspect
import math
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from recorder_core import Experience, export
from recorder_core.export import ExportError, Rules
from recorder_core.export.trl import recorded_reward, rollout, rollout_samples, use_engine
from recorder_core.rollout.trl import RecorderWorker
from tests.models import tiny_qwen3_float32
from tests.trainers import async_trl, policy

TESTED = "1.12 to 1.16"
"""The versions of TRL that these tests were written for."""


@pytest.fixture(scope="module")
def recorded() -> list[Experience]:
    return policy.groups(policy.load())


class Step(TrainerCallback):
    """What one optimizer step saw."""

    gradient: np.ndarray[Any, Any]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gradient = policy.gradient(kwargs["model"])


@pytest.fixture
def sync(tmp_path: Path) -> Callable[..., tuple[dict[str, float], Step]]:
    """Trains one step with the stock `GRPOTrainer`; gives its log and gradient."""

    def train(
        experiences: list[Experience], *, engine: bool = True, rules: Rules | None = None
    ) -> tuple[dict[str, float], Step]:
        args = GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=len(policy.RUNS),
            num_generations=4,
            max_completion_length=64,
            max_steps=1,
            learning_rate=0.0,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            beta=0.0,
            vllm_importance_sampling_mode="token_truncate",
            max_grad_norm=1e9,
            save_strategy="no",
            shuffle_dataset=False,
        )
        step = Step()
        trainer = GRPOTrainer(
            model=policy.load(),
            reward_funcs=recorded_reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": list(policy.REWARDS)}),
            processing_class=AutoTokenizer.from_pretrained(tiny_qwen3_float32()),
            rollout_func=lambda prompts, trainer: rollout(
                export.rows(experiences, rules),
                policy.RUNS,
                temperature=trainer.temperature,
            ),
            callbacks=[step],
        )
        if engine:
            use_engine(trainer, lambda: None)
        trainer.train()
        return trainer.state.log_history[0], step

    return train


RATIO = "sampling/importance_sampling_ratio"


def closed_form(experiences: list[Experience]) -> float:
    """The loss on policy: less the advantage, in the mean over the trained tokens (DAPO)."""
    batch = export.group_advantages(export.rows(experiences))
    total = sum(row.trained_tokens for row in batch)
    return -sum((row.advantage or 0) * row.trained_tokens for row in batch) / total


def test_sync_on_policy_the_ratio_is_one_and_the_loss_the_closed_form(
    sync: Any, recorded: list[Experience]
) -> None:
    log, step = sync(recorded)

    assert log[f"{RATIO}/min"] == pytest.approx(1, abs=1e-5)
    assert log[f"{RATIO}/max"] == pytest.approx(1, abs=1e-5)
    assert log["loss"] == pytest.approx(closed_form(recorded), abs=1e-4)  # TRL rounds what it logs
    assert np.abs(step.gradient).max() > 1e-3


def test_sync_shifted_logprobs_shift_the_ratio(sync: Any, recorded: list[Experience]) -> None:
    log, step = sync(policy.shifted(recorded))
    _, straight = sync(recorded)

    assert log[f"{RATIO}/mean"] == pytest.approx(math.exp(-policy.SHIFT), rel=1e-5)
    scaled = math.exp(-policy.SHIFT) * straight.gradient
    np.testing.assert_allclose(step.gradient, scaled, rtol=1e-3, atol=1e-6)


def test_sync_trl_reads_logprobs_only_where_it_knows_an_engine(
    sync: Any, recorded: list[Experience]
) -> None:
    log, _ = sync(policy.shifted(recorded), engine=False)

    assert f"{RATIO}/mean" not in log


@pytest.mark.parametrize("value", [-50.0, 40.0, -math.inf])
def test_sync_logprobs_of_untrained_tokens_are_nobodys_business(
    sync: Any, recorded: list[Experience], value: float
) -> None:
    log, step = sync(recorded)
    poisoned, its_step = sync(policy.poisoned(recorded, value))

    assert poisoned["loss"] == log["loss"]
    np.testing.assert_array_equal(its_step.gradient, step.gradient)


@pytest.mark.parametrize("aborted", ["drop", "mask"])
def test_sync_an_abort_leaves_the_others_advantages(
    sync: Any, recorded: list[Experience], aborted: str
) -> None:
    cut = [recorded[0].replace(finish_reason="abort"), *recorded[1:]]
    log, _ = sync(cut, rules=Rules(aborted=aborted))

    advantages = export.group_advantages(export.rows(recorded))
    rows = advantages.rows[1:]
    total = sum(row.trained_tokens for row in rows)
    expected = -sum((row.advantage or 0) * row.trained_tokens for row in rows) / total
    assert log["loss"] == pytest.approx(expected, abs=1e-4)


def test_sync_a_run_that_never_was_leaves_the_baseline(
    sync: Any, recorded: list[Experience]
) -> None:
    log, _ = sync(recorded[1:])

    assert log["loss"] == pytest.approx(closed_form(recorded[1:]), abs=1e-4)
    assert log["reward"] == pytest.approx(np.mean([each.reward for each in recorded[1:]]))


def test_sync_several_trajectories_of_one_run_are_refused(recorded: list[Experience]) -> None:
    branch = policy.trajectory(policy.load(), "sum", 0, reward=0.0, seed=9, suffix="branch")

    with pytest.raises(ExportError, match=r"b/sum/0; export\.trl\.rollout_samples"):
        rollout(export.rows([*recorded, branch]), policy.RUNS)


def test_sync_runs_that_do_not_match_the_batch_are_refused(recorded: list[Experience]) -> None:
    batch = export.rows(recorded)

    with pytest.raises(ExportError, match="these are not: b/sort/3"):
        rollout(batch, policy.RUNS[:-1])
    with pytest.raises(ExportError, match="1 are named twice"):
        rollout(batch, [*policy.RUNS, policy.RUNS[0]])
    with pytest.raises(ExportError, match=r"GRPOConfig\(temperature=1\)"):
        rollout(batch, policy.RUNS, temperature=0.7)


# Async


class Given:
    """A worker that has made all its samples already."""

    def __init__(self, samples: list[Any]) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for each in samples:
            self.rollout_buffer.put(each)

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("the trainer wants more samples than there are")


@pytest.fixture
def asynchronous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[Experience]], tuple[dict[str, float], Step]]:
    """Trains one step with the stock `AsyncGRPOTrainer`; gives its log and gradient."""
    async_trl.use_cpu(monkeypatch)

    def train(experiences: list[Experience]) -> tuple[dict[str, float], Step]:
        samples = rollout_samples(export.group_advantages(export.rows(experiences)))
        step = Step()
        worker = Given(2 * samples)  # the next step's are fetched ahead
        trainer = async_trl.trainer(tmp_path, worker, samples=len(samples), callbacks=[step])
        trainer.train()
        return trainer.state.log_history[0], step

    return train


def test_async_on_policy_the_ratio_is_one_and_the_loss_the_closed_form(
    asynchronous: Any, recorded: list[Experience]
) -> None:
    log, step = asynchronous(recorded)

    assert log["ratio"] == pytest.approx(1, abs=1e-5)
    assert log["loss"] == pytest.approx(closed_form(recorded), abs=1e-4)
    assert np.abs(step.gradient).max() > 1e-3


def test_async_shifted_logprobs_shift_the_ratio(
    asynchronous: Any, recorded: list[Experience]
) -> None:
    log, _ = asynchronous(policy.shifted(recorded))

    assert log["ratio"] == pytest.approx(math.exp(-policy.SHIFT), rel=1e-5)


def test_async_logprobs_of_untrained_tokens_are_nobodys_business(
    asynchronous: Any, recorded: list[Experience]
) -> None:
    log, step = asynchronous(recorded)
    poisoned, its_step = asynchronous(policy.poisoned(recorded, -math.inf))

    assert poisoned["loss"] == log["loss"]
    np.testing.assert_array_equal(its_step.gradient, step.gradient)


def test_async_a_branch_is_trained_and_leaves_the_others_advantages(
    asynchronous: Any, recorded: list[Experience]
) -> None:
    branch = policy.trajectory(policy.load(), "sum", 3, reward=3.0, seed=9, suffix="branch")

    log, _ = asynchronous([*recorded, branch])

    batch = export.group_advantages(export.rows([*recorded, branch]))
    alone = export.group_advantages(export.rows(recorded))
    assert [row.advantage for row in batch][:-1] == [row.advantage for row in alone]
    assert log["loss"] == pytest.approx(closed_form([*recorded, branch]), abs=1e-4)
    assert log["ratio"] == pytest.approx(1, abs=1e-5)


def test_async_samples_carry_the_oldest_version_and_no_empty_row(
    recorded: list[Experience],
) -> None:
    cut = [recorded[0].replace(finish_reason="abort"), *recorded[1:]]
    batch = export.group_advantages(export.rows(cut, Rules(aborted="mask")))

    samples = rollout_samples(batch, first_group=5)

    assert len(batch) == 8
    assert len(samples) == 7
    assert {each.model_version for each in samples} == {1}
    assert [each.group_id for each in samples] == [5] * 3 + [6] * 4
    with pytest.raises(ExportError, match="group_advantages"):
        rollout_samples(export.rows(recorded))


# Canary


def test_trl_still_has_what_is_relied_on() -> None:
    moved = f"TRL {trl.__version__} differs from {TESTED}, with which this was tested"
    assert "rollout_func" in inspect.signature(GRPOTrainer.__init__).parameters, moved
    fields = {each.name: each.type for each in dataclasses.fields(RolloutSample)}
    assert list(fields) == [
        *["prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage"],
        *["model_version", "group_id", "metrics", "enqueued_at"],
    ], moved
    protocol = async_grpo_trainer.RolloutWorkerProtocol
    wanted = {name for name in vars(protocol) if not name.startswith("_")}
    wanted |= set(protocol.__annotations__)
    assert wanted == {
        *["rollout_buffer", "metrics_queue", "start", "stop", "update_model_version"],
        "check_health",
    }, moved
    assert wanted <= {*dir(RecorderWorker), "rollout_buffer", "metrics_queue"}, moved
    transfer = async_grpo_trainer.WeightTransferProtocol
    wanted = {name for name in vars(transfer) if not name.startswith("_")}
    assert wanted == {
        *["init_weight_transfer", "pause", "send_weights", "resume", "destroy"],
    }, moved
    source = inspect.getsource(GRPOTrainer)
    for name in ("env_mask", "use_vllm", "vllm_generation.sync_weights()", "_last_loaded_step"):
        assert name in source, moved
