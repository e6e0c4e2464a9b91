"""Runs whose keys are signed: agents are recorded as the run that they were given, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from recorder_core import KeyPrefix
from recorder_core.keys import verify
from recorder_core.rollout import EngineAddress, Failure, Task, WorkflowRunner
from recorder_core.rollout.wire import RunRequest
from tests.core.rollout.conftest import Schedulers
from tests.core.rollout.engine import StandIn
from tests.core.rollout.workflows import Player

SECRET = "a secret that the tests know, and no agent"


@pytest.fixture
def signing(replica: StandIn) -> StandIn:
    """A replica that records signed keys only."""
    replica.stop()
    replica.secret = SECRET
    replica.start()
    return replica


def task(**fields: Any) -> Task:
    return Task(task_id="t", workflow=Player, **fields)


async def test_a_scheduler_gives_agents_signed_keys(
    signing: StandIn, scheduling: Schedulers
) -> None:
    scheduler = await scheduling(signing, secret=SECRET)
    scheduler.submit([task(repeat_times=3)], "0")
    collected = await scheduler.collect("0", timeout_s=60)
    assert [run.task.api_key for run in collected.runs] == ["0/t/0", "0/t/1", "0/t/2"]
    assert [run.reward for run in collected.runs] == [1.0] * 3
    # Nobody but the agent is told the signature.
    assert {run.task.signature for run in collected.runs} == {""}


async def test_the_secret_may_be_in_the_environment(
    signing: StandIn, scheduling: Schedulers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECORDER_SECRET", SECRET)
    scheduler = await scheduling(signing)
    scheduler.submit([task()], "0")
    assert len((await scheduler.collect("0", timeout_s=60)).runs) == 1


async def test_a_retry_is_signed_anew(signing: StandIn, scheduling: Schedulers) -> None:
    scheduler = await scheduling(signing, secret=SECRET)
    scheduler.submit([task(raw_task={"end": "fail", "times": 1})], "0")
    collected = await scheduler.collect("0", timeout_s=60)
    assert [run.task.api_key for run in collected.runs] == ["0/t/1"]


async def test_a_scheduler_without_the_secret_is_told(
    signing: StandIn, scheduling: Schedulers
) -> None:
    scheduler = await scheduling(signing, max_retries=0)
    scheduler.submit([task()], "0")
    collected = await scheduler.collect("0", timeout_s=60)
    assert set(collected.status.failures) == {Failure.NO_RECORDS}
    assert signing.recorder.stats().unkeyed == {"unsigned": 2}


async def test_a_runner_in_this_process_signs_too(signing: StandIn) -> None:
    async with WorkflowRunner(signing.engine, secret=SECRET) as runner:
        status = await runner.run([task()])
    assert status.successful_ids == ("0/t/0",)
    assert len(signing.store.get(KeyPrefix())) == 1


def test_an_agent_sends_the_engines_key_before_the_signed_one() -> None:
    engine = EngineAddress(base_url="http://a:8000", model_name="m", engine_key="K")
    signed = task().signed(SECRET, 60)
    own, _, rest = engine.api_key(signed).partition(":")
    assert own == "K"
    assert verify(rest, SECRET) == signed.record_key
    assert signed.signature not in repr(signed)
    again = RunRequest.model_validate_json(
        RunRequest(task=signed, engine=engine, timeout_s=1.0).model_dump_json()
    )
    assert again.task == signed


def test_a_secret_that_can_be_guessed_is_refused(replica: StandIn) -> None:
    with pytest.raises(ValueError, match="at least 32"):
        WorkflowRunner(replica.engine, secret="")
