"""What TRL's trainers take: `GRPOTrainer` by its `rollout_func`, `AsyncGRPOTrainer` by samples.

Tested with TRL 1.12 and 1.16; needs nothing of it until a sample is made. Both trainers compute the
probability of every token anew, from logits divided by `args.temperature` and the whole vocabulary.
What plays for `AsyncGRPOTrainer` while it trains is in `recorder_core.rollout.trl`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recorder_core.errors import ExportError
from recorder_core.export.batch import Batch, Row
from recorder_core.export.normal import named
from recorder_core.export.targets import advantage_of, check_temperature, trainable

Samples = list[Any]
"""`trl.experimental.async_grpo.async_rollout_worker.RolloutSample`s."""


def rollout(
    batch: Batch, runs: Sequence[str], *, temperature: float = 1.0, placeholder: int = 0
) -> dict[str, list[Any]]:
    """What a `rollout_func` of `GRPOTrainer` returns: one completion for each prompt.

    TRL computes the advantages itself, from the column `reward` by way of `recorded_reward`. A run
    without a row in the batch gets a completion with nothing to train, and its reward if it has
    one: it stays in its group's baseline. One without a reward leaves the baseline.

    TRL only uses the recorded logprobs where it knows an engine; see `use_engine`.

    Args:
        batch: Of `rows`, at most one row per run.
        runs: Record keys, parallel to the prompts that TRL gave: `num_generations` in a row belong
            to one prompt.
        temperature: `args.temperature` of the trainer.
        placeholder: A token for the completions with nothing to train.

    Returns:
        The columns `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` and `reward`.

    Raises:
        ExportError: A run has several rows, a row is of a run that is not named, or the
            temperatures differ.

    Example:
        >>> def rollouts(prompts, trainer):
        ...     runs = play(prompts)  # record keys, one for each prompt
        ...     with records.drain(batch_id) as drained:
        ...         return export.trl.rollout(export.rows(drained.experiences), runs)
        >>> GRPOTrainer(..., reward_funcs=export.trl.recorded_reward, rollout_func=rollouts)
    """
    check_temperature(batch, temperature, "GRPOConfig")
    several = [run for run, found in batch.by_run.items() if len(found) > 1]
    if several:
        raise ExportError(
            f"GRPOTrainer takes one completion per prompt, these runs have several trajectories: "
            f"{named(several)}; export.trl.rollout_samples gives them all to AsyncGRPOTrainer"
        )
    twice = len(runs) - len(set(runs))
    strangers = sorted(batch.by_run.keys() - set(runs))
    if twice or strangers:
        raise ExportError(
            f"runs must name each run of the batch once, in the order of TRL's prompts; {twice} "
            f"are named twice, and these are not: {named(strangers)}"
        )
    columns: dict[str, list[Any]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward")
    }
    for key in runs:
        (row,) = batch.by_run.get(key, [None])
        known = batch.runs.get(key)
        completion = _completion(row) if row and row.response_length else None
        prompt, ids, logprobs, mask = completion or ([placeholder], [placeholder], [0.0], [0])
        columns["prompt_ids"].append(prompt)
        columns["completion_ids"].append(ids)
        columns["logprobs"].append(logprobs)
        columns["env_mask"].append(mask)
        columns["reward"].append(known.reward if known else None)
    return columns


def _completion(row: Row) -> tuple[list[int], list[int], list[float], list[int]]:
    start = trainable(row).prompt_length
    return (
        row.tokens[:start].tolist(),
        row.tokens[start:].tolist(),
        row.logprobs[start:].tolist(),
        row.mask[start:].astype(np.int64).tolist(),
    )


def recorded_reward(reward: list[float | None], **_: Any) -> list[float | None]:
    """A reward function for TRL: the runs' own rewards, as `rollout` gives them."""
    return reward


class _Engine:
    """As much of TRL's `VLLMGeneration` as it uses where a `rollout_func` generates."""

    def __init__(self, sync_weights: Callable[[], None]) -> None:
        self.sync_weights = sync_weights


def use_engine(trainer: Any, sync_weights: Callable[[], None]) -> None:
    """Tell a `GRPOTrainer` that its rollouts come from an engine of their own.

    It then corrects for the difference between the engine's probabilities and its own (truncated
    importance sampling, `args.vllm_importance_sampling_correction`), which it otherwise leaves out
    although `rollout_func` gives logprobs. This is the one place that sets TRL's attributes.

    Args:
        trainer: Made with `rollout_func`, and with `use_vllm` off.
        sync_weights: Puts the trainer's weights into the engine; called before a rollout whenever
            they have changed.
    """
    trainer.use_vllm = True
    trainer.vllm_generation = _Engine(sync_weights)
    trainer._last_loaded_step = -1


def rollout_samples(batch: Batch, *, temperature: float = 1.0, first_group: int = 0) -> Samples:
    """Samples for `AsyncGRPOTrainer`: one for each row that has something to train.

    Args:
        batch: With advantages; any number of rows per run.
        temperature: `args.temperature` of the trainer.
        first_group: The number of the batch's first group; TRL counts those that it has trained,
            so no two groups may share one.

    Returns:
        `RolloutSample`s. Their `model_version` is that of the oldest weights that sampled a token.

    Raises:
        ExportError: There are no advantages, a version is not known, or the temperatures differ.
        ImportError: TRL is not installed.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    check_temperature(batch, temperature, "AsyncGRPOConfig")
    numbers = {group: first_group + n for n, group in enumerate(batch.by_group)}
    samples = []
    for row in batch:
        versions = row.version_range()
        if versions is None:
            continue
        samples.append(
            RolloutSample(
                prompt=row.experience.messages or [],
                completion=[],
                input_ids=trainable(row).tokens.astype(np.int64),
                completion_mask=row.mask.astype(np.int64),
                old_log_probs=row.logprobs,
                advantage=advantage_of(row),
                model_version=versions[0],
                group_id=numbers[row.group],
                metrics={} if row.reward is None else {"reward": row.reward},
                enqueued_at=time.time(),
            )
        )
    return samples
