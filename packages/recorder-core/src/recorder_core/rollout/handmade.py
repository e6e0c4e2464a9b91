"""Experiences that a workflow built by hand, as records: both kinds end the same way."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable

import numpy as np

from recorder_core.arrays import BoolArray, Float32Array
from recorder_core.experience import Experience
from recorder_core.keys import RecordKey
from recorder_core.records import FinishReason, Record, RoutedExperts, VersionSpan
from recorder_core.sampling_mask import SamplingMask


def records_of(experiences: Iterable[Experience], key: RecordKey) -> list[Record]:
    """The records from which `assemble` makes these experiences again, under `key`.

    Each stretch of sampled tokens becomes a record that continues the one before; tokens after the
    last sampled one train nothing and are left out. Experiences whose tokens continue one another
    come back as one trajectory. Advantages, returns and teacher logprobs belong after the drain.

    Raises:
        ValueError: An experience has no sampled token, or a field that no record can hold.
    """
    return [
        record
        for order, experience in enumerate(experiences)
        for record in _chain(experience, key, order)
    ]


def _chain(experience: Experience, key: RecordKey, order: int) -> list[Record]:
    for name in ("advantages", "returns", "teacher_logprobs"):
        if getattr(experience, name) is not None:
            raise ValueError(f"experience {experience.eid} has {name}; set them after the drain")
    count = experience.response_length
    mask = experience.action_mask
    mask = np.ones(count, dtype=np.bool_) if mask is None else mask
    stretches = _stretches(mask)
    if not stretches:
        raise ValueError(f"experience {experience.eid} has no sampled token: its mask is all False")
    ids = [secrets.token_hex(16) for _ in stretches]
    records = []
    reached = 0
    for n, (start, end) in enumerate(stretches):
        last = n == len(stretches) - 1
        path = experience.prompt_length + end
        records.append(
            Record.of(
                id=ids[n],
                key=key,
                parent=ids[n - 1] if n else None,
                start=reached,
                prompt_ids=experience.tokens[reached : experience.prompt_length + start],
                response_ids=experience.tokens[experience.prompt_length + start : path],
                logprobs=_cut(experience.logprobs, start, end),
                token_level_reward=_cut(experience.token_level_reward, start, end),
                versions=_spans(experience.model_versions, start, end),
                finish_reason=(experience.finish_reason if last else None) or FinishReason.STOP,
                prompt_text=None if n else experience.prompt_text,
                response_text=experience.response_text if len(stretches) == 1 else None,
                routed_experts=_rows(experience.routed_experts, path - 1) if last else None,
                sampling_mask=_cut_mask(experience.sampling_mask, start, end),
                sampling=experience.sampling,
                adapter=experience.adapter,
                multi_modal=experience.multi_modal_inputs,
                # Of tokens that several experiences share, the first listed is trained.
                created_at=order,
                finished_at=order + (n + 1) / (len(stretches) + 1),
                reward=experience.reward,
                info=experience.info,
            )
        )
        reached = path
    return records


def _stretches(mask: BoolArray) -> list[tuple[int, int]]:
    """Where the mask is True, as `[start, end)`."""
    position, found = 0, []
    for sampled, group in itertools.groupby(mask.tolist()):
        end = position + len(list(group))
        if sampled:
            found.append((position, end))
        position = end
    return found


def _cut(values: Float32Array | None, start: int, end: int) -> Float32Array | None:
    return None if values is None else values[start:end]


def _cut_mask(mask: SamplingMask | None, start: int, end: int) -> SamplingMask | None:
    return None if mask is None else mask.cut(start, end)


def _spans(spans: tuple[VersionSpan, ...], start: int, end: int) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(max(a, start) - start, min(b, end) - start, version)
        for a, b, version in spans
        if a < end and b > start
    )


def _rows(routed: RoutedExperts | None, end: int) -> RoutedExperts | None:
    """The rows before `end` of the whole sequence."""
    if routed is None or routed.end <= end:
        return routed
    valid = routed.valid and tuple((a, min(b, end)) for a, b in routed.valid if a < end)
    return RoutedExperts(data=routed.data[: end - routed.start], start=routed.start, valid=valid)
