"""Faults on the wire between scheduler and runner: one bad run costs one run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from recorder_core.rollout import Collected, Failure, Task
from recorder_core.rollout.messages import printable
from tests.core.rollout import hostile
from tests.core.rollout.conftest import Schedulers
from tests.core.rollout.engine import StandIn
from tests.core.rollout.pools import ON_RAY
from tests.core.rollout.workflows import Player

FINE = 6
ON_THE_WIRE = pytest.mark.skipif(ON_RAY, reason="Ray has a wire of its own")


def ok(number: int, key: str, metric: str = "1.0") -> str:
    return (
        f'{{"number": {number}, "status": {{"completed_runs": 1, "total_runs": 1, '
        f'"metrics": [{{"x": {metric}}}], "successful_ids": ["{key}"]}}}}\n'
    )


def bad(workflow: Any, name: str = "bad", **raw: Any) -> Task:
    return Task(task_id=name, workflow=workflow, raw_task=raw)


async def beside_others(scheduling: Schedulers, replica: StandIn, *tasks: Task) -> Collected:
    """Bad runs among fine ones that live in the same process all the while; no second tries."""
    scheduler = await scheduling(replica, max_retries=0, max_losses=0)
    fine = Task(task_id="fine", workflow=Player, repeat_times=FINE, raw_task={"held": True})
    replica.release = False
    scheduler.submit([fine], 0)
    while len(replica.asked) < FINE:
        await asyncio.sleep(0.01)
    scheduler.submit(tasks, 0)
    lives = scheduler._batches["0"].lives
    while any(task.task_id != "fine" for task in lives.values()):
        await asyncio.sleep(0.01)
    replica.release = True
    return await scheduler.collect(0)


def fine_keys(collected: Collected) -> list[str]:
    return [run.task.api_key for run in collected.runs if run.task.task_id == "fine"]


@ON_THE_WIRE
@pytest.mark.parametrize(
    ("line", "times", "lost"),
    [
        pytest.param("not a reply\n", 1, 0, id="garbage"),
        pytest.param("\xff\xfe\x00\n", 1, 0, id="no-text"),
        pytest.param("[" * 100_000 + "\n", 1, 0, id="deep"),
        pytest.param('{"numb', 1, 0, id="half-a-line"),
        pytest.param("x", 20_000_000, 0, id="a-line-without-end"),
        pytest.param("not a reply\n", 100_000, 0, id="much-garbage"),
        pytest.param('{"number": -1, "status": null}\n', 1, 0, id="ready-again"),
        pytest.param(ok(4711, "0/fine/0"), 1, 0, id="of-no-run"),
        pytest.param('{"number": 0, "status": {"completed_ru', 1, 1, id="half-of-anothers"),
        pytest.param('{"number": 0, "status": null}\n', 1, 1, id="no-status"),
        pytest.param('{"number": 0, "status": "well"}\n', 1, 1, id="wrong-shape"),
        pytest.param(ok(0, "0/fine/0", "NaN"), 1, 1, id="nan"),
        pytest.param(ok(0, "0/fine/0", "Infinity"), 1, 1, id="infinity"),
        pytest.param(ok(0, "0/fine/0", "null"), 1, 1, id="null"),
        pytest.param(ok(0, "0/bad/0"), 1, 1, id="another-run"),
        pytest.param(ok(0, "\\udc80"), 1, 1, id="surrogate"),
    ],
)
async def test_one_bad_reply_costs_one_run(
    scheduling: Schedulers, replica: StandIn, line: str, times: int, lost: int
) -> None:
    """The run that a bad reply names fails, and no other.

    W1.
    """
    collected = await beside_others(
        scheduling, replica, bad(hostile.Vandal, line=line, times=times)
    )
    assert collected.status.failures == ({Failure.ERROR: lost} if lost else {})
    assert collected.status.completed_runs == FINE + 1 - lost
    if lost:
        assert "reply" in collected.status.message
        assert "0/fine/0" not in fine_keys(collected)


async def test_metrics_that_cannot_be_sent_fail_their_run(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """The message says which metric and which value.

    W1.
    """
    runs = [bad(hostile.Measured, name, metrics=name) for name in hostile.METRICS]
    collected = await beside_others(scheduling, replica, *runs)
    assert collected.status.failures == {Failure.ERROR: len(runs)}
    assert len(fine_keys(collected)) == FINE
    for why in (
        "metric 'accuracy' is nan; metrics are finite numbers",
        "metric 'accuracy' is inf; metrics are finite numbers",
        r"the name of metric 'accuracy\udc80' is no Unicode text",
        "bytes as JSON, of at most 1048576; give fewer metrics",
    ):
        assert why in collected.status.message
    assert collected.status.message.count("metrics.0.accuracy") == 2  # "huge" and "none"


@ON_THE_WIRE
@pytest.mark.parametrize(
    ("harm", "why"),
    [("flood", "none could be read as a reply"), ("close_the_pipe", "ended with")],
)
async def test_a_runner_whose_stream_is_beyond_repair_is_ended(
    scheduling: Schedulers, replica: StandIn, harm: str, why: str
) -> None:
    """Its runs are lost, at once, and the next ones have a new process.

    W1.
    """
    scheduler = await scheduling(replica, max_losses=0)
    scheduler.submit([Task(task_id="bad", workflow=hostile.Vandal, raw_task={"harm": harm})], 0)
    collected = await scheduler.collect(0)
    assert collected.status.failures == {Failure.RUNNER_LOST: 1}
    assert why in collected.status.message
    scheduler.submit([Task(task_id="t", workflow=Player)], 1)
    assert (await scheduler.collect(1)).status.ok


async def test_whatever_a_workflow_raises_is_replied(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """Be it unprintable, without end, or what would end a program; also on a thread.

    W2.
    """
    runs = [
        bad(workflow, f"{workflow.__name__}-{name}", error=name)
        for workflow in (hostile.Raises, hostile.RaisesOnAThread)
        for name in hostile.ERRORS
    ]
    collected = await beside_others(scheduling, replica, *runs)
    assert collected.status.failures == {Failure.ERROR: len(runs)}
    assert len(fine_keys(collected)) == FINE
    message = collected.status.message
    assert message.encode() == printable(message, len(message)).encode()
    assert len(message) < 20 * 600
    assert r"no such file: b\udc80d" in message


async def test_a_status_that_does_not_hold_together_fails_its_run(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """Also one that was made without checks.

    W2.
    """
    runs = [bad(hostile.Claims, name, status=name) for name in hostile.STATUSES]
    collected = await beside_others(scheduling, replica, *runs)
    assert collected.status.failures == {Failure.ERROR: len(runs)}
    assert len(fine_keys(collected)) == FINE
    assert len(collected.status.message.encode()) < 25_000


@ON_THE_WIRE
@pytest.mark.parametrize("harm", ["exit_in_a_task", "stop_the_loop"])
async def test_a_workflow_does_not_end_the_process_by_its_event_loop(
    scheduling: Schedulers, replica: StandIn, harm: str
) -> None:
    """The others live on.

    W2.
    """
    collected = await beside_others(scheduling, replica, bad(hostile.Vandal, harm=harm))
    assert len(fine_keys(collected)) == FINE
    exits = harm == "exit_in_a_task"
    assert collected.status.failures == ({Failure.ERROR: 1} if exits else {})


@ON_THE_WIRE
async def test_runs_that_are_cancelled_by_another_are_replied(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """A workflow that cancels every task of its event loop leaves no run unanswered.

    W2.
    """
    harm = "cancel_everybody"
    collected = await beside_others(scheduling, replica, bad(hostile.Vandal, harm=harm))
    assert collected.status.failures == {Failure.ERROR: FINE + 1}
    assert "cancelled from within its runner" in collected.status.message


async def test_a_task_that_a_runner_cannot_read_fails_alone(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """JSON has no limit of depth, its readers do.

    W1.
    """
    nested: Any = {}
    for _ in range(220):
        nested = {"deeper": nested}
    collected = await beside_others(scheduling, replica, bad(Player, nested=nested))
    assert collected.status.failures == {Failure.ERROR: 1}
    assert "recursion limit" in collected.status.message
    assert len(fine_keys(collected)) == FINE
