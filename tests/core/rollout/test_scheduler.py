"""Batches over runners and replicas: what fails is tried again, and nothing mixes or is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from recorder_core import KeyPrefix, RecordKey
from recorder_core.errors import (
    BatchAbandonedError,
    InvalidKeyError,
    NotAuthorizedError,
    ServerFaultError,
)
from recorder_core.rollout import (
    Collected,
    CollectedRun,
    EngineAddress,
    Failure,
    Scheduler,
    Status,
    Task,
)
from recorder_core.stores import AddOutcome
from recorder_core.stores.testing import root
from tests.core.rollout.conftest import Schedulers
from tests.core.rollout.engine import ADMIN_KEY, StandIn
from tests.core.rollout.pools import pool_of
from tests.core.rollout.workflows import ByHand, Player, TurnRewards, Unheard

ALL = KeyPrefix()


def task(name: str, repeat_times: int = 1, workflow: Any = Player, **raw: Any) -> Task:
    timeout_s = raw.pop("timeout_s", None)
    return Task(
        task_id=name,
        workflow=workflow,
        raw_task=raw,
        repeat_times=repeat_times,
        timeout_s=timeout_s,
    )


def keys(collected: Collected) -> list[str]:
    return [run.task.api_key for run in collected.runs]


def assert_adds_up(collected: Collected) -> None:
    status = collected.status
    assert status.completed_runs + sum(status.failures.values()) == status.total_runs
    assert status.successful_ids == tuple(keys(collected))
    for run in collected.runs:
        assert {each.eid.key for each in run.experiences} == {run.task.record_key}


class Events:
    """A listener: what has happened, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.all: list[tuple[Any, ...]] = []

    def submitted(self, batch_id: str, runs: int) -> None:
        self.all.append(("submitted", batch_id, runs))

    def succeeded(self, run: CollectedRun) -> None:
        self.done.append(run.task.api_key)
        self.all.append(("succeeded", run.task.api_key))

    def failed(self, task: Task, status: Status, *, retried: bool) -> None:
        self.all.append(("failed", task.api_key, retried))

    def closed(self, batch_id: str) -> None:
        self.all.append(("closed", batch_id))


class Broken(Events):
    """A listener with a fault."""

    def succeeded(self, run: CollectedRun) -> None:
        raise RuntimeError("a view has a fault")


async def test_listeners_are_told_what_happens(scheduling: Schedulers, replica: StandIn) -> None:
    events = Events()
    scheduler = await scheduling(replica, max_retries=1, listeners=[Broken(), events])
    scheduler.submit([task("t", end="fail")], 0)
    await scheduler.collect(0)
    scheduler.submit([task("t", end="fail", times=1)], 1)
    assert (await scheduler.collect(1)).status.ok
    assert events.all == [
        ("submitted", "0", 1),
        ("failed", "0/t/0", True),
        ("failed", "0/t/1", False),
        ("closed", "0"),
        ("submitted", "1", 1),
        ("failed", "1/t/0", True),
        ("succeeded", "1/t/1"),
        ("closed", "1"),
    ]


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_a_batch_gives_every_run_once_with_its_reward(
    scheduling: Schedulers, replicas: list[StandIn]
) -> None:
    scheduler = await scheduling(*replicas, runners=2)
    tasks = [task(f"t{n}", 3, turns=2, reward=float(n)) for n in range(6)]
    assert scheduler.submit(tasks, 0) == 18
    collected = await scheduler.collect(0)
    assert_adds_up(collected)
    assert keys(collected) == [f"0/t{n}/{run}" for n in range(6) for run in range(3)]
    assert [run.reward for run in collected.runs] == [float(n) for n in range(6) for _ in range(3)]
    assert all(run.tokens == 2 for run in collected.runs)
    assert (collected.status.ok, collected.retries) == (True, 0)
    # Spread over the replicas, each run on one; and over the runners.
    places = [Counter(key for key in replica.asked) for replica in replicas]
    assert [len(place) for place in places] == [9, 9]
    assert not places[0].keys() & places[1].keys()
    assert len({run.metrics["pid"] for run in collected.runs}) == 2
    # Acknowledged run by run; late generations are refused once the batch is.
    for replica in replicas:
        assert replica.store.stats().counters["acknowledged"] == 18
    assert await scheduler.acknowledge(0) == []
    for replica in replicas:
        assert replica.store.stats().bytes == 0
        assert replica.store.add(root(key=RecordKey("0", "t0", 9))) is AddOutcome.BLOCKED


async def test_several_batches_are_in_flight(scheduling: Schedulers, replica: StandIn) -> None:
    scheduler = await scheduling(replica)
    for batch in range(3):
        scheduler.submit([task("t", 2, reward=float(batch))], batch)
    for batch in (2, 0, 1):
        collected = await scheduler.collect(batch)
        assert keys(collected) == [f"{batch}/t/0", f"{batch}/t/1"]
        assert {run.reward for run in collected.runs} == {float(batch)}
        await scheduler.acknowledge(batch)
    assert replica.store.stats().records == 0


async def test_every_kind_of_failure_has_its_outcome(
    scheduling: Schedulers, replica: StandIn
) -> None:
    scheduler = await scheduling(replica, max_retries=1)
    tasks = [
        task("fails", end="fail"),
        task("hangs", end="hang", timeout_s=0.5),
        task("silent", workflow=Unheard),
        task("missing", workflow="tests.core.rollout.workflows:Missing"),
        task("shouts", end="shout"),
        task("by-hand", workflow=ByHand),
        task("by-turn", workflow=TurnRewards),
        task("fine"),
    ]
    scheduler.submit(tasks, "b")
    collected = await scheduler.collect("b")
    assert_adds_up(collected)
    assert keys(collected) == ["b/by-hand/0", "b/by-turn/0", "b/fine/0", "b/shouts/0"]
    failures = {Failure.ERROR: 2, Failure.TIMEOUT: 1, Failure.NO_RECORDS: 1}
    assert collected.status.failures == failures
    assert collected.retries == 4
    assert "b/fails/1: ValueError: task fails cannot be solved" in collected.status.message
    # Of the failed ones nothing is left, and nothing more is taken.
    assert replica.store.get(ALL) == []
    assert replica.store.add(root(key=RecordKey("b", "fails", 0))) is AddOutcome.BLOCKED


async def test_a_retry_has_a_key_of_its_own_and_nothing_of_the_failed_run(
    scheduling: Schedulers, replica: StandIn
) -> None:
    scheduler = await scheduling(replica, max_retries=2)
    scheduler.submit([task("t", 3, end="fail", times=2)], 0)
    collected = await scheduler.collect(0)
    assert_adds_up(collected)
    assert collected.status.ok
    assert collected.retries == 6
    # Each attempt was recorded under a key of its own.
    assert Counter(replica.asked) == {f"0/t/{n}": 2 for n in range(9)}
    for run in collected.runs:
        assert run.task.attempt == 2
        assert run.task.run_id >= 3
        assert [each.info for each in run.experiences] == [{"attempt": 2}]
        assert len(run.experiences[0].turns) == 2
    assert replica.store.keys(ALL) == []


async def test_a_runner_that_dies_costs_nobody_elses_run(
    scheduling: Schedulers, replica: StandIn
) -> None:
    scheduler = await scheduling(replica, runners=2, max_retries=0)
    scheduler.submit([task("dies", end="die", times=1), task("t", 10)], 0)
    collected = await scheduler.collect(0)
    assert_adds_up(collected)
    assert collected.status.ok
    assert collected.retries >= 1
    died = next(run for run in collected.runs if run.task.task_id == "dies")
    assert died.task.attempt >= 1


async def test_a_run_that_always_kills_its_runner_is_given_up(
    scheduling: Schedulers, replica: StandIn
) -> None:
    scheduler = await scheduling(replica, max_losses=2)
    scheduler.submit([task("dies", end="die")], 0)
    collected = await scheduler.collect(0)
    assert collected.status.failures == {Failure.RUNNER_LOST: 1}
    assert collected.retries == 2
    assert replica.store.get(ALL) == []


async def test_a_run_that_always_kills_its_runner_takes_no_other_along(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """Each time it is lost it has fewer beside it, and is given up alone.

    W1.
    """
    scheduler = await scheduling(replica, runs_per_runner=8, max_losses=5, max_retries=0)
    scheduler.submit([task("fine", 7, turns=1, end="nap"), task("dies", turns=0, end="die")], 0)
    collected = await scheduler.collect(0)
    assert_adds_up(collected)
    assert {run.task.task_id for run in collected.runs} == {"fine"}
    assert len(collected.runs) == 7
    assert collected.status.failures == {Failure.RUNNER_LOST: 1}


async def test_a_runner_that_answers_no_more_is_ended(
    scheduling: Schedulers, replica: StandIn
) -> None:
    scheduler = await scheduling(replica, grace_s=0.5, max_retries=0)
    scheduler.submit([task("blocks", turns=0, end="block", timeout_s=0.5)], 0)
    collected = await scheduler.collect(0)
    assert collected.status.failures == {Failure.TIMEOUT: 1}
    assert "and was ended" in collected.status.message
    scheduler.submit([task("t")], 1)
    assert (await scheduler.collect(1)).status.ok


async def test_the_slowest_are_cut_off_when_enough_have_succeeded(
    scheduling: Schedulers, replica: StandIn
) -> None:
    scheduler = await scheduling(replica)
    scheduler.submit([task("t", 4), task("slow", 2, end="hang")], 0)
    collected, same = await asyncio.gather(*(scheduler.collect(0, min_runs=4) for _ in range(2)))
    assert same is collected
    assert_adds_up(collected)
    assert keys(collected) == [f"0/t/{n}" for n in range(4)]
    assert collected.status.failures == {Failure.CUT_OFF: 2}
    assert replica.store.get(ALL) == []
    assert replica.store.add(root(key=RecordKey("0", "slow", 0))) is AddOutcome.BLOCKED
    assert await scheduler.collect(0) is collected


async def test_a_batch_ends_with_its_time(scheduling: Schedulers, replica: StandIn) -> None:
    # More than there is room for: one run has not even begun.
    scheduler = await scheduling(replica, runs_per_runner=2)
    scheduler.submit([task("slow", 3, end="hang")], 0)
    await until(lambda: len(replica.asked) == 4)
    collected = await scheduler.collect(0, timeout_s=0.05)
    assert_adds_up(collected)
    assert collected.status.failures == {Failure.CUT_OFF: 3}
    # Their places are free again.
    scheduler.submit([task("t", 2)], 1)
    assert (await scheduler.collect(1)).status.ok


async def test_a_replica_that_dies_takes_no_successful_run_along(
    scheduling: Schedulers, replicas: list[StandIn]
) -> None:
    events = Events()
    scheduler = await scheduling(*replicas, max_retries=0, listeners=[events])
    dies, lives = replicas
    scheduler.submit([task("t", 4)], 0)
    await until(lambda: len(events.done) == 4)
    dies.stop()
    scheduler.submit([task("u", 6)], 0)
    collected = await scheduler.collect(0)
    assert_adds_up(collected)
    assert collected.status.ok
    assert {key for key in keys(collected) if "/t/" in key} == {f"0/t/{n}" for n in range(4)}
    assert await scheduler.acknowledge(0) == [dies.url]
    before = len(dies.asked)
    dies.start()
    # Its new self is cleaned and gets runs again.
    await until(lambda: dies.store.stats().blocked_prefixes)
    batch = 1
    while len(dies.asked) == before:
        scheduler.submit([task("v", 4)], batch)
        assert (await scheduler.collect(batch)).status.ok
        batch += 1
    assert lives.store.stats().counters["acknowledged"]


async def test_a_run_whose_engine_started_anew_is_not_whole(
    scheduling: Schedulers, replica: StandIn
) -> None:
    scheduler = await scheduling(replica, max_retries=0)
    replica.together = 2  # the run waits in its first turn for another request
    scheduler.submit([task("t", turns=2)], 0)
    await until(lambda: replica.asked)
    # What has been recorded in the meantime is gone, as by a restart that no request met.
    recorder = replica.recorder
    recorder._instance = "another start"
    replica.together = 1
    collected = await scheduler.collect(0)
    assert_adds_up(collected)
    assert collected.status.ok
    assert collected.retries == 1
    assert keys(collected) == ["0/t/1"]


async def test_no_engine_at_all_fails_the_runs(scheduling: Schedulers, replica: StandIn) -> None:
    replica.stop()
    try:
        scheduler = await scheduling(replica, engine_wait_s=0.1)
        scheduler.submit([task("t", 3)], 0)
        collected = await scheduler.collect(0)
    finally:
        replica.start()
    assert collected.status.failures == {Failure.ENGINE_DOWN: 3}
    assert "no engine answered for 0.1 s" in collected.status.message


async def test_runs_wait_for_an_engine_that_starts_late(
    scheduling: Schedulers, replica: StandIn
) -> None:
    replica.stop()
    scheduler = await scheduling(replica)
    scheduler.submit([task("t", 3)], 0)
    await asyncio.sleep(0)
    replica.start()
    assert (await scheduler.collect(0)).status.ok


async def test_a_wrong_admin_key_is_said_at_once(replica: StandIn) -> None:
    engine = replica.engine.model_copy(update={"admin_key": "wrong"})
    with pytest.raises(NotAuthorizedError):
        async with Scheduler(pool_of(1), [engine]):
            pass


async def test_an_engine_that_does_not_record_is_said_at_once(replica: StandIn) -> None:
    engine = EngineAddress(base_url=f"{replica.url}/elsewhere", model_name="m", admin_key=ADMIN_KEY)
    with pytest.raises(ServerFaultError, match="--enable-recording"):
        async with Scheduler(pool_of(1), [engine]):
            pass


async def test_an_engine_is_relieved_of_a_run_as_soon_as_it_is_in_hand(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """A batch may be many times what an engine holds. S2."""
    replica.store._max_bytes = 20_000  # type: ignore[attr-defined]
    scheduler = await scheduling(replica, runs_per_runner=2)
    scheduler.submit([task("t", 60, turns=3, reward=0.5)], 0)
    collected = await scheduler.collect(0)
    assert_adds_up(collected)
    assert len(collected.runs) == 60
    assert all(run.tokens == 3 and not run.missing for run in collected.runs)
    stats = replica.store.stats()
    assert (stats.bytes, stats.leases) == (0, 0)
    assert stats.counters["acknowledged"] == 180
    assert "evicted" not in stats.counters
    await scheduler.acknowledge(0)
    assert replica.store.get(ALL) == []


async def test_a_run_that_lost_a_turn_says_so(scheduling: Schedulers, replica: StandIn) -> None:
    """S1."""
    scheduler = await scheduling(replica)
    replica.together = 2
    scheduler.submit([task("t", turns=2)], 0)
    key = RecordKey.parse("0/t/0")
    while not replica.asked:
        await asyncio.sleep(0.005)
    replica.recorder.start(key).drop("error")
    replica.together = 1
    collected = await scheduler.collect(0)
    assert [run.missing for run in collected.runs] == [{"error": 1}]


async def test_a_scheduler_that_was_killed_goes_on_from_its_spool(
    scheduling: Schedulers, replica: StandIn, tmp_path: Path
) -> None:
    """Nothing is lost, and nothing is rolled out or trained twice. S2."""
    spool = tmp_path / "spool"
    tasks = [task("t", 2, reward=0.5), task("u", end="fail", times=1)]
    scheduler = await scheduling(replica, spool=spool)
    scheduler.submit(tasks, 0)
    before = await scheduler.collect(0)
    await scheduler.close()  # as a process that dies
    asked = len(replica.asked)
    scheduler = await scheduling(replica, spool=spool)
    assert scheduler.submit(tasks, 0) == 3
    after = await scheduler.collect(0)
    assert keys(after) == keys(before)
    assert [run.experiences for run in after.runs] == [run.experiences for run in before.runs]
    assert [run.metrics for run in after.runs] == [run.metrics for run in before.runs]
    assert after.status.ok
    assert len(replica.asked) == asked
    await scheduler.acknowledge(0)
    assert _files(spool) == []


def _files(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


def _cut_off(folder: Path) -> None:
    (file,) = [each for each in _files(folder) if each.suffix == ".run"]
    file.write_bytes(file.read_bytes()[:-3])


async def test_a_spool_file_that_is_cut_off_is_rolled_out_again(
    scheduling: Schedulers, replica: StandIn, tmp_path: Path
) -> None:
    scheduler = await scheduling(replica, spool=tmp_path)
    scheduler.submit([task("t")], 0)
    await scheduler.collect(0)
    await scheduler.close()
    _cut_off(tmp_path)
    replica.recorder.store.remove(ALL)
    scheduler = await scheduling(replica, spool=tmp_path)
    scheduler.submit([task("t")], 0)
    assert len((await scheduler.collect(0)).runs) == 1


async def test_an_abandoned_batch_leaves_nothing(scheduling: Schedulers, replica: StandIn) -> None:
    events = Events()
    scheduler = await scheduling(replica, listeners=[events])
    scheduler.submit([task("t", 2), task("slow", end="hang")], 0)
    await until(lambda: len(events.done) == 2)
    await scheduler.abandon(0)
    assert replica.store.stats().bytes == 0
    with pytest.raises(BatchAbandonedError, match="batch '0' was abandoned"):
        await scheduler.collect(0)
    with pytest.raises(ValueError, match="collected already, or abandoned"):
        scheduler.submit([task("t")], 0)


async def test_who_collects_a_batch_that_is_abandoned_is_told(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """Nor can it grow, or be acknowledged.

    W4.
    """
    events = Events()
    scheduler = await scheduling(replica, listeners=[events])
    scheduler.submit([task("t", 2), task("slow", end="hang")], 0)
    collecting = asyncio.create_task(scheduler.collect(0))
    await until(lambda: len(events.done) == 2)
    abandoning = asyncio.create_task(scheduler.abandon(0))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="or abandoned"):
        scheduler.submit([task("late")], 0)
    with pytest.raises(BatchAbandonedError):
        await scheduler.acknowledge(0)
    await abandoning
    with pytest.raises(BatchAbandonedError, match="batch '0' was abandoned"):
        await collecting
    assert replica.store.stats().bytes == 0


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        ([task("c"), task("b"), task("b")], "run 0/b/0 is given twice"),
        ([task("c"), task("a")], "run 0/a/0 is given twice"),
        ([task("c"), task("1")], "lie below those of a task of batch '0'"),
    ],
)
async def test_of_tasks_of_which_one_is_refused_none_is_kept(
    scheduling: Schedulers, replica: StandIn, refused: list[Task], why: str
) -> None:
    """The others can be submitted again.

    W5.
    """
    scheduler = await scheduling(replica)
    scheduler.submit([task("1")], "0/1")
    scheduler.submit([task("a")], "0")
    with pytest.raises(ValueError, match=why):
        scheduler.submit(refused, "0")
    assert scheduler.submit([task("c"), task("b")], "0") == 2
    assert keys(await scheduler.collect("0")) == ["0/a/0", "0/b/0", "0/c/0"]


async def test_a_batch_id_that_makes_no_key_is_refused_at_once(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """Not by each of its runs, later.

    W5.
    """
    scheduler = await scheduling(replica)
    with pytest.raises(InvalidKeyError, match="'0//a/t/0' has the component ''"):
        scheduler.submit([task("t")], "0//a")
    with pytest.raises(KeyError):
        await scheduler.collect("0//a")


async def test_a_batch_grows_until_it_is_collected(
    scheduling: Schedulers, replica: StandIn
) -> None:
    scheduler = await scheduling(replica)
    scheduler.submit([task("t", 2)], 0)
    scheduler.submit([task("u", 2)], 0)
    with pytest.raises(ValueError, match="run 0/t/0 is given twice"):
        scheduler.submit([task("t")], 0)
    with pytest.raises(ValueError, match="is not collected; call collect first"):
        await scheduler.acknowledge(0)
    assert len((await scheduler.collect(0)).runs) == 4
    with pytest.raises(ValueError, match="collected already"):
        scheduler.submit([task("v")], 0)


async def test_batches_whose_keys_lie_below_one_another(
    scheduling: Schedulers, replica: StandIn
) -> None:
    scheduler = await scheduling(replica)
    scheduler.submit([task("eval")], "0")
    with pytest.raises(ValueError, match=r"'0/eval' lie below those of a task of batch '0'"):
        scheduler.submit([task("1")], "0/eval")
    # By the batch's id alone nothing is said: cleaning up goes task by task.
    scheduler.submit([task("1")], "0/test")
    await scheduler.collect("0")
    await scheduler.acknowledge("0")
    collected = await scheduler.collect("0/test")
    assert keys(collected) == ["0/test/1/0"]
