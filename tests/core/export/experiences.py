"""Experiences with whatever a test is about."""

from __future__ import annotations

from typing import Any

from recorder_core import (
    EID,
    Experience,
    ExperienceTurn,
    FinishReason,
    Record,
    RecordKey,
    Sampling,
    VersionSpan,
)


def experience(
    prompt: list[int],
    response: list[int],
    *,
    task: str = "t",
    run: int = 0,
    suffix: str = "x",
    **fields: Any,
) -> Experience:
    """A trajectory with a logprob of -0.5 at each response token, and the reward 1."""
    given = {
        "logprobs": [-0.5] * len(response),
        "reward": 1.0,
        "finish_reason": FinishReason.STOP,
        "model_versions": [VersionSpan(0, len(response), "7")] if response else [],
    }
    return Experience(
        eid=EID(batch="b", task=task, run=run, suffix=suffix),
        tokens=prompt + response,
        prompt_length=len(prompt),
        **{**given, **fields},
    )


def turn(
    start: int,
    end: int,
    *flags: str,
    text: str | None = None,
    created_at: float = 0.0,
    **sampling: Any,
) -> ExperienceTurn:
    """One generation of a trajectory: response tokens `[start, end)`."""
    record = Record.of(
        id=f"r{start}",
        key=RecordKey("b", "t", 0),
        prompt_ids=[],
        response_ids=[0] * max(end - start, 1),
        logprobs=[-0.5] * max(end - start, 1),
        finish_reason=FinishReason.STOP,
        response_text=text,
        created_at=created_at,
        flags=flags,
        sampling=Sampling(**sampling),
    )
    return ExperienceTurn(start, end, record)
