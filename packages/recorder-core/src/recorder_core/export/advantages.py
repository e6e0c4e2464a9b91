"""Group-relative advantages, in which each run counts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from recorder_core.errors import ExportError
from recorder_core.export.batch import Batch

Scale = Literal["std", "batch", "none"]

_EPSILON = 1e-4  # TRL's


def group_advantages(batch: Batch, *, scale: Scale = "std") -> Batch:
    """Give every row its run's advantage: its reward less the mean of its group's.

    A run counts once however many trajectories it has, and also where none of them is left in the
    batch: neither a branch nor a dropped trajectory moves the others' baseline. Runs without a
    reward are in no baseline; theirs is 0, as is that of a group's only run.

    Args:
        batch: Of `rows`.
        scale: `std` divides by the standard deviation of the group's rewards (GRPO,
            https://arxiv.org/abs/2402.03300), `batch` by that of all, `none` by nothing (Dr. GRPO,
            https://arxiv.org/abs/2503.20783). It is the sample's, and 1e-4 is added to it.

    Returns:
        The batch with `advantage` in every row; the rows share their arrays with those given.

    Raises:
        ExportError: `scale` is none of these.
    """
    if scale not in ("std", "batch", "none"):
        raise ExportError(f"scale is {scale!r}, it must be 'std', 'batch' or 'none'")
    rewards = {key: run.reward for key, run in batch.runs.items() if run.reward is not None}
    overall = _deviation(list(rewards.values())) + _EPSILON
    advantages = dict.fromkeys(batch.runs, 0.0)
    for keys in batch.by_group.values():
        known = [key for key in keys if key in rewards]
        given = [rewards[key] for key in known]
        by = {"std": _deviation(given) + _EPSILON, "batch": overall, "none": 1.0}[scale]
        mean = sum(given) / len(given) if given else 0.0
        for key in known if len(known) > 1 else ():
            advantages[key] = (rewards[key] - mean) / by
    rows = tuple(replace(row, advantage=advantages[row.run]) for row in batch.rows)
    return replace(batch, rows=rows)


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
