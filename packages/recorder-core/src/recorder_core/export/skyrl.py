"""What SkyRL's trainer takes: the `GeneratorOutput` of a generator.

Tested with SkyRL 0.4: its own validation, batching and loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recorder_core.arrays import AnyArray
from recorder_core.errors import ExportError
from recorder_core.export.batch import Batch, Row
from recorder_core.export.normal import named
from recorder_core.export.targets import check_temperature, trainable
from recorder_core.keys import RecordKey


def generator_output(
    batch: Batch, runs: Sequence[str], *, step_wise: bool = False, temperature: float = 1.0
) -> dict[str, Any]:
    """What a generator returns for the prompts that SkyRL gave it.

    SkyRL computes the advantages itself, in groups of one `instance_id`. A run without a row stays
    in the baseline by a response with nothing to train.

    Args:
        batch: Of `rows`; one row per run, or any number with `step_wise`.
        runs: Record keys, parallel to the prompts of the generator's input.
        step_wise: SkyRL's `generator.step_wise_trajectories`, without `merge_stepwise_output`: a
            run's advantage is that of its last row, and goes to all of them.
        temperature: SkyRL's `sampling_params.temperature`.

    Returns:
        A `GeneratorOutput`: rows in the order of `runs`, those of a run together, each with its
        run's reward.

    Raises:
        ExportError: A run has several rows and `step_wise` is off, a row is of a run that is not
            named, a run has no reward, or only some rows have routed experts.
        ImportError: SkyRL is not installed.
    """
    from skyrl.train.generators.base import TrajectoryID

    check_temperature(batch, temperature, "sampling_params")
    _check(batch, runs, step_wise)
    rows: list[Row | None] = []
    keys: list[str] = []
    for key in runs:
        # Alike but for their order, which decides whose advantage counts: one with tokens.
        found = sorted(batch.by_run.get(key, ()), key=lambda row: row.trained_tokens > 0)
        rows += found or [None]
        keys += [key] * max(len(found), 1)
    output: dict[str, Any] = {
        "prompt_token_ids": [[0] if row is None else _ids(row, prompt=True) for row in rows],
        "response_ids": [[0] if row is None else _ids(row, prompt=False) for row in rows],
        "rewards": [float(batch.runs[key].reward or 0.0) for key in keys],
        "loss_masks": [
            [0] if row is None else row.mask[row.prompt_length :].astype(np.int64).tolist()
            for row in rows
        ],
        "stop_reasons": [_stop_reason(row) for row in rows],
        "rollout_metrics": None,
        "rollout_logprobs": [
            [0.0] if row is None else row.logprobs[row.prompt_length :].tolist() for row in rows
        ],
        "trajectory_ids": [
            TrajectoryID(instance_id=batch.runs[key].group, repetition_id=RecordKey.parse(key).run)
            for key in keys
        ],
        "rollout_expert_indices": _experts(rows),
        "is_last_step": None,
    }
    if step_wise:
        output["is_last_step"] = [a != b for a, b in zip(keys, [*keys[1:], None], strict=True)]
    return output


def _check(batch: Batch, runs: Sequence[str], step_wise: bool) -> None:
    several = [run for run, found in batch.by_run.items() if len(found) > 1]
    if several and not step_wise:
        raise ExportError(
            f"SkyRL takes one response per prompt, these runs have several trajectories: "
            f"{named(several)}; set generator.step_wise_trajectories and pass step_wise=True"
        )
    strangers = sorted(batch.by_run.keys() - set(runs))
    if strangers or len(set(runs)) != len(runs):
        raise ExportError(
            "runs must name each run of the batch once, in the order of SkyRL's prompts; these "
            f"are not named: {named(strangers)}"
        )
    unrewarded = [key for key in runs if key not in batch.runs or batch.runs[key].reward is None]
    if unrewarded:
        raise ExportError(f"SkyRL would count these runs with the reward 0: {named(unrewarded)}")


def _ids(row: Row, *, prompt: bool) -> list[int]:
    start = trainable(row).prompt_length
    if not row.response_length:
        raise ExportError(f"{row.experience.eid} has no response; empty='drop' leaves it out")
    ids: list[int] = (row.tokens[:start] if prompt else row.tokens[start:]).tolist()
    return ids


def _stop_reason(row: Row | None) -> str:
    if row is None or row.status == "aborted":
        return "abort"
    return "length" if row.status == "truncated" else "stop"


def _experts(rows: Sequence[Row | None]) -> list[AnyArray] | None:
    """uint8 or int32 [T - 1, layers, top_k] for each row; SkyRL has no uint16."""
    found = [None if row is None else row.routed(row.length - 1) for row in rows]
    given = [each[0] for each in found if each is not None]
    if not given:
        return None
    if len(given) < len(rows):
        raise ExportError(
            f"{len(rows) - len(given)} of {len(rows)} rows have no routed experts, and SkyRL "
            "replays those of all or of none"
        )
    dtype = np.uint8 if all(each.dtype == np.uint8 for each in given) else np.int32
    return [each.astype(dtype) for each in given]
