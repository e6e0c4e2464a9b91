"""Rows into TransferQueue, verl's data plane on Ray, from where they are drained.

Tested with TransferQueue 0.1.11 and the replay buffer of verl 0.9, on a Ray of one machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from recorder_core.errors import ExportError
from recorder_core.export.batch import Batch
from recorder_core.export.verl import agent_loop_outputs


def stage(
    batch: Batch, *, global_steps: int, partition_id: str = "train", temperature: float = 1.0
) -> list[str]:
    """Put rows into TransferQueue, as verl's agent loops put what they have played.

    Call it where a replica is drained, in the block of the drain: its records are acknowledged when
    their rows are staged, and come back otherwise. What was staged twice is there once.

    Args:
        batch: Of `rows`; any number of rows per run, whole runs.
        global_steps: verl's number of the step for which they were played.
        partition_id: verl's `train` or `val`.
        temperature: verl's `rollout.temperature`.

    Returns:
        The groups of which rows were staged, for `finish`.

    Raises:
        ExportError: A run has no reward, a row has no prompt or no response, or the temperatures
            differ.
        ImportError: verl or TransferQueue is not installed.

    Example:
        >>> @ray.remote
        ... def replica(url):
        ...     with RecordClient(url) as records, records.drain("12") as drained:
        ...         batch = export.rows(drained.experiences, incomplete=drained.incomplete)
        ...         return export.transfer_queue.stage(batch, global_steps=12)
        >>> groups = ray.get([replica.remote(url) for url in urls])
        >>> export.transfer_queue.finish(set().union(*groups), global_steps=12)
    """
    import transfer_queue
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    keys, fields, tags = [], [], []
    for run, outputs in agent_loop_outputs(batch, temperature=temperature).items():
        known = batch.runs[run]
        if known.reward is None:
            raise ExportError(f"{run} has no reward; nobody computes it after it is staged")
        uid = _digest(known.group)
        for index, output in enumerate(outputs):
            keys.append(f"{uid}_{_digest(run)}_{index}")
            fields.append(_fields(output, uid=uid, run=run, global_steps=global_steps))
            tags.append(_tag(fields[-1], global_steps))
    if keys:
        transfer_queue.init()  # joins the one that there is
        transfer_queue.kv_batch_put(
            keys=keys,
            partition_id=partition_id,
            fields=list_of_dict_to_tensordict(fields),
            tags=tags,
        )
    return sorted({batch.runs[run].group for run in batch.by_run})


def finish(groups: Iterable[str], *, global_steps: int, partition_id: str = "train") -> None:
    """Let verl's replay buffer have groups: every run of theirs is staged, from every replica.

    Args:
        groups: As `stage` names them.
        global_steps: As it was told.
        partition_id: As it was told.

    Raises:
        ImportError: TransferQueue is not installed.
    """
    import transfer_queue

    tag = {"is_prompt": True, "status": "finished", "global_steps": global_steps}
    keys = [_digest(group) for group in groups]
    if keys:
        transfer_queue.init()
        transfer_queue.kv_batch_put(
            keys=keys, partition_id=partition_id, tags=[dict(tag) for _ in keys]
        )


def _digest(name: str) -> str:
    """Verl splits its keys at underscores, which our names may have."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _fields(output: Any, **columns: Any) -> dict[str, Any]:
    """What verl's own agent loop worker stores of an output."""
    import torch

    fields: dict[str, Any] = {**output.as_dict(), **columns}
    ids = torch.cat([fields["prompts"], fields["responses"]])
    return {
        **fields,
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "loss_mask": fields["response_mask"],
        "multi_modal_inputs": {},
    }


def _tag(fields: dict[str, Any], global_steps: int) -> dict[str, Any]:
    prompt, response = len(fields["prompts"]), len(fields["responses"])
    weights = fields["extra_fields"]
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": global_steps,
        "min_global_steps": weights.get("min_global_steps"),
        "max_global_steps": weights.get("max_global_steps"),
    }
