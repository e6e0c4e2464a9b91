"""What verl takes: a `DataProto` of padded tensors, or the outputs of agent loops.

Tested with verl 0.8 and 0.9. `AgentLoopOutput`s are what its trainer with a data plane ("V1", from
0.9) takes, which knows runs of several trajectories; a `DataProto` is what its older trainers take.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recorder_core.arrays import AnyArray
from recorder_core.errors import ExportError
from recorder_core.export.batch import Batch, Row
from recorder_core.export.normal import named
from recorder_core.export.targets import advantage_of, check_temperature, trainable

_MOST_EXPERTS = np.iinfo(np.int16).max  # verl's router replay holds int16


def dataproto(batch: Batch, *, pad_token_id: int, temperature: float = 1.0) -> Any:
    """A `verl.DataProto`: prompts padded on the left, responses on the right.

    With the advantages of `group_advantages`, it holds `advantages` and `returns`, and verl's own
    `compute_advantage` is to be left out: it counts rows, so that a run with two trajectories would
    count twice in the baseline. Without them each run may have one row, and verl computes them
    from `rm_scores`, within the groups that `uid` names.

    Args:
        batch: Of `rows`.
        pad_token_id: The token at padding.
        temperature: verl's `rollout.temperature`, at which it computes its logprobs.

    Returns:
        int64 `prompts` [B, P], `responses`, `response_mask` [B, R], `input_ids`, `attention_mask`,
        `position_ids` [B, P + R]; float32 `rollout_log_probs`, `rm_scores` and, if there are
        advantages, `advantages`, `returns` [B, R]; int16 `routed_experts` [B, P + R, layers, top_k]
        if the engine gave them. Per row besides: `uid`, `run`, `__num_turns__`, and
        `min_global_steps`, `max_global_steps` where every version is known.

    Raises:
        ExportError: The batch is empty, a row has no prompt, no response or, without advantages, no
            reward, or a run has several rows without advantages.
        ImportError: verl is not installed.
    """
    import torch
    from verl import DataProto

    check_temperature(batch, temperature, "rollout")
    _check(batch)
    width = max(row.prompt_length for row in batch)
    response = max(row.response_length for row in batch)
    shape = (len(batch), width + response)
    ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    scores, advantages = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for number, row in enumerate(batch):
        start = width - row.prompt_length
        place = (number, slice(start, start + row.length))
        ids[place], attention[place], positions[place] = row.tokens, 1, np.arange(row.length)
        mask[place], logprobs[place] = row.mask, row.logprobs
        scores[number, start + row.length - 1] = row.reward or 0.0
        advantages[place] = row.mask * (row.advantage or 0.0)
    tensors: dict[str, AnyArray] = {
        "prompts": ids[:, :width],
        "responses": ids[:, width:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": positions,
        "response_mask": mask[:, width:],
        "rollout_log_probs": logprobs[:, width:],
        "rm_scores": scores[:, width:],
    }
    if batch[0].advantage is not None:
        tensors |= {"advantages": advantages[:, width:], "returns": advantages[:, width:].copy()}
    experts = _padded_experts(batch, shape, width)
    if experts is not None:
        tensors["routed_experts"] = experts
    return DataProto.from_dict(
        tensors={name: torch.from_numpy(each) for name, each in tensors.items()},
        non_tensors=_columns(batch),
        meta_info={"temperature": temperature},
    )


def agent_loop_outputs(batch: Batch, *, temperature: float = 1.0) -> dict[str, list[Any]]:
    """The `AgentLoopOutput`s of each run, by record key: what an agent loop's `run` returns.

    verl takes a run's advantage from its last output and gives it to all, so that each run counts
    once: outputs with something to train come last. A run without a reward is left to verl's own.

    Args:
        batch: Of `rows`; any number of rows per run.
        temperature: verl's `rollout.temperature`.

    Returns:
        The outputs of each run that has a row.

    Raises:
        ExportError: A row has no prompt or no response, or the temperatures differ.
        ImportError: verl is not installed.

    Example:
        >>> class Recorded(AgentLoopBase):
        ...     async def run(self, sampling_params, **row):
        ...         key = await play(row)  # the run's record key
        ...         async with records.drain(key=key) as drained:
        ...             batch = export.rows(drained.experiences)
        ...         return export.verl.agent_loop_outputs(batch)[key]
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    check_temperature(batch, temperature, "rollout")
    outputs: dict[str, list[Any]] = {}
    for key, found in batch.by_run.items():
        outputs[key] = []
        for row in sorted(found, key=lambda row: row.trained_tokens > 0):
            start = _with_response(trainable(row)).prompt_length
            outputs[key].append(
                AgentLoopOutput(
                    prompt_ids=row.tokens[:start].tolist(),
                    response_ids=row.tokens[start:].tolist(),
                    response_mask=row.mask[start:].astype(np.int64).tolist(),
                    response_logprobs=row.logprobs[start:].tolist(),
                    routed_experts=_experts(row, row.length - 1),
                    reward_score=row.reward,
                    num_turns=len(row.experience.turns),
                    metrics=AgentLoopMetrics(),
                    extra_fields={**_steps(row), "reward_extra_info": {}},
                )
            )
    return outputs


def _check(batch: Batch) -> None:
    if not len(batch):
        raise ExportError("the batch has no rows; a DataProto holds at least one")
    for row in batch:
        _with_response(trainable(row))
    if batch[0].advantage is not None:
        for row in batch:
            advantage_of(row)
        return
    several = [run for run, found in batch.by_run.items() if len(found) > 1]
    if several:
        raise ExportError(
            "verl counts rows in its baseline, and these runs have several trajectories: "
            f"{named(several)}; call export.group_advantages(batch) first and leave verl's "
            "compute_advantage out, or give verl's V1 trainer export.verl.agent_loop_outputs"
        )
    unrewarded = [row.run for row in batch if row.reward is None]
    if unrewarded:
        raise ExportError(
            f"without advantages verl would count these runs with the reward 0: {named(unrewarded)}"
        )


def _with_response(row: Row) -> Row:
    if not row.response_length:
        raise ExportError(f"{row.experience.eid} has no response; empty='drop' leaves it out")
    return row


def _columns(batch: Batch) -> dict[str, AnyArray]:
    columns: dict[str, AnyArray] = {
        "uid": np.array([row.group for row in batch], dtype=object),
        "run": np.array([row.run for row in batch], dtype=object),
        "__num_turns__": np.array([len(row.experience.turns) for row in batch], dtype=np.int32),
    }
    steps = [_steps(row) for row in batch]
    if all(steps):
        for name in steps[0]:
            columns[name] = np.array([each[name] for each in steps], dtype=np.int64)
    return columns


def _steps(row: Row) -> dict[str, int]:
    """With verl's names, the oldest and newest weights; nothing where one is not known."""
    known = row.versions[row.mask]
    if not len(known) or known.min() < 0:
        return {}
    return {"min_global_steps": int(known.min()), "max_global_steps": int(known.max())}


def _experts(row: Row, rows: int) -> AnyArray | None:
    found = row.routed(rows)
    if found is None:
        return None
    data, _ = found
    if data.max(initial=0) > _MOST_EXPERTS:
        raise ExportError(
            f"{row.experience.eid} names expert {data.max()}, verl's router replay holds int16"
        )
    return data.astype(np.int16)


def _padded_experts(batch: Batch, shape: tuple[int, int], width: int) -> AnyArray | None:
    """int16 [B, P + R, layers, top_k], zero at padding, at the last token and where not given."""
    parts = [_experts(row, row.length) for row in batch]
    kinds = {part.shape[1:] for part in parts if part is not None}
    if not kinds:
        return None
    if len(kinds) > 1 or None in {None if part is None else 0 for part in parts}:
        lacking = [
            row.experience.eid for row, part in zip(batch, parts, strict=True) if part is None
        ]
        raise ExportError(
            f"routed experts of different [layers, top_k]: {sorted(kinds)}; rows without any: "
            f"{named(lacking)}; replay needs those of every row"
        )
    experts = np.zeros((*shape, *kinds.pop()), dtype=np.int16)
    for number, (row, part) in enumerate(zip(batch, parts, strict=True)):
        start = width - row.prompt_length
        experts[number, start : start + row.length] = part
    return experts
