"""TRL's own trainers on recorded experiences."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo import packing as trl_packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from recorder_core import Experience, export
from recorder_core.export import ExportError, Rules
from recorder_core.export.trl import (
    RecorderWorker,
    recorded_reward,
    rollout,
    rollout_samples,
    use_engine,
)
from tests.models import tiny_qwen3_float32
from tests.trainers import policy

TESTED = "1.16"
"""The version of TRL that these tests were written for."""


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


def sdpa_of_segments(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: Any, **__: Any
) -> Any:
    """Variable-length causal attention without the GPU kernel that TRL loads for it."""
    out = torch.empty_like(query)
    repeat = query.shape[1] // key.shape[1]
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        k = key[k0:k1].repeat_interleave(repeat, 1)
        v = value[k0:k1].repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], k) * softmax_scale
        allowed = torch.arange(k1 - k0) <= torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None]
        scores = scores.masked_fill(~allowed, -torch.inf)
        out[q0:q1] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out


class OnCpu:
    """The one function of the attention kernel that TRL calls."""

    flash_attn_varlen_func = staticmethod(sdpa_of_segments)


class NoTransfer:
    """No engine to send weights to."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...
    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass


@pytest.fixture
def asynchronous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[Experience]], tuple[dict[str, float], Step]]:
    """Trains one step with the stock `AsyncGRPOTrainer`; gives its log and gradient."""
    monkeypatch.setattr(trl_packing, "_flash_attn", lambda: OnCpu)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)

    def train(experiences: list[Experience]) -> tuple[dict[str, float], Step]:
        batch = export.group_advantages(export.rows(experiences))
        worker = RecorderWorker(lambda version: batch, max_samples=2 * len(batch))
        args = AsyncGRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=len(batch),
            gradient_accumulation_steps=1,
            max_steps=1,
            learning_rate=0.0,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            dtype="float32",
            max_grad_norm=1e9,
            save_strategy="no",
            token_budget=0,
        )
        step = Step()
        trainer = AsyncGRPOTrainer(
            model=str(tiny_qwen3_float32()),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": list(policy.REWARDS)}),
            rollout_worker=worker,
            weight_transfer=NoTransfer(),
            callbacks=[step],
        )
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
    assert log["export/rows"] == 8


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


def test_async_a_worker_that_fails_says_so_where_trl_asks() -> None:
    def broken(version: int) -> export.Batch:
        raise OSError("no engine")

    worker = RecorderWorker(broken)
    worker.start()
    worker._thread.join(10)

    with pytest.raises(RuntimeError, match="the rollouts have failed") as caught:
        worker.check_health(60)
    assert isinstance(caught.value.__cause__, OSError)


def test_async_a_worker_without_more_rollouts_says_so_too() -> None:
    worker = RecorderWorker(lambda version: None)
    worker.start()
    worker._thread.join(10)

    with pytest.raises(RuntimeError, match="no more rollouts"):
        worker.check_health(60)


def test_async_a_worker_that_is_stopped_ends_though_nobody_takes_its_samples(
    recorded: list[Experience],
) -> None:
    batch = export.group_advantages(export.rows(recorded))
    worker = RecorderWorker(lambda version: batch, max_samples=1)
    worker.start()

    worker.check_health(60)
    worker.stop()
    worker._thread.join(10)

    assert not worker._thread.is_alive()


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
    assert wanted <= set(dir(RecorderWorker(lambda version: None))), moved
    source = inspect.getsource(GRPOTrainer)
    for name in ("env_mask", "use_vllm", "vllm_generation.sync_weights()", "_last_loaded_step"):
        assert name in source, moved
