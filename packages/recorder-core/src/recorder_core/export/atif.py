"""Trajectories in the Agent Trajectory Interchange Format, ATIF v1.8.

Tested with the package atif 1.8. Ids are exact: a step's prompt and completion are what the engine
saw and sampled.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import numpy as np

from recorder_core.errors import ExportError
from recorder_core.experience import Experience, ExperienceTurn

SCHEMA_VERSION = "ATIF-v1.8"


def trajectory(
    experience: Experience, *, agent: str, agent_version: str, model_name: str | None = None
) -> Any:
    """An `atif.Trajectory`: a user step with the first prompt, then an agent step per generation.

    Which tokens are to be trained, the weights' versions and why a generation ended have no field
    of their own in ATIF: they are in each step's `metrics.extra`, as `mask`, `versions` and
    `finish_reason`; the reward is in `final_metrics.extra`. A generation that is trained in another
    trajectory is marked `is_copied_context`.

    Args:
        experience: A recorded one, with its turns.
        agent: The agent's name.
        agent_version: The agent's version.
        model_name: The model's name.

    Returns:
        The trajectory; its `session_id` is the record key. A step whose logprobs are not all known
        has none, as ATIF has no word for a missing one.

    Raises:
        ExportError: The experience has no turns.
        ImportError: atif is not installed.
    """
    import atif

    return atif.Trajectory(
        **document(experience, agent=agent, agent_version=agent_version, model_name=model_name)
    )


def document(
    experience: Experience, *, agent: str, agent_version: str, model_name: str | None = None
) -> dict[str, Any]:
    """The same as plain data."""
    if not experience.turns:
        raise ExportError(f"{experience.eid} has no turns; ATIF has a step for each generation")
    steps: list[dict[str, Any]] = [
        {"step_id": 1, "source": "user", "message": experience.prompt_text or ""}
    ]
    for turn in experience.turns:
        text = turn.response_text
        if text is None and len(experience.turns) == 1:
            text = experience.response_text
        steps.append(
            {
                "step_id": len(steps) + 1,
                "source": "agent",
                "timestamp": _timestamp(turn.created_at),
                "model_name": model_name,
                "message": text or "",
                "metrics": turn_metrics(experience, turn),
                "llm_call_count": 1,
                "is_copied_context": None if is_trained(experience, turn) else True,
            }
        )
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": experience.eid.key.text,
        "trajectory_id": str(experience.eid),
        "agent": {
            "name": agent,
            "version": agent_version,
            "model_name": model_name,
            "tool_definitions": experience.tools,
        },
        "steps": steps,
        "final_metrics": {
            "total_completion_tokens": sum(turn.end - turn.start for turn in experience.turns),
            "total_steps": len(steps),
            "extra": {"reward": experience.reward},
        },
    }


def is_trained(experience: Experience, turn: ExperienceTurn) -> bool:
    """Whether a token of the turn is to be trained in this trajectory, not only in another one."""
    mask = experience.action_mask
    return mask is None or bool(mask[turn.start : turn.end].any())


def turn_metrics(experience: Experience, turn: ExperienceTurn) -> dict[str, Any]:
    """A turn's exact ids, its logprobs if all are known, and what has no field of its own."""
    start = experience.prompt_length
    place = slice(turn.start, turn.end)
    logprobs = None if experience.logprobs is None else experience.logprobs[place]
    mask = experience.action_mask
    versions = [
        [
            max(span.start, turn.start) - turn.start,
            min(span.end, turn.end) - turn.start,
            span.version,
        ]
        for span in experience.model_versions
        if span.start < turn.end and span.end > turn.start
    ]
    return {
        "prompt_tokens": start + turn.start,
        "completion_tokens": turn.end - turn.start,
        "cached_tokens": turn.cached_tokens,
        "prompt_token_ids": experience.tokens[: start + turn.start].tolist(),
        "completion_token_ids": experience.tokens[start + turn.start : start + turn.end].tolist(),
        "logprobs": (
            logprobs.tolist() if logprobs is not None and np.isfinite(logprobs).all() else None
        ),
        "extra": {
            "mask": [True] * (turn.end - turn.start) if mask is None else mask[place].tolist(),
            "versions": versions,
            "finish_reason": turn.finish_reason.value,
        },
    }


def _timestamp(seconds: float) -> str | None:
    if not seconds:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()
