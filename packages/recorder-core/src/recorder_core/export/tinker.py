"""What Tinker's training client takes: `Datum`s for its policy losses.

Tested with the SDKs 0.25 and 0.38 on SkyRL's server, losses `importance_sampling` and `ppo`. Tinker
computes a token's probability at temperature 1: that is what the batch must be sampled at.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recorder_core.errors import ExportError
from recorder_core.export.batch import Batch
from recorder_core.export.targets import advantage_of, trainable


def datums(batch: Batch) -> list[Any]:
    """A `tinker.Datum` for each row that has something to train.

    The model's input is every token but the last; `target_tokens`, `logprobs` and `advantages` are
    those of every token but the first, which is predicted by the one before it. A token is left out
    of the loss by the advantage 0.

    Args:
        batch: With advantages; any number of rows per run.

    Returns:
        The data for `TrainingClient.forward_backward(data, "importance_sampling")`.

    Raises:
        ExportError: There are no advantages, or the batch was sampled at another temperature.
        ImportError: The SDK is not installed.

    Example:
        >>> batch = export.group_advantages(export.rows(drained.experiences))
        >>> training.forward_backward(export.tinker.datums(batch), "importance_sampling").result()
    """
    from tinker import types

    sampled = batch.temperature
    if sampled not in (None, 1.0):
        raise ExportError(
            f"the batch was sampled at temperature {sampled:g}, and Tinker trains at 1: sample at "
            "temperature 1"
        )
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(trainable(row).tokens[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(row.tokens[1:].astype(np.int64)),
                "logprobs": types.TensorData.from_numpy(row.logprobs[1:]),
                "advantages": types.TensorData.from_numpy(
                    row.mask[1:] * np.float32(advantage_of(row))
                ),
            },
        )
        for row in batch
        if row.mask.any()
    ]
