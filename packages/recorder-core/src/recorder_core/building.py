"""From a finished turn to its record: what the recorder's thread does with the engine's values."""

from __future__ import annotations

from typing import Any

import numpy as np

from recorder_core.arrays import AnyArray, expert_ids
from recorder_core.paths import Placement
from recorder_core.records import (
    BIASED,
    CONSTRAINED,
    FORCED_TOKENS,
    LOGPROBS_IMPLAUSIBLE,
    FinishReason,
    Record,
    RoutedExperts,
    Turn,
    VersionSpan,
    made,
    new_id,
    whole_span,
)
from recorder_core.sampling_mask import SamplingMask

_NARROWED = frozenset({BIASED, CONSTRAINED, FORCED_TOKENS})
"""Under each of them a token may be the only one that is let through."""
_LOWEST = -9_000.0
"""Engines write -9999 where they have no logprob."""


def read_logprobs(turn: Turn, count: int) -> tuple[AnyArray | None, tuple[str, ...]]:
    """A turn's logprobs, float32 [count] or None, and its flags."""
    flags = made(turn.flags)
    values = made(turn.logprobs)
    if values is None:
        return None, (*flags, "logprobs_missing")
    logprobs = np.asarray(values, dtype=np.float32)
    if len(logprobs) != count:
        # Which value belongs to which token is not known any more: none is kept.
        return None, (*flags, "logprobs_length_mismatch")
    if not _are_plausible(logprobs, turn, flags):
        return logprobs, (*flags, LOGPROBS_IMPLAUSIBLE)
    return logprobs, flags


def _are_plausible(logprobs: AnyArray, turn: Turn, flags: tuple[str, ...]) -> bool:
    # They pass over NaN, and 0 is neither too high nor too low.
    if np.fmax.reduce(logprobs, initial=0) > 1e-3 or np.fmin.reduce(logprobs, initial=0) < _LOWEST:
        return False
    if len(logprobs) < 2 or logprobs.any() or not _NARROWED.isdisjoint(flags):
        return True
    # All zero: each token was certain. So it is where only one is let through.
    sampling = made(turn.sampling)
    certain = sampling.truncated and sampling.logprobs_mode == "processed_logprobs"
    return certain or sampling.temperature is None or sampling.temperature == 0


def read_routed_experts(turn: Turn) -> RoutedExperts | None:
    """A turn's routed experts, over its whole sequence."""
    routed = made(turn.routed_experts)
    if routed is None or isinstance(routed, RoutedExperts):
        return routed
    return RoutedExperts(data=expert_ids(routed))


def read_sampling_mask(turn: Turn, count: int) -> tuple[SamplingMask | None, tuple[str, ...]]:
    """A turn's sampling mask, over its `count` response tokens, and a flag where it has others."""
    mask = made(turn.sampling_mask)
    if mask is not None and len(mask.counts) != count:
        # As with logprobs: which ids belong to which token is not known any more.
        return None, ("sampling_mask_length_mismatch",)
    return mask, ()


def build(
    turn: Turn,
    prompt_ids: AnyArray,
    response_ids: AnyArray,
    logprobs: AnyArray | None,
    flags: tuple[str, ...],
    routed: RoutedExperts | None,
    mask: SamplingMask | None,
    placement: Placement,
) -> Record:
    """The record of a turn, at its place; it owns its memory.

    Raises:
        ValueError: Lengths disagree.
    """
    start = placement.start
    exchange = turn.exchange
    return Record(
        id=turn.id or new_id(),
        key=turn.key,
        data=Record.pack(
            prompt_ids[start:],
            response_ids,
            logprobs,
            None if start else turn.prompt_text,
            turn.response_text,
            printable(turn.request_id),
        ),
        finish_reason=FinishReason(turn.finish_reason),
        parent=placement.parent,
        base=placement.base,
        start=start,
        versions=_versions(turn, len(response_ids)),
        stop_reason=printable(turn.stop_reason),
        routed_experts=routed.after(placement.routed_rows) if routed else None,
        sampling_mask=mask,
        sampling=made(turn.sampling),
        adapter=turn.adapter,
        model=printable(exchange.model) if exchange else None,
        delivered=exchange.delivered if exchange else None,
        multi_modal=turn.multi_modal,
        sample_index=turn.sample_index,
        attempt=turn.attempt,
        cached_tokens=turn.cached_tokens,
        created_at=turn.created_at,
        finished_at=turn.finished_at,
        flags=flags,
    )


def _versions(turn: Turn, count: int) -> tuple[VersionSpan, ...]:
    spans = turn.versions
    if not spans:
        return ()  # the very one that an encoder takes for the default
    if len(spans) == 1 and spans[0][:2] == (0, count):
        return whole_span(count, spans[0][2])
    return tuple(VersionSpan(*span) for span in spans)


def printable(value: Any) -> Any:
    """A text as any codec can write it: clients may send lone surrogates."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode(errors="backslashreplace").decode()
