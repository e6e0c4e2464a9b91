"""Batches on two real replicas: agents fail and hang, runners die, a replica is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm
from packaging.version import Version

from examples.vllm_server import VLLMServer
from recorder_core import Experience, FinishReason
from recorder_core.client import RecordClient
from recorder_core.rollout import (
    BatchReport,
    CollectedRun,
    EngineAddress,
    Failure,
    RolloutCoordinator,
    Scheduler,
    Status,
    Task,
)
from tests.core.rollout.pools import pool_of
from tests.models import round_trip_ids, tiny_qwen3
from tests.vllm.agents import TOKENS, TURNS, DigitAgent
from tests.vllm.conftest import ADMIN_KEY, ENV

pytestmark = [
    pytest.mark.server,
    # The layer knows no engine version; one is enough.
    pytest.mark.skipif(Version(vllm.__version__) < Version("0.32"), reason="the newest only"),
]

RUNS_PER_TASK = 4


@pytest.fixture(scope="module")
def replicas(log_folder: Path) -> Iterator[list[VLLMServer]]:
    with ExitStack() as stack:
        servers = [
            VLLMServer(
                tiny_qwen3(),
                *["--enable-recording", "--dtype", "float32"],
                env=ENV,
                log=log_folder / f"replica-{n}.log",
            )
            for n in range(2)
        ]
        yield [stack.enter_context(server) for server in servers]


class Watch:
    """A listener: which runs are in hand, by the kind of their task."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()

    def submitted(self, batch_id: str, runs: int) -> None: ...

    def succeeded(self, run: CollectedRun) -> None:
        self.done[run.task.task_id.rpartition("-")[0]] += 1

    def failed(self, task: Task, status: Status, *, retried: bool) -> None: ...

    def closed(self, batch_id: str) -> None: ...


def engine(server: VLLMServer) -> EngineAddress:
    return EngineAddress(base_url=server.base_url, model_name=server.name, admin_key=ADMIN_KEY)


def tasks(kinds: dict[str, tuple[int, dict[str, Any], float | None]]) -> list[Task]:
    """So many tasks of each kind, with what the agent is told, and the time that it has."""
    allowed = {"allowed_token_ids": round_trip_ids(tiny_qwen3())}
    return [
        Task(
            task_id=f"{kind}-{n}",
            workflow=DigitAgent,
            raw_task=raw,
            rollout_args=allowed,
            repeat_times=RUNS_PER_TASK,
            timeout_s=timeout_s,
        )
        for kind, (count, raw, timeout_s) in kinds.items()
        for n in range(count)
    ]


def assert_is_what_its_agent_saw(experience: Experience, digits: list[int]) -> None:
    """Both turns, whole, with the reward that the agent of this very run has written."""
    assert len(experience.turns) == TURNS
    assert experience.action_mask is not None
    assert experience.action_mask.sum() == TURNS * TOKENS
    sampled = experience.tokens[experience.prompt_length :][experience.action_mask].tolist()
    seen = "".join(experience.info["answers"])
    assert "".join(str(digits.index(token)) for token in sampled) == seen
    assert experience.reward == sum(map(int, seen))
    assert not np.isnan(experience.logprobs[experience.action_mask]).any()
    assert experience.finish_reason is FinishReason.LENGTH


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.05)


async def test_two_hundred_runs_and_a_replica_that_is_killed(
    replicas: list[VLLMServer], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    always = 1_000
    given = tasks(
        {
            # Between its turns when the replica is killed, and still there when it is back.
            "late": (7, {"gate": str(gate)}, None),
            "dies-once": (1, {"end": "die", "times": 1}, None),
            "fine": (31, {}, None),
            "fails-once": (5, {"end": "fail", "times": 1}, None),
            "fails": (4, {"end": "fail", "times": always}, None),
            "hangs": (2, {"end": "hang", "times": always}, 15.0),
        }
    )
    taken: list[Experience] = []

    def take(experiences: list[Experience]) -> list[Experience]:
        taken.extend(experiences)
        return experiences

    watch = Watch()
    dies, _ = replicas
    with RecordClient(dies.base_url, admin_key=ADMIN_KEY) as records:
        async with Scheduler(
            pool_of(2),
            [engine(server) for server in replicas],
            runs_per_runner=64,
            listeners=[watch],
        ) as scheduler:
            coordinator = RolloutCoordinator(scheduler, [take])
            assert coordinator.submit(given, "e2e") == 200
            # Each runner that dies takes the runs on it along: none may after this.
            await until(lambda: watch.done.total() >= 60 and watch.done["dies-once"] == 4)
            while not await asyncio.to_thread(late_runs, records):
                await asyncio.sleep(0.1)
            before = await asyncio.to_thread(records.stats)
            os.killpg(dies.pid, signal.SIGKILL)
            dies.wait(30)
            await asyncio.to_thread(dies.start)
            gate.touch()
            report = await coordinator.finalize("e2e")
        after = await asyncio.to_thread(records.stats)

    failed = 4 * RUNS_PER_TASK + 2 * RUNS_PER_TASK
    assert report.status.failures == {Failure.ERROR: 16, Failure.TIMEOUT: 8}
    assert report.status.completed_runs == report.trained_runs == 200 - failed
    assert report.status.total_runs == 200
    assert report.dropped == {}
    assert report.retries >= 2 * failed + 5 * RUNS_PER_TASK
    # The replica is another one than before; runs that it had only half recorded were not taken.
    (old,), (new,) = before.values(), after.values()
    assert old.recorder.instance != new.recorder.instance
    assert new.store.counters["removed"] >= 1
    assert any(each.info["attempt"] for each in taken if each.eid.task.startswith("late"))
    assert_exactly_once(report, taken)
    for server in replicas:
        assert_nothing_is_left(server)


def late_runs(records: RecordClient) -> list[str]:
    """Those that are between their turns on a replica."""
    held = (each.key for each in records.keys("e2e") if each.records == 1)
    return [str(key) for key in held if key.task.startswith("late")]


def assert_exactly_once(report: BatchReport, taken: list[Experience]) -> None:
    digits = round_trip_ids(tiny_qwen3())
    keys = Counter(each.eid.key.text for each in taken)
    assert set(keys.values()) == {1}
    assert keys.keys() == set(report.status.successful_ids)
    groups = Counter(each.eid.task for each in taken)
    assert set(groups.values()) == {RUNS_PER_TASK}
    assert len(groups) == 44
    assert not {task for task in groups if task.startswith(("fails-", "hangs"))} - {
        f"fails-once-{n}" for n in range(5)
    }
    ids = [turn.record_id for each in taken for turn in each.turns]
    assert len(ids) == len(set(ids)) == TURNS * len(taken)
    for each in taken:
        assert_is_what_its_agent_saw(each, digits)
        if each.eid.task.startswith(("fails-once", "dies-once")):
            assert each.info["attempt"] >= 1
    by_key = dict(zip(report.status.successful_ids, report.status.metrics, strict=True))
    assert {each.eid.key.text: each.reward for each in taken} == {
        key: metrics["sum"] for key, metrics in by_key.items()
    }


def assert_nothing_is_left(server: VLLMServer) -> None:
    """No record, leased or not, and every one that there was is accounted for."""
    with RecordClient(server.base_url, admin_key=ADMIN_KEY) as records:
        (stats,) = records.stats().values()
    assert stats.store.bytes == stats.store.records == stats.store.leased_records == 0
    counters = stats.store.counters
    gone = counters.get("acknowledged", 0) + counters.get("removed", 0)
    assert counters["stored"] == gone
    recorder = stats.recorder
    assert recorder.pending == recorder.errors == 0
    assert recorder.started == recorder.recorded + sum(recorder.dropped.values())
