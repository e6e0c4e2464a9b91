"""Recorded runs in Harbor's own models, and in the eyes of its validator."""

from __future__ import annotations

import math
from pathlib import Path

import harbor
import pytest
from harbor.models.agent.context import AgentContext
from harbor.models.agent.rollout_detail import RolloutDetail
from harbor.models.trajectories import Metrics, Trajectory
from harbor.utils.trajectory_validator import TrajectoryValidator

from recorder_core import Experience, FinishReason, Record, RecordKey, Run, VersionSpan, assemble
from recorder_core.export import ExportError
from recorder_core.export.harbor import agent_context, rollout_details, trajectory
from tests.core.export.experiences import experience, turn

TESTED = "0.26"
"""The version of Harbor that these tests were written for."""
KEY = RecordKey("b", "t", 0)


def record(
    name: str,
    prompt: list[int],
    response: list[int],
    finished_at: float,
    *,
    parent: str | None = None,
    start: int = 0,
) -> Record:
    return Record.of(
        id=name,
        key=KEY,
        parent=parent,
        start=start,
        prompt_ids=prompt,
        response_ids=response,
        logprobs=[-0.25] * len(response),
        versions=[VersionSpan(0, len(response), "7")],
        finish_reason=FinishReason.STOP,
        response_text=name,
        finished_at=finished_at,
    )


@pytest.fixture
def branched() -> list[Experience]:
    """A run in which two turns continue one: its trajectories share that one's tokens."""
    first = record("first", [1, 2], [3, 4], 1)
    second = record("second", [5], [6], 2, parent="first", start=4)
    other = record("other", [7, 8], [9], 3, parent="first", start=4)
    return assemble([Run(KEY, (first, second, other), reward=1.0)])


def test_a_run_is_one_trajectory_that_harbors_validator_takes(
    branched: list[Experience], tmp_path: Path
) -> None:
    made = trajectory(branched, agent="solver", agent_version="1", model_name="tiny")

    path = tmp_path / "trajectory.json"
    path.write_text(made.model_dump_json(exclude_none=True))
    validator = TrajectoryValidator()
    assert validator.validate(path), validator.get_errors()
    assert Trajectory.model_validate_json(path.read_text()) == made
    assert made.session_id == "b/t/0"
    assert [step.message for step in made.steps[1:]] == ["first", "second"]
    assert made.steps[2].metrics.prompt_token_ids == [1, 2, 3, 4, 5]
    assert made.steps[2].metrics.completion_token_ids == [6]
    (branch,) = made.subagent_trajectories
    assert [step.message for step in branch.steps[1:]] == ["first", "other"]
    assert [step.is_copied_context for step in branch.steps[1:]] == [True, None]
    assert made.final_metrics.extra == {"reward": 1.0}


def test_each_turn_is_in_the_details_once(branched: list[Experience]) -> None:
    main, branch = AgentContext(rollout_details=rollout_details(branched)).rollout_details

    assert main == {
        "prompt_token_ids": [[1, 2], [1, 2, 3, 4, 5]],
        "completion_token_ids": [[3, 4], [6]],
        "logprobs": [[-0.25, -0.25], [-0.25]],
        "extra": {
            "mask": [[True, True], [True]],
            "versions": [[[0, 2, "7"]], [[0, 1, "7"]]],
            "finish_reason": ["stop", "stop"],
        },
    }
    assert branch["prompt_token_ids"] == [[1, 2, 3, 4, 7, 8]]
    assert branch["completion_token_ids"] == [[9]]


def test_the_context_counts_each_generation_once(branched: list[Experience]) -> None:
    context = agent_context(branched)

    assert context.n_input_tokens == 2 + 5 + 6
    assert context.n_output_tokens == 2 + 1 + 1
    assert len(context.rollout_details) == 2
    assert AgentContext.model_validate_json(context.model_dump_json()) == context


def test_a_detail_with_a_missing_logprob_has_none() -> None:
    made = experience(
        [1], [2, 3, 4], logprobs=[-0.5, math.nan, math.nan], turns=[turn(0, 1), turn(2, 3)]
    )

    (detail,) = rollout_details([made])

    assert "logprobs" not in detail
    assert detail["completion_token_ids"] == [[2], [4]]


def test_what_is_no_run_is_refused() -> None:
    one, other = (experience([1], [2], run=run, turns=[turn(0, 1)]) for run in range(2))

    with pytest.raises(ExportError, match=r"these are of 2: \['b/t/0', 'b/t/1'\]"):
        rollout_details([one, other])
    with pytest.raises(ExportError, match="these are of 0"):
        trajectory([], agent="solver", agent_version="1")
    with pytest.raises(ExportError, match="has no turns"):
        rollout_details([experience([1], [2])])


def test_harbor_still_has_what_is_relied_on() -> None:
    moved = f"Harbor {harbor.__version__} differs from {TESTED}, with which this was tested"
    assert set(RolloutDetail.__annotations__) == {
        *["prompt_token_ids", "completion_token_ids", "logprobs", "extra"]
    }, moved
    assert {"prompt_token_ids", "completion_token_ids", "logprobs"} <= set(Metrics.model_fields), (
        moved
    )
