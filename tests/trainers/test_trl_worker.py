"""TRL's asynchronous trainer, fed by a scheduler with real runners and real `/records`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recorder_core import Experience, export
from recorder_core.export import ExportError
from recorder_core.rollout import EngineAddress, LocalRunnerPool, Scheduler, Task
from recorder_core.rollout.trl import RecorderWorker
from tests.core.rollout.engine import StandIn, stand_in
from tests.core.rollout.workflows import Player
from tests.trainers import async_trl, policy
from tests.trainers.workflows import Guesser, Replay, as_json


@pytest.fixture
def engine() -> Iterator[StandIn]:
    with stand_in() as engine:
        yield engine


@pytest.fixture
def workers(engine: StandIn) -> Iterator[Any]:
    """Makes workers on a scheduler with one runner, stopped at the end."""
    made = []

    def worker(tasks: Any, *, at: EngineAddress = engine.engine, **settings: Any) -> RecorderWorker:
        scheduler = Scheduler(LocalRunnerPool(1), [at], max_retries=0, probe_s=0.02)
        made.append(RecorderWorker(scheduler, tasks, **settings))
        return made[-1]

    yield worker
    for each in made:
        each.stop()


def ended(worker: RecorderWorker) -> None:
    """Wait until its thread has come to an end."""
    worker._thread.join(120)
    assert not worker._thread.is_alive()


def until(worker: RecorderWorker, there: Callable[[], bool]) -> None:
    """Wait for something that the worker brings about."""
    while not there():
        worker.check_health(600)
        time.sleep(0.01)


def replays(experiences: list[Experience]) -> list[Task]:
    """A task for each group, whose runs give these trajectories."""
    runs: dict[str, list[list[Any]]] = {
        task: [[] for _ in given] for task, given in policy.REWARDS.items()
    }
    for each in experiences:
        runs[each.eid.task][int(each.eid.run)].append(as_json(each))
    return [
        Task(task_id=task, workflow=Replay, raw_task={"runs": given}, repeat_times=len(given))
        for task, given in runs.items()
    ]


def test_each_step_trains_what_the_scheduler_has_played(
    workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async_trl.use_cpu(monkeypatch)
    model = policy.load()
    branch = policy.trajectory(model, "sum", 3, reward=3.0, seed=9, suffix="branch")
    recorded = [*policy.groups(model), branch]
    worker = workers(itertools.cycle(replays(recorded)), groups=1)
    trainer = async_trl.trainer(tmp_path, worker, samples=len(recorded), steps=2)

    trainer.train()

    batch = export.group_advantages(export.rows(recorded))
    total = sum(row.trained_tokens for row in batch)
    expected = -sum((row.advantage or 0) * row.trained_tokens for row in batch) / total
    first, second = trainer.state.log_history[:2]
    for log in (first, second):
        assert log["ratio"] == pytest.approx(1, abs=1e-5)
        assert log["loss"] == pytest.approx(expected, abs=1e-4)  # TRL rounds what it logs
    assert first["recorder/runs/completed"] == 4  # of a group
    assert not worker._thread.is_alive()  # TRL stops it


def test_what_the_engine_records_has_trls_numbers_of_its_weights(
    workers: Any, engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async_trl.use_cpu(monkeypatch)
    task = Task(task_id="guess", workflow=Guesser, repeat_times=4)
    worker = workers(itertools.repeat(task), groups=1, max_samples=1)
    trainer = async_trl.trainer(tmp_path, worker, samples=4, steps=4)
    trainer.weight_transfer = worker.labelled(trainer.weight_transfer)
    versions = []
    put = worker.rollout_buffer.put_nowait

    def noted(sample: Any) -> None:
        put(sample)
        versions.append(sample.model_version)

    monkeypatch.setattr(worker.rollout_buffer, "put_nowait", noted)

    trainer.train()

    assert engine.labels == ["7", "1", "2", "3", "4", "5"]
    assert worker.model_version == 5
    assert versions[0] == 1
    assert 1 < max(versions) <= 5


def test_a_run_that_fails_costs_that_run(workers: Any) -> None:
    play = Task(task_id="play", workflow=Player, repeat_times=2)
    mixed = [play, play.model_copy(update={"raw_task": {"end": "fail"}}), play]
    worker = workers(mixed, groups=1)

    worker.start()
    ended(worker)

    assert [each.group_id for each in worker.rollout_buffer.queue] == [0, 0, 2, 2]
    reports = [each for each in worker.metrics_queue.queue if "recorder/runs/total" in each]
    assert [each["recorder/runs/completed"] for each in reports] == [2, 0, 2]
    with pytest.raises(RuntimeError, match="there are no more tasks"):
        worker.check_health(60)


def test_trl_hears_that_no_run_ends_well(workers: Any) -> None:
    broken = Task(task_id="play", workflow=Player, raw_task={"end": "fail"}, repeat_times=2)
    worker = workers(itertools.repeat(broken), groups=2)

    worker.start()
    ended(worker)

    with pytest.raises(RuntimeError, match=r"\d groups in a row .* task play cannot be solved"):
        worker.check_health(60)


def test_trl_hears_that_the_engine_does_not_let_the_scheduler_in(
    workers: Any, engine: StandIn
) -> None:
    stranger = engine.engine.model_copy(update={"admin_key": "another"})
    worker = workers([Task(task_id="play", workflow=Player)], at=stranger)

    worker.start()
    ended(worker)

    with pytest.raises(RuntimeError, match=r"the rollouts have failed: .*admin key"):
        worker.check_health(60)


def test_stopping_cuts_off_runs_that_would_go_on(workers: Any, engine: StandIn) -> None:
    engine.release = False
    held = Task(task_id="held", workflow=Player, raw_task={"held": True})
    worker = workers([held])
    worker.start()
    until(worker, lambda: bool(engine.asked))

    worker.stop()

    assert worker.rollout_buffer.empty()
    assert not worker._thread.is_alive()


def test_groups_wait_for_room_in_the_buffer_and_no_others_begin(
    workers: Any, engine: StandIn
) -> None:
    task = Task(task_id="play", workflow=Player, repeat_times=2)
    worker = workers(itertools.repeat(task), groups=1, max_samples=1)
    worker.start()

    until(worker, worker.rollout_buffer.full)
    asked = set(engine.asked)
    taken = [worker.rollout_buffer.get(timeout=120) for _ in range(4)]

    assert len(asked) == 2  # the runs of one group
    assert [each.group_id for each in taken] == [0, 0, 1, 1]
    until(worker, worker.rollout_buffer.full)
    worker.stop()
    assert not worker._thread.is_alive()


def test_a_worker_that_never_began_can_be_stopped(workers: Any) -> None:
    workers([]).stop()


def test_labels_are_refused_where_trl_sends_adapters(workers: Any) -> None:
    with pytest.raises(ExportError, match="--recording-adapter-versions"):
        workers([]).labelled(None)
