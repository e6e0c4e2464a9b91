"""Runs in one process: at once, in time, and whatever they do, a status."""

from __future__ import annotations

from typing import Any

import pytest

from recorder_core import KeyPrefix, RecordKey, assemble
from recorder_core.rollout import Failure, Task, WorkflowRunner
from recorder_core.stores import AddOutcome
from recorder_core.stores.testing import root
from tests.core.rollout.engine import StandIn
from tests.core.rollout.workflows import (
    ByHand,
    Player,
    Reused,
    Together,
    TurnRewards,
    Unheard,
)

ALL = KeyPrefix()


def task(workflow: Any = Player, **raw: Any) -> Task:
    timeout_s = raw.pop("timeout_s", None)
    return Task(task_id="t", workflow=workflow, raw_task=raw, timeout_s=timeout_s)


async def run(replica: StandIn, *tasks: Task, **settings: Any) -> Any:
    async with WorkflowRunner(replica.engine, **settings) as runner:
        return await runner.run(tasks)


async def test_a_run_is_recorded_under_its_key_with_its_reward(replica: StandIn) -> None:
    status = await run(replica, task(turns=3, reward=0.5))
    assert status.ok
    assert status.successful_ids == ("0/t/0",)
    assert status.metrics[0]["length"] == 9
    (experience,) = assemble(replica.store.get(ALL))
    assert experience.eid.key == RecordKey("0", "t", 0)
    assert len(experience.turns) == 3
    assert experience.reward == 0.5


async def test_runs_go_on_at_once(replica: StandIn) -> None:
    replica.together = 40  # none is answered before all have asked
    tasks = Task(task_id="t", workflow=Player, repeat_times=40)
    status = await run(replica, tasks, max_concurrent=40)
    assert status.completed_runs == 40
    assert len(set(replica.asked)) == 40


async def test_runs_on_threads_go_on_at_once(replica: StandIn) -> None:
    Together.barrier.reset()
    tasks = Task(task_id="t", workflow=Together, repeat_times=40)
    status = await run(replica, tasks, max_concurrent=40)
    assert status.completed_runs == 40


async def test_no_more_runs_at_once_than_allowed(replica: StandIn) -> None:
    tasks = Task(task_id="t", workflow=Player, repeat_times=6, raw_task={"turns": 3})
    await run(replica, tasks, max_concurrent=1)
    assert replica.asked == [f"0/t/{n}" for n in range(6) for _ in range(3)]


@pytest.mark.parametrize("end", ["hang", "hang_on"])
async def test_a_run_that_hangs_ends_with_its_time(replica: StandIn, end: str) -> None:
    status = await run(replica, task(end=end, timeout_s=0.5))
    assert status.failures == {Failure.TIMEOUT: 1}
    assert status.message == "0/t/0: not ended after 0.5 s"
    assert replica.store.get(ALL) == []


async def test_a_thread_that_hangs_is_left_behind(replica: StandIn) -> None:
    status = await run(replica, task(ByHand, hang=True, timeout_s=0.5))
    assert status.failures == {Failure.TIMEOUT: 1}


async def test_what_a_workflow_raises_is_reported(replica: StandIn) -> None:
    status = await run(replica, task(end="fail"), Task(task_id="u", workflow=Player))
    assert (status.completed_runs, status.total_runs) == (1, 2)
    assert status.failures == {Failure.ERROR: 1}
    assert "0/t/0: ValueError: task t cannot be solved" in status.message
    assert "workflows.py" in status.message
    # Nothing of the failed run is left.
    assert {str(each.key) for each in replica.store.keys(ALL)} == {"0/u/0"}


async def test_a_workflow_that_cancels_itself_fails(replica: StandIn) -> None:
    status = await run(replica, task(end="cancel_itself"))
    assert status.failures == {Failure.ERROR: 1}


async def test_a_failed_run_is_tried_again_under_a_fresh_run(replica: StandIn) -> None:
    status = await run(replica, task(end="fail", times=2), max_retries=2)
    assert status.ok
    assert status.successful_ids == ("0/t/2",)
    (experience,) = assemble(replica.store.get(ALL))
    assert experience.eid.run == 2
    assert experience.info == {"attempt": 2}


async def test_what_a_failed_run_generates_late_is_refused(replica: StandIn) -> None:
    status = await run(replica, task(end="leave_late", times=1), max_retries=1)
    assert status.successful_ids == ("0/t/1",)
    replica.recorder.flush()
    assert {each.key.run for each in replica.store.get(ALL)} == {1}
    assert replica.store.add(root(key=RecordKey.parse("0/t/0"))) is AddOutcome.BLOCKED


async def test_a_run_that_recorded_nothing_fails(replica: StandIn) -> None:
    status = await run(replica, task(Unheard))
    assert status.failures == {Failure.NO_RECORDS: 1}
    assert "did the agent send 0/t/0 as its api_key" in status.message


async def test_an_engine_that_is_down_fails_the_run(replica: StandIn) -> None:
    replica.stop()
    try:
        status = await run(replica, task(Unheard), max_retries=3)
    finally:
        replica.start()
    assert status.failures == {Failure.ENGINE_DOWN: 1}


async def test_turns_are_rewarded_by_the_ids_of_the_replies(replica: StandIn) -> None:
    status = await run(replica, task(TurnRewards))
    assert status.ok
    (experience,) = assemble(replica.store.get(ALL))
    assert [turn.reward for turn in experience.turns] == [0.25, 0.75]
    assert experience.reward == 0.75
    status = await run(replica, task(TurnRewards, unknown=True))
    assert status.failures == {Failure.NO_RECORDS: 1}
    assert "['cmpl-of-somebody-else'] stand for no generation of 0/t/0" in status.message


async def test_a_reusable_workflow_is_reset_and_used_again(replica: StandIn) -> None:
    Reused.made = 0
    tasks = Task(task_id="t", workflow=Reused, repeat_times=4)
    status = await run(replica, tasks, max_concurrent=1)
    assert [each["runs"] for each in status.metrics] == [1, 2, 3, 4]
    assert Reused.made == 1
    assert {each.key.run for each in replica.store.get(ALL)} == {0, 1, 2, 3}


async def test_experiences_built_by_hand_replace_what_was_recorded(replica: StandIn) -> None:
    status = await run(replica, task(ByHand))
    assert status.ok
    assert status.metrics == ({"steps": 2.0},)
    assert replica.asked == ["0/t/0"]
    (experience,) = assemble(replica.store.get(ALL))
    assert experience.tokens.tolist() == [1, 2, 30, 31, 4, 32]
    assert experience.action_mask.tolist() == [True, True, False, True]
    assert experience.reward == 0.5


async def test_no_experiences_built_by_hand_are_a_failure(replica: StandIn) -> None:
    status = await run(replica, task(ByHand, empty=True))
    assert status.failures == {Failure.NO_RECORDS: 1}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("tests.core.rollout.workflows:Missing", "AttributeError"),
        ("no.such.module:Workflow", "ModuleNotFoundError"),
        ("tests.core.rollout.workflows:NOT_A_WORKFLOW", "must be a class"),
        ("recorder_core.rollout:Task", "is no WorkflowBase"),
        ("tests.core.rollout.workflows:Impostor", "it must for one, 0/t/0"),
    ],
)
async def test_a_workflow_that_cannot_be_used_fails_its_run(
    replica: StandIn, name: str, why: str
) -> None:
    status = await run(replica, task(name))
    assert status.failures == {Failure.ERROR: 1}
    assert why in status.message


async def test_two_runs_with_one_key_are_refused(replica: StandIn) -> None:
    with pytest.raises(ValueError, match="run 0/t/0 is given twice"):
        await run(replica, task(), task())
