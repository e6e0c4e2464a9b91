"""ATIF trajectories hold the exact ids and survive their own JSON."""

from __future__ import annotations

import math

import pytest

from recorder_core import VersionSpan
from recorder_core.export import ExportError
from recorder_core.export.atif import SCHEMA_VERSION, trajectory
from tests.core.export.experiences import experience, turn

atif = pytest.importorskip("atif")

TWO_TURNS = experience(
    [1, 2],
    [3, 4, 5, 6, 7],
    logprobs=[-0.25, -0.5, math.nan, -1.0, math.nan],
    action_mask=[True, True, False, False, True],
    model_versions=[VersionSpan(0, 1, "7"), VersionSpan(1, 5, "8")],
    turns=[
        turn(0, 2, text="four", created_at=60.0),
        turn(3, 5),
    ],
    prompt_text="two?",
    tools=[{"type": "function"}],
    reward=0.5,
)


def test_each_generation_is_a_step_with_its_exact_ids() -> None:
    made = trajectory(TWO_TURNS, agent="solver", agent_version="1", model_name="tiny")

    user, first, second = made.steps
    assert (user.source, user.message) == ("user", "two?")
    assert (first.source, first.message) == ("agent", "four")
    assert first.timestamp == "1970-01-01T00:01:00+00:00"
    assert first.metrics.prompt_token_ids == [1, 2]
    assert first.metrics.completion_token_ids == [3, 4]
    assert first.metrics.logprobs == [-0.25, -0.5]
    assert first.metrics.extra["versions"] == [[0, 1, "7"], [1, 2, "8"]]
    assert second.metrics.prompt_token_ids == [1, 2, 3, 4, 5]
    assert second.metrics.completion_token_ids == [6, 7]
    assert second.metrics.logprobs is None
    assert second.metrics.extra["mask"] == [False, True]
    assert second.metrics.extra["versions"] == [[0, 2, "8"]]
    assert made.session_id == "b/t/0"
    assert made.final_metrics.extra == {"reward": 0.5}


def test_a_trajectory_survives_its_own_json() -> None:
    made = trajectory(TWO_TURNS, agent="solver", agent_version="1")

    assert atif.Trajectory.model_validate_json(made.model_dump_json()) == made


def test_without_turns_there_is_nothing_to_tell() -> None:
    with pytest.raises(ExportError, match="has no turns"):
        trajectory(experience([1], [2]), agent="solver", agent_version="1")


def test_atif_still_has_what_is_relied_on() -> None:
    known = set(atif.Metrics.model_fields)
    wanted = {"prompt_token_ids", "completion_token_ids", "logprobs", "extra", "cached_tokens"}
    assert wanted <= known, f"atif differs from 1.8, with which {SCHEMA_VERSION} was tested"
