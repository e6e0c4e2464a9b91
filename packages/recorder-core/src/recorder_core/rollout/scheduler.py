"""Spreads runs over runners and replicas, tries failed ones again, drains what they recorded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from typing_extensions import Self

from recorder_core.client import Drained
from recorder_core.errors import RecorderError, RunnerLostError, ServerUnreachableError
from recorder_core.experience import Experience
from recorder_core.keys import KeyPrefix
from recorder_core.rollout.engine import Engine
from recorder_core.rollout.pool import Runner, RunnerPool
from recorder_core.rollout.replicas import Replica, Replicas
from recorder_core.rollout.runner import FreshRuns, within
from recorder_core.rollout.status import Failure, Metrics, Status
from recorder_core.rollout.task import Task
from recorder_core.rollout.worker import RunRequest

logger = logging.getLogger(__name__)

_LOSSES = {Failure.RUNNER_LOST, Failure.ENGINE_DOWN}


@dataclass(frozen=True, eq=False)
class CollectedRun:
    """A run that ended well, and what it recorded."""

    task: Task
    metrics: Metrics
    experiences: list[Experience] = field(repr=False)
    """Whole trajectories."""
    superseded: int = 0
    """Generations that were asked again, and are left out."""
    unfinished: int = 0
    """Generations still in flight when the run was drained: they come too late."""

    @property
    def reward(self) -> float | None:
        """The mean reward of its trajectories; None if none has one."""
        rewards = [each.reward for each in self.experiences if each.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def tokens(self) -> int:
        """Sampled tokens, each counted once."""
        masks = (each.action_mask for each in self.experiences)
        return sum(int(mask.sum()) for mask in masks if mask is not None)


@dataclass(frozen=True, eq=False)
class Collected:
    """What a batch has given."""

    batch_id: str
    runs: list[CollectedRun] = field(repr=False)
    """Those that ended well, by task and run."""
    status: Status
    """Of all runs: what became of each in the end."""
    retries: int
    """Attempts that failed and were made again."""


class Listener(Protocol):
    """Is told how batches go on; called on the event loop, so it must be quick."""

    def submitted(self, batch_id: str, runs: int) -> None:
        """So many runs more."""
        ...

    def succeeded(self, run: CollectedRun) -> None:
        """A run is in hand."""
        ...

    def failed(self, task: Task, status: Status, *, retried: bool) -> None:
        """An attempt failed."""
        ...

    def closed(self, batch_id: str) -> None:
        """The batch is collected."""
        ...


class _Drained(NamedTuple):
    """A run in hand, and what is to be acknowledged where."""

    run: CollectedRun
    replica: Replica
    lease: Drained


@dataclass(eq=False)
class _Batch:
    id: str
    fresh: FreshRuns = field(default_factory=FreshRuns)
    tasks: set[str] = field(default_factory=set)
    lives: dict[asyncio.Task[_Drained | Status], Task] = field(default_factory=dict)
    """Runs that have not ended, and the attempt that each is at."""
    drained: list[_Drained] = field(default_factory=list)
    failed: list[Status] = field(default_factory=list)
    retries: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    collecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    collected: Collected | None = None

    @property
    def prefixes(self) -> list[str]:
        """Its keys, and no key of a batch whose id begins with this one's."""
        return [f"{self.id}/{task}" for task in sorted(self.tasks)]


class Scheduler:
    """Carries out batches of tasks on a pool of runners, against one or many engine replicas.

    - A run stays on one replica while it lives. When it ends well its records are drained from
      there, with a lease, and it counts as successful once they are here: a replica that dies
      later takes nothing along.
    - A run that fails is tried again under a fresh run, if it may; what it left is deleted and its
      key blocked, so that nothing of it mixes with the retry.
    - A replica that does not answer gets no runs until it does. A runner that died is started
      again; one that does not report a run within its time is ended.
    - The leases are acknowledged by `acknowledge`. If this process dies before, the records come
      back.

    Args:
        pool: The runners; closed by `close`.
        engines: The replicas.
        runs_per_runner: Runs that one runner carries out at once.
        max_retries: How often a failed run is tried again.
        max_losses: How often one is whose runner or engine was lost, which need not be its doing.
        run_timeout_s: Seconds that one run may take, where its task does not say.
        grace_s: Seconds more after which a runner that has not reported the run is ended.
        drain_wait_s: Seconds to wait for generations still in flight when a run has ended.
        lease_s: Seconds until drained records come back unless acknowledged.
        engine_wait_s: Seconds that a run waits for a replica when none is up.
        probe_s: Seconds between two questions to a replica that is down.
        listeners: Are told how batches go on.

    Example:
        >>> async with Scheduler(LocalRunnerPool(4), engines) as scheduler:  # doctest: +SKIP
        ...     scheduler.submit(tasks, "0")
        ...     collected = await scheduler.collect("0", timeout_s=600)
        ...     train(collected.runs)
        ...     await scheduler.acknowledge("0")
    """

    def __init__(
        self,
        pool: RunnerPool,
        engines: Iterable[Engine],
        *,
        runs_per_runner: int = 32,
        max_retries: int = 2,
        max_losses: int = 10,
        run_timeout_s: float = 600.0,
        grace_s: float = 30.0,
        drain_wait_s: float = 10.0,
        lease_s: float = 3600.0,
        engine_wait_s: float = 300.0,
        probe_s: float = 1.0,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self._pool = pool
        self._replicas = Replicas(engines, probe_s)
        self._slots = asyncio.Semaphore(runs_per_runner * len(pool.runners))
        self._load: dict[Runner, int] = dict.fromkeys(pool.runners, 0)
        self._max_retries = max_retries
        self._max_losses = max_losses
        self._run_timeout_s = run_timeout_s
        self._grace_s = grace_s
        self._drain_wait_s = drain_wait_s
        self._lease_s = lease_s
        self._engine_wait_s = engine_wait_s
        self._listeners = listeners
        self._batches: dict[str, _Batch] = {}
        self._finished: set[str] = set()

    async def start(self) -> None:
        """Ask the replicas whether they are up; one that is not may come up later.

        Raises:
            RecorderError: One answers, but does not record, or wants another admin key.
        """
        await self._replicas.start()

    def submit(self, tasks: Iterable[Task], batch_id: str | int) -> int:
        """Have every run of the tasks carried out, as part of a batch; more may be added later.

        Args:
            tasks: Each for `repeat_times` runs; their own `batch_id` is not used.
            batch_id: The batch.

        Returns:
            The number of runs.

        Raises:
            ValueError: The batch was collected already, two runs have one key, or the keys of this
                batch and of another one in flight lie below one another.
        """
        name = str(batch_id)
        runs = [run for task in tasks for run in task.runs(name)]
        batch = self._batches.get(name) or _Batch(name)
        if batch.collected is not None or name in self._finished:
            raise ValueError(
                f"batch {name!r} was collected already, and its keys are blocked: give each "
                "batch an id of its own"
            )
        self._check_apart(batch, {run.task_id for run in runs})
        for run in runs:
            batch.fresh.add(run)
        self._batches[name] = batch
        batch.tasks |= {run.task_id for run in runs}
        for run in runs:
            life = asyncio.create_task(self._carry_out(batch, run))
            batch.lives[life] = run
            life.add_done_callback(partial(self._ended, batch))
        self._tell("submitted", name, len(runs))
        return len(runs)

    async def collect(
        self, batch_id: str | int, *, min_runs: int | None = None, timeout_s: float | None = None
    ) -> Collected:
        """Wait for a batch, and close it: runs that have not ended by then are cut off.

        Asked again, the answer is the same.

        Args:
            batch_id: The batch.
            min_runs: Successful runs that are enough; None waits for all runs to end.
            timeout_s: Seconds after which what is there is enough; None waits for the runs, each
                of which has a time limit of its own.

        Raises:
            KeyError: There is no such batch.
        """
        batch = self._batch(batch_id)
        async with batch.collecting:
            if batch.collected is None:
                await self._wait(batch, min_runs, timeout_s)
                await self._close(batch)
        assert batch.collected is not None
        return batch.collected

    async def acknowledge(self, batch_id: str | int) -> list[str]:
        """A collected batch is in good hands: the engines may forget it, and refuse what is late.

        Returns:
            The URLs of the replicas that could not be told. One that answers again later is
            cleaned then; one that started anew has nothing to forget.

        Raises:
            KeyError: There is no such batch.
            ValueError: It is not collected.
        """
        batch = self._batch(batch_id)
        if batch.collected is None:
            raise ValueError(f"batch {batch.id!r} is not collected; call collect first")
        acks = (self._settle(*each) for each in batch.drained)
        told = await asyncio.gather(*acks)
        return await self._end(batch, {url for url in told if url})

    async def abandon(self, batch_id: str | int) -> None:
        """Give a batch up: its runs are cut off, and its records deleted, drained ones too."""
        batch = self._batch(batch_id)
        await self._cut_off(batch)
        await self._end(batch, set())

    async def close(self) -> None:
        """Cut all runs off and end the runners.

        What was drained and not acknowledged comes back when the leases end.
        """
        for batch in list(self._batches.values()):
            await self._cut_off(batch)
        await self._pool.close()
        await self._replicas.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _batch(self, batch_id: str | int) -> _Batch:
        try:
            return self._batches[str(batch_id)]
        except KeyError:
            known = sorted(self._batches)
            raise KeyError(f"no batch {str(batch_id)!r} is in flight; there are {known}") from None

    def _check_apart(self, batch: _Batch, tasks: Collection[str]) -> None:
        """Cleaning up after one batch must not reach into another."""
        for other in self._batches.values():
            if other is batch:
                continue
            for upper, names, lower in (
                (batch.id, tasks, other.id),
                (other.id, other.tasks, batch.id),
            ):
                parts, below = KeyPrefix(upper).parts, KeyPrefix(lower).parts
                if below[: len(parts)] == parts and set(below[len(parts) :][:1]) & set(names):
                    raise ValueError(
                        f"the keys of batch {lower!r} lie below those of a task of batch "
                        f"{upper!r}, which is in flight too; name the task or the batch otherwise"
                    )

    async def _wait(self, batch: _Batch, min_runs: int | None, timeout_s: float | None) -> None:
        async def enough() -> None:
            while batch.lives and (min_runs is None or len(batch.drained) < min_runs):
                batch.changed.clear()
                await batch.changed.wait()

        await within(timeout_s, enough())

    async def _close(self, batch: _Batch) -> None:
        await self._cut_off(batch)
        # The replies of several runs come in any order; a trainer sees the same one each time.
        batch.drained.sort(key=lambda each: each.run.task.record_key)
        runs = [each.run for each in batch.drained]
        succeeded = (Status.success(run.task, run.metrics) for run in runs)
        batch.collected = Collected(
            batch_id=batch.id,
            runs=runs,
            status=Status.of_all([*succeeded, *batch.failed]),
            retries=batch.retries,
        )
        self._tell("closed", batch.id)

    async def _cut_off(self, batch: _Batch) -> None:
        lives = list(batch.lives)
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)

    async def _end(self, batch: _Batch, unreachable: set[str]) -> list[str]:
        async def clean(replica: Replica) -> None:
            if not await self._forget(replica, batch.prefixes):
                unreachable.add(replica.engine.base_url)

        await asyncio.gather(*(clean(replica) for replica in self._replicas.all))
        del self._batches[batch.id]
        self._finished.add(batch.id)
        return sorted(unreachable)

    async def _settle(self, run: CollectedRun, replica: Replica, drained: Drained) -> str | None:
        """Acknowledge one run's lease; the URL if the replica did not answer."""
        try:
            await replica.acknowledge(drained, run.task.api_key)
        except ServerUnreachableError:
            self._replicas.mark_down(replica)
            return replica.engine.base_url
        return None

    async def _forget(self, replica: Replica, prefixes: Sequence[str]) -> bool:
        """Whether the replica has deleted and blocked the prefixes, or it will when it is back."""
        try:
            await replica.forget(prefixes)
        except ServerUnreachableError:
            self._replicas.mark_down(replica)
        except RecorderError as error:
            logger.warning("%s is not cleaned of %s: %s", replica.engine.base_url, prefixes, error)
            return False
        return replica.up

    async def _carry_out(self, batch: _Batch, task: Task) -> _Drained | Status:
        """One run's life: attempts, until one ends well or no more are allowed."""
        life: Any = asyncio.current_task()
        losses = failures = 0
        async with self._slots:
            while True:
                replica = await self._replicas.acquire(self._engine_wait_s)
                if replica is None:
                    waited = f"no engine answered for {self._engine_wait_s:g} s"
                    return Status.failure(task, Failure.ENGINE_DOWN, waited)
                done = await self._attempt(task, replica)
                if isinstance(done, _Drained):
                    return done
                lost = not done.failures.keys().isdisjoint(_LOSSES)
                losses, failures = losses + lost, failures + (not lost)
                if failures > self._max_retries or losses > self._max_losses:
                    return done
                self._tell("failed", task, done, retried=True)
                batch.retries += 1
                batch.lives[life] = task = batch.fresh.retry(task)

    def _ended(self, batch: _Batch, life: asyncio.Task[_Drained | Status]) -> None:
        task = batch.lives.pop(life)
        if life.cancelled():
            done: _Drained | Status = Status.failure(
                task, Failure.CUT_OFF, "not ended when the batch was closed"
            )
        elif (error := life.exception()) is not None:
            # A fault here fails a run; it must not hang a batch.
            logger.error("run %s", task.api_key, exc_info=error)
            done = Status.failure(task, Failure.ERROR, f"{type(error).__name__}: {error}")
        else:
            done = life.result()
        if isinstance(done, _Drained):
            batch.drained.append(done)
            self._tell("succeeded", done.run)
        else:
            batch.failed.append(done)
            self._tell("failed", task, done, retried=False)
        batch.changed.set()

    def _tell(self, event: str, *args: Any, **kwargs: Any) -> None:
        for listener in self._listeners:
            try:
                getattr(listener, event)(*args, **kwargs)
            except Exception:  # noqa: PERF203 - a view must not cost a run
                logger.exception("%r failed at %r", listener, event)

    async def _attempt(self, task: Task, replica: Replica) -> _Drained | Status:
        """One run on one replica: what it recorded, or why it failed."""
        instance, key = replica.instance, task.api_key
        try:
            status = await self._run(task, replica)
            done: _Drained | Status = status
            if status.ok:
                done = await self._drain(task, status, replica, instance)
        except BaseException:
            # Cut off: nothing of it may be found later.
            await self._forget(replica, [key])
            raise
        finally:
            replica.load -= 1
        if isinstance(done, Status):
            await self._forget(replica, [key])
            if not replica.up and Failure.RUNNER_LOST not in done.failures:
                # What an agent makes of an engine that is gone is its own affair.
                return Status.failure(task, Failure.ENGINE_DOWN, done.message)
        return done

    async def _run(self, task: Task, replica: Replica) -> Status:
        runner = min(self._load, key=self._load.__getitem__)
        limit = task.timeout_s or self._run_timeout_s
        request = RunRequest(task=task, engine=replica.engine, timeout_s=limit)
        self._load[runner] += 1
        try:
            await runner.start()
            reported = await within(limit + self._grace_s, runner.run(request))
            if reported is not None:
                return reported.result()
            runner.kill()
            late = f"its runner did not report it {self._grace_s:g} s after its {limit:g} s"
            return Status.failure(task, Failure.TIMEOUT, f"{late}, and was ended")
        except RunnerLostError as error:
            return Status.failure(task, Failure.RUNNER_LOST, str(error))
        finally:
            self._load[runner] -= 1

    async def _drain(
        self, task: Task, status: Status, replica: Replica, instance: str
    ) -> _Drained | Status:
        """Take what a run that ended well has recorded."""
        try:
            drained = await replica.drain(task, self._drain_wait_s, self._lease_s)
            experiences = await asyncio.to_thread(lambda: drained.experiences)
        except ServerUnreachableError as error:
            self._replicas.mark_down(replica)
            return Status.failure(task, Failure.ENGINE_DOWN, str(error))
        except RecorderError as error:
            return Status.failure(task, Failure.ERROR, f"not drained: {error}")
        if replica.instance != instance:
            anew = f"{replica.engine.base_url} was started anew while the run lived"
            return Status.failure(task, Failure.ENGINE_DOWN, anew)
        if not experiences:
            return Status.failure(task, Failure.NO_RECORDS, "nothing is recorded under its key")
        run = CollectedRun(
            task,
            status.metrics[0] if status.metrics else {},
            experiences,
            superseded=len(drained.superseded),
            unfinished=drained.pending,
        )
        return _Drained(run, replica, drained)
