"""Tasks and statuses are small, plain data."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from recorder_core.errors import InvalidKeyError
from recorder_core.rollout import EngineAddress, Failure, Status, Task
from tests.core.rollout.workflows import Player

NAME = "tests.core.rollout.workflows:Player"


def test_a_tasks_api_key_is_its_record_key() -> None:
    task = Task(batch_id="0/train", task_id="7", run_id=3, workflow=NAME)
    assert task.api_key == "0/train/7/3"
    assert task.record_key.batch == "0/train"


def test_repeat_times_are_runs_with_keys_of_their_own() -> None:
    task = Task(task_id=7, workflow=NAME, repeat_times=3, run_id=4)
    assert [run.api_key for run in task.runs("12")] == ["12/7/4", "12/7/5", "12/7/6"]
    assert {run.repeat_times for run in task.runs("12")} == {1}


def test_a_workflow_is_given_by_class_or_by_name() -> None:
    task = Task(task_id="7", workflow=Player)
    assert task.workflow == NAME
    assert task.workflow_class is Player
    assert Task.model_validate_json(task.model_dump_json()) == task


def test_a_workflow_that_no_other_process_can_import_is_refused() -> None:
    class Local(Player):
        pass

    with pytest.raises(ValidationError, match="move it to the top level of a module"):
        Task(task_id="7", workflow=Local)


@pytest.mark.parametrize("fields", [{"task_id": "a/b"}, {"task_id": ""}, {"batch_id": "a//b"}])
def test_a_task_that_makes_no_record_key_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises((ValidationError, InvalidKeyError)):
        Task(**{"task_id": "7", "workflow": NAME, **fields})


@pytest.mark.parametrize("data", [float("nan"), float("inf"), "b\udc80d", {"deep": [float("nan")]}])
@pytest.mark.parametrize("field", ["raw_task", "workflow_args", "rollout_args"])
def test_data_that_would_arrive_changed_or_not_at_all_is_refused(field: str, data: Any) -> None:
    """JSON would make None of a NaN.

    W1.
    """
    with pytest.raises(ValidationError, match=field):
        Task(task_id="7", workflow=NAME, **{field: {"data": data}})


def test_an_agent_behind_the_engines_own_key_sends_both() -> None:
    task = Task(task_id="7", workflow=NAME)
    engine = EngineAddress(
        base_url="http://a:8000/v1/", model_name="m", engine_key="K", admin_key="A"
    )
    assert engine.agent_url == "http://a:8000/v1"
    assert engine.api_key(task) == "K:0/7/0"
    assert "'A'" not in repr(engine)
    assert "'K'" not in repr(engine)


def test_a_status_is_frozen_and_adds_up() -> None:
    runs = Task(task_id="7", workflow=NAME, repeat_times=3).runs("0")
    status = Status.of_all(
        [
            Status.success(runs[0], {"steps": 2.0}),
            Status.failure(runs[1], Failure.TIMEOUT, "not ended after 3 s"),
            Status.failure(runs[2], Failure.ERROR, "x" * 10_000),
        ]
    )
    assert (status.completed_runs, status.total_runs, status.ok) == (1, 3, False)
    assert status.successful_ids == ("0/7/0",)
    assert status.metrics == ({"steps": 2.0},)
    assert status.failures == {Failure.TIMEOUT: 1, Failure.ERROR: 1}
    assert status.message.startswith("0/7/1: not ended after 3 s\n0/7/2: xxx")
    assert Status.model_validate_json(status.model_dump_json()) == status
    with pytest.raises(ValidationError):
        status.completed_runs = 3


def test_a_status_stays_small_however_many_runs_fail() -> None:
    (run,) = Task(task_id="7", workflow=NAME).runs("0")
    failed = [Status.failure(run, Failure.ERROR, "x" * 10_000)] * 500
    status = Status.of_all(failed)
    assert status.failures == {Failure.ERROR: 500}
    assert status.message.endswith("… and 480 more")
    assert len(status.model_dump_json()) < 15_000
