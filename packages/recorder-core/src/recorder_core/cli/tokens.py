"""A trajectory as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recorder_core.experience import Experience


def token_rows(trajectory: Experience, begin: int, end: int) -> Iterator[Mapping[str, Any]]:
    """The tokens `[begin, end)` of a trajectory, a row each.

    A row has the token's place from 0, its id, the `part` of the trajectory (`prompt`, `sampled`,
    `between`), and of what was sampled the turn from 1, the logprob, whether it is trained, and the
    weights.
    """
    first, logprobs = trajectory.prompt_length, trajectory.logprobs
    turns = iter(enumerate(trajectory.turns, 1))
    spans = iter(trajectory.model_versions)
    number, turn = next(turns, (0, None))
    span = next(spans, None)
    for token in range(begin, end):
        at = token - first
        while turn is not None and turn.end <= at:
            number, turn = next(turns, (0, None))
        while span is not None and span.end <= at:
            span = next(spans, None)
        sampled = turn is not None and turn.start <= at
        mask = trajectory.action_mask
        yield {
            "token": token,
            "id": int(trajectory.tokens[token]),
            "part": "prompt" if at < 0 else "sampled" if sampled else "between",
            "turn": number if sampled else None,
            "logprob": float(logprobs[at]) if sampled and logprobs is not None else None,
            "trained": bool(mask[at]) if sampled and mask is not None else False,
            "weights": span.version if sampled and span and span.start <= at else None,
        }
