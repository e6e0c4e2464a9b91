"""Spreads runs over runners and replicas, tries failed ones again, drains what they recorded."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import Self

from recorder_core.errors import (
    BatchAbandonedError,
    RecorderError,
    RunnerLostError,
    ServerUnreachableError,
)
from recorder_core.experience import Experience
from recorder_core.keys import KeyPrefix
from recorder_core.rollout.address import EngineAddress
from recorder_core.rollout.places import Places
from recorder_core.rollout.pool import Runner, RunnerPool
from recorder_core.rollout.replicas import Replica, Replicas
from recorder_core.rollout.runner import CLOCK_S, FreshRuns, signing_secret, within
from recorder_core.rollout.spool import Spool, Spooled
from recorder_core.rollout.status import Failure, Metrics, Status
from recorder_core.rollout.task import Task
from recorder_core.rollout.wire import RunRequest
from recorder_core.runs import Run
from recorder_core.trajectories import Forest, Keep

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
    missing: dict[str, int] = field(default_factory=dict)
    """Generations that the engine dropped or evicted, by reason: see `Run.missing`."""

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


@dataclass(eq=False)
class _Trail:
    """The runners that a run has lost, over all its attempts."""

    losses: int = 0
    last: Runner | None = None


@dataclass(eq=False)
class _Batch:
    id: str
    fresh: FreshRuns = field(default_factory=FreshRuns)
    tasks: set[str] = field(default_factory=set)
    lives: dict[asyncio.Task[CollectedRun | Status], Task] = field(default_factory=dict)
    """Runs that have not ended, and the attempt that each is at."""
    succeeded: list[CollectedRun] = field(default_factory=list)
    failed: list[Status] = field(default_factory=list)
    retries: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    open: bool = True
    """Whether runs may still be added."""
    collecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    collected: Collected | None = None

    @property
    def prefixes(self) -> list[str]:
        """Its keys, and no key of a batch whose id begins with this one's."""
        return [f"{self.id}/{task}" for task in sorted(self.tasks)]


class Scheduler:
    """Carries out batches of tasks on a pool of runners, against one or many engine replicas.

    - A run stays on one replica while it lives. When it ends well its records are drained from
      there, and it counts as successful once they are here: a replica that dies later takes nothing
      along. They are acknowledged at once, so that a batch may be many times what an engine holds.
    - A run that fails is tried again under a fresh run, if it may; what it left is deleted and its
      key blocked, so that nothing of it mixes with the retry.
    - A run that has lost its runner is tried again on another one, with fewer runs beside it each
      time: one that always ends its process does not take the others along until they are given
      up.
    - A replica that does not answer gets no runs until it does. A runner that died is started
      again; one that does not report a run within its time is ended.
    - If this process dies, the runs that it held in memory are lost with it. With a `spool` they
      are on the disk first, and a scheduler with the same one goes on from there when the batch is
      submitted again.

    Args:
        pool: The runners; closed by `close`.
        engines: The replicas.
        runs_per_runner: Runs that one runner carries out at once.
        max_retries: How often a failed run is tried again.
        max_losses: How often one is whose runner or engine was lost, which need not be its doing.
        run_timeout_s: Seconds that one run may take, where its task does not say.
        grace_s: Seconds more after which a runner that has not reported the run is ended.
        drain_wait_s: Seconds to wait for generations still in flight when a run has ended.
        lease_s: Seconds until records come back whose drain was not acknowledged.
        engine_wait_s: Seconds that a run waits for a replica when none is up.
        probe_s: Seconds between two questions to a replica that is down.
        spool: A folder for runs that ended well, until their batch is acknowledged.
        keep: Which generations the trajectories are made of; None: all. See `assemble`.
        secret: The servers' `--recording-secret`: agents are given signed keys, which last as long
            as their run may; by default from `RECORDER_SECRET`.
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
        engines: Iterable[EngineAddress],
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
        spool: str | Path | None = None,
        keep: Keep | None = None,
        secret: str | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self._pool = pool
        self._replicas = Replicas(engines, probe_s)
        self._slots = asyncio.Semaphore(runs_per_runner * len(pool.runners))
        self._places = Places(pool.runners, runs_per_runner)
        self._max_retries = max_retries
        self._max_losses = max_losses
        self._run_timeout_s = run_timeout_s
        self._grace_s = grace_s
        self._drain_wait_s = drain_wait_s
        self._lease_s = lease_s
        self._engine_wait_s = engine_wait_s
        self._spool = Spool(spool) if spool is not None else None
        self._keep = keep
        self._secret = signing_secret(secret)
        self._listeners = listeners
        self._batches: dict[str, _Batch] = {}
        self._finished: set[str] = set()
        self._abandoned: set[str] = set()

    @property
    def engines(self) -> list[EngineAddress]:
        """The replicas."""
        return [replica.engine for replica in self._replicas.all]

    async def start(self) -> None:
        """Ask the replicas whether they are up; one that is not may come up later.

        Raises:
            RecorderError: One answers, but does not record, or wants another admin key.
        """
        await self._replicas.start()

    def submit(self, tasks: Iterable[Task], batch_id: str | int) -> int:
        """Have every run of the tasks carried out, as part of a batch; more may be added later.

        All of them, or if it raises, none: then the others can be submitted again.

        Args:
            tasks: Each for `repeat_times` runs; their own `batch_id` is not used.
            batch_id: The batch.

        Returns:
            The number of runs.

        Raises:
            ValueError: The batch was collected or abandoned already, two runs have one key, a run
                has no valid one, or the keys of this batch and of another one in flight lie below
                one another.
        """
        asyncio.get_running_loop()  # where there is none, nothing of the call is to be kept
        name = str(batch_id)
        runs = [run for task in tasks for run in task.runs(name)]
        batch = self._batches.get(name) or _Batch(name)
        if not batch.open or name in self._finished:
            raise ValueError(
                f"batch {name!r} was collected already, or abandoned, and its keys are blocked: "
                "give each batch an id of its own"
            )
        for run in runs:
            _ = run.record_key  # made by copying, which checks nothing
        self._check_apart(batch, {run.task_id for run in runs})
        batch.fresh.add(runs)
        self._batches[name] = batch
        batch.tasks |= {run.task_id for run in runs}
        self._tell("submitted", name, len(runs))
        for run in runs:
            if not self._is_spooled(batch, run):
                life = asyncio.create_task(self._carry_out(batch, run))
                batch.lives[life] = run
                life.add_done_callback(partial(self._ended, batch))
        return len(runs)

    def _is_spooled(self, batch: _Batch, asked: Task) -> bool:
        """Whether a run ended well before this scheduler was started; it is in hand then."""
        found = self._spool.get(asked) if self._spool is not None else None
        if found is None:
            return False
        spooled, runs = found
        if spooled.task.run_id != asked.run_id:
            batch.fresh.add([spooled.task])
        batch.succeeded.append(self._collected(spooled, runs))
        self._tell("succeeded", batch.succeeded[-1])
        return True

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
            BatchAbandonedError: It was abandoned, before or in the meantime.
        """
        batch = self._batch(batch_id)
        async with batch.collecting:
            if batch.collected is None:
                await self._wait(batch, min_runs, timeout_s)
                await self._close(batch)
        self._batch_is_wanted(batch.id)
        assert batch.collected is not None
        return batch.collected

    async def acknowledge(self, batch_id: str | int) -> list[str]:
        """A collected batch is in good hands: the spool forgets it, and the engines what is late.

        Returns:
            The URLs of the replicas that could not be told. One that answers again later is
            cleaned then; one that started anew has nothing to forget.

        Raises:
            KeyError: There is no such batch.
            BatchAbandonedError: It was abandoned.
            ValueError: It is not collected.
        """
        batch = self._batch(batch_id)
        if batch.collected is None:
            raise ValueError(f"batch {batch.id!r} is not collected; call collect first")
        return await self._end(batch)

    async def abandon(self, batch_id: str | int) -> None:
        """Give a batch up: its runs are cut off, and its records deleted, drained ones too.

        Whoever is collecting it gets a `BatchAbandonedError`.

        Raises:
            KeyError: There is no such batch.
            BatchAbandonedError: It was abandoned already.
        """
        batch = self._batches.get(str(batch_id)) or self._batch(batch_id)
        self._abandoned.add(batch.id)
        await self._cut_off(batch)
        await self._end(batch)

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
        self._batch_is_wanted(str(batch_id))
        try:
            return self._batches[str(batch_id)]
        except KeyError:
            known = sorted(self._batches)
            raise KeyError(f"no batch {str(batch_id)!r} is in flight; there are {known}") from None

    def _batch_is_wanted(self, batch_id: str) -> None:
        if batch_id in self._abandoned:
            raise BatchAbandonedError(f"batch {batch_id!r} was abandoned, nothing is left of it")

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
            while batch.lives and (min_runs is None or len(batch.succeeded) < min_runs):
                batch.changed.clear()
                await batch.changed.wait()

        await within(timeout_s, enough())

    async def _close(self, batch: _Batch) -> None:
        await self._cut_off(batch)
        # The replies of several runs come in any order; a trainer sees the same one each time.
        runs = sorted(batch.succeeded, key=lambda run: run.task.record_key)
        succeeded = (Status.success(run.task, run.metrics) for run in runs)
        batch.collected = Collected(
            batch_id=batch.id,
            runs=runs,
            status=Status.of_all([*succeeded, *batch.failed]),
            retries=batch.retries,
        )
        self._tell("closed", batch.id)

    async def _cut_off(self, batch: _Batch) -> None:
        batch.open = False
        lives = list(batch.lives)
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)

    async def _end(self, batch: _Batch) -> list[str]:
        unreachable: set[str] = set()

        async def clean(replica: Replica) -> None:
            if not await self._forget(replica, batch.prefixes):
                unreachable.add(replica.engine.base_url)

        await asyncio.gather(*(clean(replica) for replica in self._replicas.all))
        if self._spool is not None:
            await asyncio.to_thread(self._spool.drop, batch.id)
        self._batches.pop(batch.id, None)  # another may have ended it in the meantime
        self._finished.add(batch.id)
        return sorted(unreachable)

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

    async def _carry_out(self, batch: _Batch, task: Task) -> CollectedRun | Status:
        """One run's life: attempts, until one ends well or no more are allowed."""
        life: Any = asyncio.current_task()
        asked = task
        losses = failures = 0
        trail = _Trail()
        async with self._slots:
            while True:
                replica = await self._replicas.acquire(self._engine_wait_s)
                if replica is None:
                    waited = f"no engine answered for {self._engine_wait_s:g} s"
                    return Status.failure(task, Failure.ENGINE_DOWN, waited)
                done = await self._attempt(asked, task, replica, trail)
                if isinstance(done, CollectedRun):
                    return done
                lost = not done.failures.keys().isdisjoint(_LOSSES)
                losses, failures = losses + lost, failures + (not lost)
                if failures > self._max_retries or losses > self._max_losses:
                    return done
                self._tell("failed", task, done, retried=True)
                batch.retries += 1
                batch.lives[life] = task = batch.fresh.retry(task)

    def _ended(self, batch: _Batch, life: asyncio.Task[CollectedRun | Status]) -> None:
        task = batch.lives.pop(life)
        if life.cancelled():
            done: CollectedRun | Status = Status.failure(
                task, Failure.CUT_OFF, "not ended when the batch was closed"
            )
        elif (error := life.exception()) is not None:
            # A fault here fails a run; it must not hang a batch.
            logger.error("run %s", task.api_key, exc_info=error)
            done = Status.failure(task, Failure.ERROR, f"{type(error).__name__}: {error}")
        else:
            done = life.result()
        if isinstance(done, CollectedRun):
            batch.succeeded.append(done)
            self._tell("succeeded", done)
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

    async def _attempt(
        self, asked: Task, task: Task, replica: Replica, trail: _Trail
    ) -> CollectedRun | Status:
        """One run on one replica: what it recorded, or why it failed."""
        key = task.api_key
        try:
            async with self._places.place(trail.losses, trail.last) as runner:
                instance = replica.instance
                status = await self._run(task, replica, runner)
            if Failure.RUNNER_LOST in status.failures:
                trail.losses, trail.last = trail.losses + 1, runner
            done: CollectedRun | Status = status
            if status.ok:
                done = await self._drain(asked, task, status, replica, instance)
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

    async def _run(self, task: Task, replica: Replica, runner: Runner) -> Status:
        limit = task.timeout_s or self._run_timeout_s
        signed = task.signed(self._secret, limit + self._grace_s + CLOCK_S)
        request = RunRequest(task=signed, engine=replica.engine, timeout_s=limit)
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

    async def _drain(
        self, asked: Task, task: Task, status: Status, replica: Replica, instance: str
    ) -> CollectedRun | Status:
        """Take what a run that ended well has recorded."""
        try:
            drained = await replica.drain(task, self._drain_wait_s, self._lease_s)
            spooled = Spooled(
                task=task,
                metrics=status.metrics[0] if status.metrics else {},
                unfinished=drained.pending,
            )
            run = await asyncio.to_thread(self._collected, spooled, drained.runs)
        except ServerUnreachableError as error:
            self._replicas.mark_down(replica)
            return Status.failure(task, Failure.ENGINE_DOWN, str(error))
        except RecorderError as error:
            return Status.failure(task, Failure.ERROR, f"not drained: {error}")
        if replica.instance != instance:
            anew = f"{replica.engine.base_url} was started anew while the run lived"
            return Status.failure(task, Failure.ENGINE_DOWN, anew)
        if not run.experiences:
            return Status.failure(task, Failure.NO_RECORDS, "nothing is recorded under its key")
        if self._spool is not None:
            try:
                await asyncio.to_thread(self._spool.put, asked, spooled, drained.runs)
            except OSError as error:
                logger.warning("%s is not spooled, and stays leased: %s", task.api_key, error)
                return run
        # In good hands: the engine is relieved of it, now or when it answers again.
        try:
            await replica.acknowledge(drained, task.api_key)
        except RecorderError as error:
            logger.warning(
                "%s is not relieved of %s: %s", replica.engine.base_url, task.api_key, error
            )
            await self._forget(replica, [task.api_key])
        return run

    def _collected(self, spooled: Spooled, runs: Sequence[Run]) -> CollectedRun:
        forest = Forest(runs, self._keep)
        return CollectedRun(
            spooled.task,
            spooled.metrics,
            forest.experiences(),
            superseded=len(forest.superseded),
            unfinished=spooled.unfinished,
            missing=dict(sum((Counter(run.missing) for run in runs), Counter())),
        )
