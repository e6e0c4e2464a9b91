"""Carries runs out: many at once, each within its time, and says only what became of them."""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from typing_extensions import Self

from recorder_core.client import AsyncRecordClient
from recorder_core.environment import SECRET_VARIABLE
from recorder_core.errors import NothingRecordedError, ServerUnreachableError
from recorder_core.keys import check_secret
from recorder_core.rollout.address import EngineAddress
from recorder_core.rollout.messages import described
from recorder_core.rollout.status import Failure, Status
from recorder_core.rollout.task import Task
from recorder_core.rollout.workflow import WorkflowBase

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

CLOCK_S = 60.0
"""What a signed key lasts beyond its run: an engine's clock may be ahead."""
_CANCEL_GRACE_S = 1.0
"""What a workflow gets to put its things away when its time is up."""


class WorkflowRunner:
    """Carries out runs against one engine, in this process.

    A run that hangs on a thread of its own is left behind when its time is up; whatever it still
    generates is not recorded any more. A workflow that blocks the event loop blocks all runs of
    its runner: a `Scheduler` ends such a runner.

    Args:
        engine: Where the runs are carried out.
        timeout_s: Seconds that one run may take, where its task does not say.
        max_retries: How often `run` tries a failed run again.
        max_concurrent: Runs at once.
        secret: The server's `--recording-secret`, with which runs' keys are signed; by default
            from `RECORDER_SECRET`.

    Example:
        >>> async with WorkflowRunner(EngineAddress(base_url=url, model_name="policy")) as runner:
        ...     status = await runner.run(tasks)  # doctest: +SKIP
    """

    def __init__(
        self,
        engine: EngineAddress,
        *,
        timeout_s: float = 600.0,
        max_retries: int = 0,
        max_concurrent: int = 32,
        secret: str | None = None,
    ) -> None:
        self.engine = engine
        self._secret = signing_secret(secret)
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self.records: AsyncRecordClient = engine.records()
        self._slots = asyncio.Semaphore(max_concurrent)
        self._idle: defaultdict[type[WorkflowBase], list[WorkflowBase]] = defaultdict(list)

    async def run(self, tasks: Iterable[Task]) -> Status:
        """Carry out every run of the tasks, failed ones again under a fresh run.

        The experiences of the runs in `Status.successful_ids` are in the engine, to be drained.

        Raises:
            ValueError: Two runs have one record key.
        """
        runs = [run for task in tasks for run in task.runs()]
        fresh = FreshRuns()
        fresh.add(runs)
        return Status.of_all(await asyncio.gather(*(self._tried(run, fresh) for run in runs)))

    async def run_once(self, task: Task, timeout_s: float | None = None) -> Status:
        """Carry out one run, once; whatever goes wrong is in the status."""
        limit = task.timeout_s or timeout_s or self.timeout_s
        # A scheduler has signed what it sends.
        signed = task if task.signature else task.signed(self._secret, limit + CLOCK_S)
        ended = await within(limit, self._outcome(signed))
        if ended is None:
            return Status.failure(task, Failure.TIMEOUT, f"not ended after {limit:g} s")
        if ended.cancelled():
            return Status.failure(task, Failure.ERROR, "the workflow cancelled itself")
        return ended.result()

    async def close(self) -> None:
        """Close the connections."""
        await self.records.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _tried(self, task: Task, fresh: FreshRuns) -> Status:
        async with self._slots:
            while True:
                status = await self.run_once(task)
                if status.ok:
                    return status
                try:
                    await self.records.forget([task.api_key])
                except ServerUnreachableError as error:
                    return Status.failure(task, Failure.ENGINE_DOWN, str(error))
                if task.attempt >= self.max_retries:
                    return status
                task = fresh.retry(task)

    async def _outcome(self, task: Task) -> Status:
        try:
            return await self._execute(task)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit would end the event loop
            return _failed(task, error)

    async def _execute(self, task: Task) -> Status:
        kind: type[Any] = task.workflow_class
        if not issubclass(kind, WorkflowBase):
            raise TypeError(f"workflow {task.workflow} is no WorkflowBase")
        if self._idle[kind]:
            workflow = self._idle[kind].pop()
            workflow.reset(task)
        else:
            workflow = kind(task, self.engine, self.records)
        status = await workflow.execute()
        if not isinstance(status, Status):
            raise TypeError(f"{task.workflow}.execute returned {status!r}, it must be a Status")
        status = status.checked(task)
        # One that failed is not used again.
        if kind.reusable:
            self._idle[kind].append(workflow)
        return status


def signing_secret(given: str | None) -> str | None:
    """What runs' keys are signed with; None: they are not.

    Args:
        given: By the caller; None: what is in the environment.

    Raises:
        ValueError: It is too short.
    """
    secret = os.environ.get(SECRET_VARIABLE, "") if given is None else given
    return check_secret(secret) if secret or given is not None else None


class FreshRuns:
    """Gives each attempt a run number that its task has not used."""

    def __init__(self) -> None:
        self._used: defaultdict[tuple[str, str], set[int]] = defaultdict(set)

    def add(self, runs: Iterable[Task]) -> None:
        """The runs' numbers are used from now on; all of them, or if it raises, none.

        Raises:
            ValueError: One is used already.
        """
        added: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        for run in runs:
            task = run.batch_id, run.task_id
            if run.run_id in self._used[task] or run.run_id in added[task]:
                raise ValueError(
                    f"run {run.api_key} is given twice; give tasks different ids, or one task "
                    "repeat_times"
                )
            added[task].add(run.run_id)
        for task, numbers in added.items():
            self._used[task] |= numbers

    def retry(self, failed: Task) -> Task:
        """The task for another attempt: never under a key that has something of an earlier one."""
        used = self._used[failed.batch_id, failed.task_id]
        fresh = failed.retried(max(used, default=-1) + 1)
        used.add(fresh.run_id)
        return fresh


async def within(
    limit_s: float | None, work: Coroutine[Any, Any, Result]
) -> asyncio.Task[Result] | None:
    """Work, ended; None if its time ran out: it is cancelled then, as it is when the caller is.

    Not `asyncio.wait_for`, which waits without end for what refuses to be cancelled, and may
    swallow the caller's own cancellation (before Python 3.12).
    """
    running = asyncio.create_task(work)
    # Whoever is left behind may fail unheard.
    running.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        done, _ = await asyncio.wait({running}, timeout=limit_s)
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait({running}, timeout=_CANCEL_GRACE_S)
    return running if done else None


def _failed(task: Task, error: BaseException) -> Status:
    logger.debug("run %s failed", task.api_key, exc_info=error)
    if isinstance(error, ServerUnreachableError):
        return Status.failure(task, Failure.ENGINE_DOWN, described(error))
    if isinstance(error, NothingRecordedError):
        return Status.failure(task, Failure.NO_RECORDS, described(error))
    return Status.failure(task, Failure.ERROR, described(error) + _where(error))


def _where(error: BaseException) -> str:
    """The line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
