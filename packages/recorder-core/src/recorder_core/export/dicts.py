"""Plain dicts in the shape of trainers that are not on the package index, or pin each other out.

Made by the shape of the versions named, which were read and not run: `prime_rl` by prime-rl
559b447, `slime` by slime 624b824, `miles` by miles 31f1ca9, `areal` by AReaL 1.0.4, `openrlhf` by
OpenRLHF 0.11.2. Numpy only; each function says what its trainer makes of the fields.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recorder_core.arrays import AnyArray
from recorder_core.errors import ExportError
from recorder_core.export.batch import Batch, Row
from recorder_core.export.normal import named
from recorder_core.export.targets import advantage_of, trainable


def prime_rl(batch: Batch, *, env_name: str) -> list[dict[str, Any]]:
    """Fields of prime-rl's `TrainingSample`: full length, unshifted, expert rows with a zero tail.

    Args:
        batch: With advantages; any number of rows per run. Rows with nothing to train are left out.
        env_name: prime-rl's name of the environment.

    Raises:
        ExportError: There are no advantages, or a row has no prompt.
    """
    samples = []
    for row in batch:
        if not row.mask.any():
            continue
        advantage = advantage_of(trainable(row))
        temperature = 1.0 if row.temperature is None else row.temperature
        samples.append(
            {
                "token_ids": row.tokens.tolist(),
                "mask": row.mask.tolist(),
                "logprobs": row.logprobs.tolist(),
                "temperatures": [temperature] * row.length,
                "advantages": (row.mask * advantage).tolist(),
                "env_name": env_name,
                "reward": row.reward,
                "routed_experts": _experts(row, row.length),
            }
        )
    return samples


def slime(batch: Batch) -> list[dict[str, Any]]:
    """Fields of slime's `Sample`, one per run: several would go wrong there in silence.

    As a file for `--load-debug-rollout-data`: `torch.save({"samples": samples}, path)`.

    Args:
        batch: At most one row per run.

    Raises:
        ExportError: A run has several rows, or a row has no prompt.
    """
    several = [run for run, found in batch.by_run.items() if len(found) > 1]
    if several:
        raise ExportError(
            f"slime takes one sample per run, these have several trajectories: {named(several)}; "
            "miles takes them all"
        )
    return _samples(batch)


def miles(batch: Batch) -> list[dict[str, Any]]:
    """Fields of miles' `Sample`: as slime's, with `rollout_id`, which a run's trajectories share.

    Args:
        batch: Any number of rows per run.

    Raises:
        ExportError: A row has no prompt.
    """
    runs = {key: number for number, key in enumerate(batch.runs)}
    return [
        {**sample, "rollout_id": runs[row.run]}
        for row, sample in zip(batch, _samples(batch), strict=True)
    ]


def _samples(batch: Batch) -> list[dict[str, Any]]:
    groups = {group: number for number, group in enumerate(batch.by_group)}
    samples = []
    for number, row in enumerate(batch):
        start = trainable(row).prompt_length
        labels = dict.fromkeys(span.version for span in row.experience.model_versions)
        samples.append(
            {
                "group_index": groups[row.group],
                "index": number,
                "tokens": row.tokens.tolist(),
                "response_length": row.response_length,
                "loss_mask": row.mask[start:].astype(int).tolist(),
                "rollout_log_probs": row.logprobs[start:].tolist(),
                "weight_versions": list(labels),
                "reward": row.reward,
                "status": row.status,
                "rollout_routed_experts": _experts(row, row.length - 1),
            }
        )
    return samples


def areal(batch: Batch) -> list[dict[str, AnyArray]]:
    """AReaL's trajectories: [1, T] per field, unshifted, a version per token.

    Args:
        batch: Any number of rows per run, each with a reward.

    Raises:
        ExportError: A row has no reward, or no prompt.
    """
    trajectories: list[dict[str, AnyArray]] = []
    for row in batch:
        if trainable(row).reward is None:
            raise ExportError(f"{row.experience.eid} has no reward, which AReaL needs")
        trajectories.append(
            {
                "input_ids": row.tokens[None].astype(np.int64),
                "loss_mask": row.mask[None].astype(np.int32),
                "logprobs": row.logprobs[None],
                "versions": np.where(row.mask, row.versions, -1)[None].astype(np.int32),
                "attention_mask": np.ones((1, row.length), dtype=np.bool_),
                "rewards": np.array([row.reward], dtype=np.float32),
            }
        )
    return trajectories


def openrlhf(
    batch: Batch, *, pad_token_id: int, n_samples_per_prompt: int
) -> list[dict[str, AnyArray]]:
    """Fields of OpenRLHF's `Experience`: a group each, padded on the right.

    `action_mask` and `rollout_log_probs` are [B, T - 1]: index i belongs to token i + 1.

    Args:
        batch: One row per run, each with a reward.
        pad_token_id: The token at padding.
        n_samples_per_prompt: How many runs OpenRLHF counts on in every group.

    Raises:
        ExportError: A group has another number of rows, or a row has no reward or no prompt.
    """
    groups: dict[str, list[Row]] = {}
    for row in batch:
        groups.setdefault(row.group, []).append(trainable(row))
        if row.reward is None:
            raise ExportError(f"{row.experience.eid} has no reward, which OpenRLHF needs")
    odd = [
        f"{group} ({len(rows)})"
        for group, rows in groups.items()
        if len(rows) != n_samples_per_prompt or len({row.run for row in rows}) != len(rows)
    ]
    if odd:
        raise ExportError(
            f"OpenRLHF counts on {n_samples_per_prompt} runs of one trajectory in every group, "
            f"these have others: {named(odd)}; Rules(aborted='mask', empty='keep') keeps rows"
        )
    return [_group(rows, pad_token_id) for rows in groups.values()]


def _group(rows: list[Row], pad_token_id: int) -> dict[str, AnyArray]:
    shape = (len(rows), max(row.length for row in rows))
    sequences = np.full(shape, pad_token_id, dtype=np.int64)
    attention, mask = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    logprobs = np.zeros(shape, np.float32)
    for number, row in enumerate(rows):
        place = (number, slice(0, row.length))
        sequences[place], attention[place] = row.tokens, 1
        mask[place], logprobs[place] = row.mask, row.logprobs
    return {
        "sequences": sequences,
        "attention_mask": attention,
        "action_mask": mask[:, 1:],
        "rollout_log_probs": logprobs[:, 1:],
        "rewards": np.array([row.reward for row in rows], dtype=np.float32),
    }


def _experts(row: Row, rows: int) -> AnyArray | None:
    """int32 [rows, layers, top_k]: torch cannot compute with uint16."""
    found = row.routed(rows)
    return None if found is None else found[0].astype(np.int32)
