"""Processes that carry runs out: they start when needed, and outlive nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recorder_core.errors import RunnerLostError
from recorder_core.rollout import LocalRunnerPool, Task
from recorder_core.rollout.wire import RunRequest
from tests.core.rollout.engine import StandIn
from tests.core.rollout.pools import ON_RAY, cluster, pool_of
from tests.core.rollout.workflows import Player

PROGRAM = """
import asyncio
from recorder_core.rollout import LocalRunnerPool

async def main():
    pool = LocalRunnerPool(1)
    await pool.runners[0].start()
    print(pool.runners[0].pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def request(replica: StandIn, **raw: object) -> RunRequest:
    (task,) = Task(task_id="t", workflow=Player, raw_task=raw).runs("0")
    return RunRequest(task=task, engine=replica.engine, timeout_s=600)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux")
def test_a_runner_ends_with_the_process_that_started_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True
    ) as scheduler:
        assert scheduler.stdout is not None
        pid = int(scheduler.stdout.readline())
        assert running(pid)
        scheduler.send_signal(signal.SIGKILL)
        scheduler.wait()
    while running(pid):  # as long as the test may take
        time.sleep(0.01)


async def test_closing_a_pool_ends_its_processes() -> None:
    async with LocalRunnerPool(2) as pool:
        await asyncio.gather(*(runner.start() for runner in pool.runners))
        pids = [runner.pid for runner in pool.runners]
        assert all(running(pid) for pid in pids if pid)
    assert [runner.pid for runner in pool.runners] == [None, None]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)


async def test_a_run_that_is_cancelled_is_cancelled_in_its_process(replica: StandIn) -> None:
    pool = pool_of(1)
    (runner,) = pool.runners
    try:
        replica.together = 2  # the agent waits for an answer until it is cancelled
        running_ = asyncio.create_task(runner.run(request(replica)))
        while not replica.asked:
            await asyncio.sleep(0.01)
        running_.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running_
        replica.together = 1
        # The process goes on with others.
        assert (await runner.run(request(replica))).ok
    finally:
        await pool.close()


async def test_a_runner_that_is_killed_says_so_and_starts_again(replica: StandIn) -> None:
    pool = pool_of(1)
    (runner,) = pool.runners
    try:
        lost = asyncio.create_task(runner.run(request(replica, end="hang")))
        while len(replica.asked) < 2:
            await asyncio.sleep(0.01)
        runner.kill()
        with pytest.raises(RunnerLostError):
            await lost
        assert (await runner.run(request(replica))).ok
    finally:
        await pool.close()


async def test_a_process_that_does_not_start_is_a_lost_runner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with LocalRunnerPool(1) as pool:
        with pytest.raises(RunnerLostError, match="ended with 1"):
            await pool.runners[0].start()


@pytest.mark.skipif(not ON_RAY, reason="needs a cluster")
async def test_a_cluster_without_room_is_said() -> None:
    from recorder_core.rollout.ray_pool import RayRunnerPool

    cluster()
    async with RayRunnerPool(1, start_timeout_s=1, num_cpus=1000) as pool:
        with pytest.raises(RunnerLostError, match="has the cluster room"):
            await pool.runners[0].start()


@pytest.mark.parametrize("count", [0, -1])
def test_a_pool_has_a_runner(count: int) -> None:
    with pytest.raises(ValueError, match="at least one runner is needed"):
        LocalRunnerPool(count)
