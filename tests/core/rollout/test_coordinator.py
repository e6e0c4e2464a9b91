"""Batches reach the trainer normalized, once, and are acknowledged only then."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from recorder_core import Experience, KeyPrefix, RecordKey
from recorder_core.errors import BatchAbandonedError
from recorder_core.rollout import Failure, RolloutCoordinator, Task, by_task
from recorder_core.stores import AddOutcome
from recorder_core.stores.testing import root
from tests.core.rollout.conftest import Schedulers
from tests.core.rollout.engine import StandIn
from tests.core.rollout.workflows import Player

ALL = KeyPrefix()


def task(name: str, repeat_times: int = 1, *, is_eval: bool = False, **raw: Any) -> Task:
    return Task(
        task_id=name, workflow=Player, raw_task=raw, repeat_times=repeat_times, is_eval=is_eval
    )


class Trainer:
    """The last function of a pipeline; it may fail."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.taken: list[list[str]] = []

    def step(self, experiences: list[Experience]) -> list[Experience]:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("out of memory")
        self.taken.append([each.eid.key.text for each in experiences])
        return experiences


async def test_a_batch_goes_through_the_pipeline_by_task_and_run(
    scheduling: Schedulers, replicas: list[StandIn]
) -> None:
    trainer = Trainer()

    async def scaled(experiences: list[Experience]) -> list[Experience]:
        await asyncio.sleep(0)
        return [
            each.replace(reward=each.reward * len(group))
            for group in by_task(experiences).values()
            for each in group
        ]

    coordinator = RolloutCoordinator(await scheduling(*replicas), [scaled, trainer.step])
    report = await coordinator.run([task("b", 2, reward=1.0), task("a", 3, reward=0.5)], 0)
    wanted = ["0/a/0", "0/a/1", "0/a/2", "0/b/0", "0/b/1"]
    assert trainer.taken == [wanted]
    assert [each.reward for each in report.experiences] == [1.5, 1.5, 1.5, 2.0, 2.0]
    assert report.metrics() == {
        "runs/total": 5,
        "runs/completed": 5,
        "runs/retried": 0,
        "runs/trained": 5,
        "experiences": 5,
        "tokens": 10,
        "generations/superseded": 0,
        "generations/unfinished": 0,
        "reward": pytest.approx(0.7),
        "workflow/length": 7.0,
        "workflow/pid": report.status.metrics[0]["pid"],
    }
    for replica in replicas:
        assert replica.store.stats().bytes == 0


async def test_a_batch_that_the_pipeline_has_not_taken_can_be_taken_again(
    scheduling: Schedulers, replica: StandIn
) -> None:
    trainer = Trainer(failures=1)
    coordinator = RolloutCoordinator(await scheduling(replica), [trainer.step])
    with pytest.raises(RuntimeError, match="out of memory"):
        await coordinator.run([task("t", 2)], 0)
    report = await coordinator.finalize(0)
    assert trainer.taken == [["0/t/0", "0/t/1"]]
    assert report.trained_runs == 2


async def test_a_run_that_lost_a_turn_is_not_trained_unless_it_is_wanted(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """S1."""
    for batch, wanted in enumerate([False, True]):
        trainer = Trainer()
        coordinator = RolloutCoordinator(
            await scheduling(replica), [trainer.step], keep_incomplete=wanted
        )
        replica.together = 2
        coordinator.submit([task("t")], batch)
        while len(replica.asked) == batch * 2:
            await asyncio.sleep(0.005)
        replica.recorder.start(RecordKey(str(batch), "t", 0)).drop("full")
        replica.together = 1
        report = await coordinator.finalize(batch)
        assert report.dropped == ({} if wanted else {"incomplete": 1})


async def test_a_step_that_forgets_its_result_is_told(
    scheduling: Schedulers, replica: StandIn
) -> None:
    taken: list[Experience] = []
    coordinator = RolloutCoordinator(await scheduling(replica), [taken.extend])
    with pytest.raises(TypeError, match="extend returned NoneType, it must return experiences"):
        await coordinator.run([task("t")], 0)


async def test_what_is_not_trained_is_counted_by_reason(
    scheduling: Schedulers, replica: StandIn
) -> None:
    trainer = Trainer()
    coordinator = RolloutCoordinator(
        await scheduling(replica, max_retries=0),
        [trainer.step],
        keep=lambda run: run.reward is None or run.reward >= 0,
        min_group=2,
    )
    report = await coordinator.run(
        [
            task("trained", 3, reward=1.0),
            task("eval", 2, is_eval=True, reward=0.25),
            task("silent", 2, end="say_nothing"),
            task("unwanted", 2, reward=-1.0),
            task("alone", 1),
            task("fails", 2, end="fail"),
        ],
        "b",
    )
    assert trainer.taken == [["b/trained/0", "b/trained/1", "b/trained/2"]]
    assert report.dropped == {"eval": 2, "no_reward": 2, "policy": 2, "small_group": 1}
    assert report.status.failures == {Failure.ERROR: 2}
    assert report.trained_runs + sum(report.dropped.values()) == report.status.completed_runs
    assert report.status.completed_runs + 2 == report.status.total_runs == 12
    numbers = report.metrics()
    assert numbers["eval/reward"] == 0.25
    assert numbers["reward"] == pytest.approx((3 - 2 + 1) / 6)
    assert numbers["runs/dropped/no_reward"] == 2
    assert numbers["runs/failed/error"] == 2
    assert replica.store.stats().bytes == 0


async def test_runs_without_a_reward_are_trained_where_none_is_wanted(
    scheduling: Schedulers, replica: StandIn
) -> None:
    coordinator = RolloutCoordinator(await scheduling(replica), require_reward=False)
    report = await coordinator.run([task("t", end="say_nothing")], 0)
    assert [each.reward for each in report.experiences] == [None]


async def test_more_runs_than_needed_and_the_slowest_are_cut_off(
    scheduling: Schedulers, replica: StandIn
) -> None:
    trainer = Trainer()
    coordinator = RolloutCoordinator(await scheduling(replica), [trainer.step], enough=0.75)
    report = await coordinator.run([task("t", 6), task("slow", 2, end="hang")], 0)
    assert trainer.taken == [[f"0/t/{n}" for n in range(6)]]
    assert report.status.failures == {Failure.CUT_OFF: 2}
    assert report.metrics()["runs/failed/cut_off"] == 2
    assert replica.store.stats().bytes == 0


async def test_generations_that_outlive_their_run_are_counted(
    scheduling: Schedulers, replica: StandIn
) -> None:
    replica.release = False
    coordinator = RolloutCoordinator(await scheduling(replica, drain_wait_s=0))
    report = await coordinator.run([task("t", end="leave_running")], 0)
    assert report.status.ok
    assert report.unfinished == report.metrics()["generations/unfinished"] == 1
    replica.release = True
    while replica.recorder.pending():
        await asyncio.sleep(0.01)
    assert replica.store.stats().counters["blocked"] == 1
    assert replica.store.stats().bytes == 0


async def test_what_comes_after_the_batch_is_refused(
    scheduling: Schedulers, replica: StandIn
) -> None:
    coordinator = RolloutCoordinator(await scheduling(replica))
    await coordinator.run([task("t")], 0)
    assert replica.store.add(root(key=RecordKey("0", "t", 0))) is AddOutcome.BLOCKED


async def test_batches_overlap(scheduling: Schedulers, replica: StandIn) -> None:
    trainer = Trainer()
    coordinator = RolloutCoordinator(await scheduling(replica), [trainer.step])
    for batch in range(3):
        coordinator.submit([task("t", 2)], batch)
    reports = await asyncio.gather(*(coordinator.finalize(batch) for batch in range(3)))
    assert [report.batch_id for report in reports] == ["0", "1", "2"]
    taken = sorted(key for keys in trainer.taken for key in keys)
    assert taken == [f"{batch}/t/{run}" for batch in range(3) for run in range(2)]


async def test_a_batch_can_be_given_up(scheduling: Schedulers, replica: StandIn) -> None:
    coordinator = RolloutCoordinator(await scheduling(replica))
    coordinator.submit([task("t", end="hang")], 0)
    await coordinator.abandon(0)
    with pytest.raises(BatchAbandonedError, match="batch '0' was abandoned"):
        await coordinator.finalize(0)
    with pytest.raises(BatchAbandonedError):
        await coordinator.abandon(0)
    with pytest.raises(KeyError):
        await coordinator.abandon("never submitted")


class SlowTrainer(Trainer):
    """Its step takes as long as the test says, on a thread that nothing can stop."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__(failures)
        self.begun = threading.Event()
        self.release = threading.Event()
        self.at_once = 0
        self.most_at_once = 0

    def step(self, experiences: list[Experience]) -> list[Experience]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.begun.set()
        self.release.wait()
        self.at_once -= 1
        return super().step(experiences)


async def until(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.01)


async def test_a_batch_has_one_trainer_step_however_often_it_is_asked_for(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """Whoever gave up waiting, and asks again, gets what the first step made.

    W3.
    """
    trainer = SlowTrainer()
    coordinator = RolloutCoordinator(await scheduling(replica), [trainer.step])
    coordinator.submit([task("t", 2)], 0)
    first = asyncio.create_task(coordinator.finalize(0))
    await until(trainer.begun)
    first.cancel()  # as a time limit outside does
    with pytest.raises(asyncio.CancelledError):
        await first
    asked = [asyncio.create_task(coordinator.finalize(0)) for _ in range(3)]
    await asyncio.sleep(0.1)
    trainer.release.set()
    reports = await asyncio.gather(*asked)
    assert reports[0] is reports[1] is reports[2]
    assert trainer.taken == [["0/t/0", "0/t/1"]]
    assert trainer.most_at_once == 1
    assert replica.store.stats().counters["acknowledged"] == 4
    with pytest.raises(KeyError):
        await coordinator.finalize(0)


async def test_a_report_that_nobody_waited_for_is_given_to_who_asks_next(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """The step ended between the time limit and the next question.

    W3.
    """
    trainer = SlowTrainer()
    coordinator = RolloutCoordinator(await scheduling(replica), [trainer.step])
    coordinator.submit([task("t")], 0)
    first = asyncio.create_task(coordinator.finalize(0))
    await until(trainer.begun)
    first.cancel()
    trainer.release.set()
    while not replica.store.stats().counters.get("acknowledged"):
        await asyncio.sleep(0.01)
    assert (await coordinator.finalize(0)).trained_runs == 1
    assert trainer.taken == [["0/t/0"]]


async def test_a_pipeline_that_raised_runs_again_when_asked_again(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """All who waited hear of it first.

    W3.
    """
    trainer = SlowTrainer(failures=1)
    trainer.release.set()
    coordinator = RolloutCoordinator(await scheduling(replica), [trainer.step])
    coordinator.submit([task("t")], 0)
    both = [coordinator.finalize(0), coordinator.finalize(0)]
    outcomes = await asyncio.gather(*both, return_exceptions=True)
    assert [str(each) for each in outcomes] == ["out of memory"] * 2
    assert trainer.taken == []
    assert (await coordinator.finalize(0)).trained_runs == 1
    assert trainer.most_at_once == 1


async def test_a_time_limit_outside_leaves_the_runs_going(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """Nothing is trained behind the back of who gave up while runs were waited for.

    W3.
    """
    trainer = Trainer()
    replica.release = False
    coordinator = RolloutCoordinator(await scheduling(replica), [trainer.step])
    coordinator.submit([task("t"), task("waits", held=True)], 0)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(coordinator.finalize(0), 0.2)
    replica.release = True
    while replica.recorder.pending():
        await asyncio.sleep(0.01)
    assert trainer.taken == []
    await coordinator.finalize(0)
    assert trainer.taken == [["0/t/0", "0/waits/0"]]


async def test_an_engine_that_refuses_an_acknowledgement_trains_nothing_twice(
    scheduling: Schedulers, replica: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is trained; only what was left to do is done again.

    W3.
    """
    trainer = Trainer()
    scheduler = await scheduling(replica)
    coordinator = RolloutCoordinator(scheduler, [trainer.step])
    with monkeypatch.context() as patch:

        async def refused(_: Any) -> list[str]:
            raise RuntimeError("refused")

        patch.setattr(scheduler, "acknowledge", refused)
        with pytest.raises(RuntimeError, match="refused"):
            await coordinator.run([task("t")], 0)
    assert (await coordinator.finalize(0)).trained_runs == 1
    assert trainer.taken == [["0/t/0"]]


async def test_nothing_is_trained_of_a_batch_that_is_abandoned_while_its_runs_are_waited_for(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """Also where some of its runs had ended.

    W4.
    """
    trainer = Trainer()
    coordinator = RolloutCoordinator(await scheduling(replica), [trainer.step])
    coordinator.submit([task("t", 2), task("slow", end="hang")], 0)
    finalizing = asyncio.create_task(coordinator.finalize(0))
    # All has been asked, and of what was recorded only the slow run's two turns are not drained.
    while len(replica.asked) < 6 or replica.store.stats().records != 2:
        await asyncio.sleep(0.01)
    assert await coordinator.abandon(0)
    with pytest.raises(BatchAbandonedError, match="batch '0' was abandoned"):
        await finalizing
    assert trainer.taken == []
    assert replica.store.stats().bytes == 0


async def test_no_function_of_the_pipeline_begins_after_a_batch_is_abandoned(
    scheduling: Schedulers, replica: StandIn
) -> None:
    """The one that is running is waited for.

    W4.
    """
    before, trainer = SlowTrainer(), Trainer()
    coordinator = RolloutCoordinator(await scheduling(replica), [before.step, trainer.step])
    coordinator.submit([task("t")], 0)
    finalizing = asyncio.create_task(coordinator.finalize(0))
    await until(before.begun)
    abandoning = asyncio.create_task(coordinator.abandon(0))
    await asyncio.sleep(0.05)
    assert not abandoning.done()
    before.release.set()
    assert await abandoning
    with pytest.raises(BatchAbandonedError, match=r"abandoned before Trainer\.step began"):
        await finalizing
    assert trainer.taken == []
    assert replica.store.stats().bytes == 0


@pytest.mark.parametrize("failures", [0, 1])
async def test_a_batch_that_is_abandoned_during_the_trainers_step_says_whether_it_is_trained(
    scheduling: Schedulers, replica: StandIn, failures: int
) -> None:
    """The step cannot be stopped: abandoning waits for it, and says if it came too late.

    W4.
    """
    trainer = SlowTrainer(failures)
    coordinator = RolloutCoordinator(await scheduling(replica), [trainer.step])
    coordinator.submit([task("t")], 0)
    finalizing = asyncio.create_task(coordinator.finalize(0))
    await until(trainer.begun)
    abandoning = asyncio.create_task(coordinator.abandon(0))
    await asyncio.sleep(0.05)
    trainer.release.set()
    assert await abandoning is bool(failures)
    if failures:
        with pytest.raises(RuntimeError, match="out of memory"):
            await finalizing
        with pytest.raises(BatchAbandonedError):
            await coordinator.finalize(0)
    else:
        assert (await finalizing).trained_runs == 1
    assert replica.store.stats().bytes == 0


@pytest.mark.parametrize("enough", [0, 1.5, -1])
def test_enough_is_a_share(enough: float) -> None:
    with pytest.raises(ValueError, match="must be a share of the runs"):
        RolloutCoordinator(None, enough=enough)  # type: ignore[arg-type]
