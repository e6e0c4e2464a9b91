"""From tasks to training batches: finalizes, normalizes, hands over, and only then acknowledges."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from recorder_core.errors import BatchAbandonedError
from recorder_core.experience import Experience
from recorder_core.rollout.scheduler import Collected, CollectedRun, Scheduler
from recorder_core.rollout.status import Metrics, Status
from recorder_core.rollout.task import Task

Step = Callable[[list[Experience]], list[Experience] | Awaitable[list[Experience]]]
"""A function of the pipeline: takes a batch's experiences, and gives those for the next one."""


@dataclass(frozen=True, eq=False)
class BatchReport:
    """What became of a batch."""

    batch_id: str
    status: Status
    """Of every run: `completed_runs + sum(failures.values()) == total_runs`."""
    retries: int
    """Attempts that failed and were made again."""
    dropped: dict[str, int]
    """Completed runs that were not trained, by reason: `eval`, `incomplete`, `no_reward`, `policy`
    or `small_group`."""
    trained_runs: int
    """Completed runs whose experiences went into the pipeline."""
    rewards: list[float] = field(repr=False)
    """Of the completed runs that have one, those for evaluation left out."""
    eval_rewards: list[float] = field(repr=False)
    tokens: int
    """Sampled tokens of the completed runs."""
    superseded: int
    """Generations of the completed runs that were asked again, and are left out."""
    unfinished: int
    """Generations that were still in flight when their runs had ended: they came too late."""
    experiences: list[Experience] = field(repr=False)
    """What the pipeline made of the batch."""
    unreachable: list[str]
    """Replicas that could not be told to forget the batch."""

    def metrics(self) -> Metrics:
        """The batch in numbers, for any tracker: counts, and means over runs."""
        status = self.status
        numbers: Metrics = {
            "runs/total": status.total_runs,
            "runs/completed": status.completed_runs,
            "runs/retried": self.retries,
            "runs/trained": self.trained_runs,
            "experiences": len(self.experiences),
            "tokens": self.tokens,
            "generations/superseded": self.superseded,
            "generations/unfinished": self.unfinished,
        }
        numbers |= {f"runs/failed/{reason.value}": n for reason, n in status.failures.items()}
        numbers |= {f"runs/dropped/{reason}": n for reason, n in self.dropped.items()}
        means = {"reward": self.rewards, "eval/reward": self.eval_rewards}
        for each in status.metrics:
            for name, value in each.items():
                means.setdefault(f"workflow/{name}", []).append(value)
        return numbers | {name: sum(all_) / len(all_) for name, all_ in means.items() if all_}


@dataclass(eq=False)
class _Batch:
    """One for all who ask about a batch."""

    runs: int = 0
    pipeline: asyncio.Task[BatchReport] | None = None
    """Under way, or ended and not heard of yet."""
    trained: list[Experience] | None = None
    """What the pipeline made of it; it does so once."""
    abandoned: bool = False


class RolloutCoordinator:
    """Carries batches from tasks to the trainer; several may be in flight.

    A batch is finalized when enough runs have succeeded or its time is up; what failed or comes
    late is deleted and refused. Its runs are normalized: runs without a reward, runs that a
    policy does not want and groups that are too small are dropped, and counted. Then the
    experiences, by task and run, go through the pipeline, and the leases are acknowledged once the
    last function has returned. If one raises, nothing is acknowledged: `finalize` may be called
    again, and if the process dies the records come back. All calls are made on one event loop.

    Args:
        scheduler: Carries the runs out.
        pipeline: Functions of the experiences, called one after another (plain ones on a thread);
            the last one is the trainer, or puts them where it takes them from.
        enough: The share of a batch's runs that has to succeed; below 1, the slowest are cut off.
        timeout_s: Seconds that a batch may take; None leaves it to the time limits of the runs.
        require_reward: Drop runs of which no trajectory has a reward.
        keep: A policy: whether a completed run is to be trained.
        keep_incomplete: Train runs of which the engine dropped or evicted generations.
        min_group: Drop tasks with fewer runs than this.

    Example:
        >>> coordinator = RolloutCoordinator(scheduler, [advantages, trainer.step], min_group=2)
        >>> coordinator.submit(tasks, "0")  # doctest: +SKIP
        >>> coordinator.submit(more_tasks, "1")  # doctest: +SKIP
        >>> tracker.log((await coordinator.finalize("0")).metrics())  # doctest: +SKIP
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Sequence[Step] = (),
        *,
        enough: float = 1.0,
        timeout_s: float | None = None,
        require_reward: bool = True,
        keep: Callable[[CollectedRun], bool] | None = None,
        keep_incomplete: bool = False,
        min_group: int = 1,
    ) -> None:
        if not 0 < enough <= 1:
            raise ValueError(f"enough is {enough}, it must be a share of the runs: 0 < enough <= 1")
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._enough = enough
        self._timeout_s = timeout_s
        self._require_reward = require_reward
        self._keep = keep
        self._keep_incomplete = keep_incomplete
        self._min_group = min_group
        self._batches: dict[str, _Batch] = {}

    def submit(self, tasks: Iterable[Task], batch_id: str | int) -> int:
        """Begin a batch, or add to it; see `Scheduler.submit`."""
        runs = self._scheduler.submit(tasks, batch_id)
        self._batches.setdefault(str(batch_id), _Batch()).runs += runs
        return runs

    async def finalize(self, batch_id: str | int) -> BatchReport:
        """Wait until a batch is enough, and see it through the pipeline.

        Cancelled (by a time limit outside, say) while runs are waited for, nothing has happened
        yet. Once the pipeline has begun it goes on to its end all the same, since a function on a
        thread cannot be stopped, and what came of it is given to whoever asks next: a batch never
        has two trainer steps at once. When a function has raised, asking again begins anew.

        Raises:
            KeyError: There is no such batch, or its report was given already.
            BatchAbandonedError: It was abandoned, before or in the meantime.
            Exception: What a function of the pipeline raises.
        """
        name = str(batch_id)
        batch = self._batches.setdefault(name, _Batch())
        if batch.pipeline is None:
            try:
                collected = await self._scheduler.collect(
                    name,
                    min_runs=math.ceil(self._enough * batch.runs) if self._enough < 1 else None,
                    timeout_s=self._timeout_s,
                )
            except LookupError:
                self._batches.pop(name, None)
                raise
            if batch.pipeline is None:  # else another caller was first
                batch.pipeline = asyncio.create_task(self._see_through(batch, collected))
        pipeline = batch.pipeline
        await asyncio.wait({pipeline})
        if not pipeline.cancelled() and pipeline.exception() is None:
            self._batches.pop(name, None)
        elif batch.pipeline is pipeline:
            batch.pipeline = None
        return pipeline.result()

    async def abandon(self, batch_id: str | int) -> bool:
        """Give a batch up: no function of the pipeline begins any more; see `Scheduler.abandon`.

        A function that is running cannot be stopped; it is waited for.

        Returns:
            Whether this was in time. False if the last function had begun already and has ended
            well: then the batch is trained, and `finalize` gives its report.

        Raises:
            KeyError: There is no such batch.
            BatchAbandonedError: It was abandoned already.
        """
        name = str(batch_id)
        batch = self._batches.get(name) or _Batch()
        batch.abandoned = True
        if batch.pipeline is not None:
            await asyncio.wait({batch.pipeline})
        if batch.trained is not None:
            return False
        await self._scheduler.abandon(name)
        self._batches.pop(name, None)
        return True

    async def run(self, tasks: Iterable[Task], batch_id: str | int) -> BatchReport:
        """`submit` and `finalize`."""
        self.submit(tasks, batch_id)
        return await self.finalize(batch_id)

    async def _see_through(self, batch: _Batch, collected: Collected) -> BatchReport:
        """The pipeline, and the acknowledgement of what it has taken."""
        kept, dropped = self._normalized(collected)
        if batch.trained is None:
            experiences = [each for run in kept for each in run.experiences]
            for step in self._pipeline:
                if batch.abandoned:
                    raise BatchAbandonedError(
                        f"batch {collected.batch_id!r} was abandoned before {_name(step)} began"
                    )
                experiences = await _taken(step, experiences)
            batch.trained = experiences
        unreachable = await self._scheduler.acknowledge(collected.batch_id)
        return BatchReport(
            batch_id=collected.batch_id,
            status=collected.status,
            retries=collected.retries,
            dropped=dict(dropped),
            trained_runs=len(kept),
            rewards=_rewards(collected.runs, is_eval=False),
            eval_rewards=_rewards(collected.runs, is_eval=True),
            tokens=sum(run.tokens for run in collected.runs),
            superseded=sum(run.superseded for run in collected.runs),
            unfinished=sum(run.unfinished for run in collected.runs),
            experiences=batch.trained,
            unreachable=unreachable,
        )

    def _normalized(self, collected: Collected) -> tuple[list[CollectedRun], Counter[str]]:
        """The runs to be trained, and how many are dropped by reason."""
        dropped: Counter[str] = Counter()
        kept: list[CollectedRun] = []
        for run in collected.runs:
            reason = self._reason_to_drop(run)
            if reason:
                dropped[reason] += 1
            else:
                kept.append(run)
        groups = Counter(run.task.task_id for run in kept)
        small = {task for task, runs in groups.items() if runs < self._min_group}
        if small:
            dropped["small_group"] = sum(groups[task] for task in small)
        return [run for run in kept if run.task.task_id not in small], dropped

    def _reason_to_drop(self, run: CollectedRun) -> str:
        if run.task.is_eval:
            return "eval"
        if run.missing and not self._keep_incomplete:
            return "incomplete"
        if self._require_reward and run.reward is None:
            return "no_reward"
        return "" if self._keep is None or self._keep(run) else "policy"


def by_task(experiences: Iterable[Experience]) -> dict[str, list[Experience]]:
    """The experiences of each task: a group, as GRPO compares them."""
    groups: dict[str, list[Experience]] = {}
    for each in experiences:
        groups.setdefault(each.eid.task, []).append(each)
    return groups


async def _taken(step: Step, experiences: list[Experience]) -> list[Experience]:
    """What a function gives; a plain one does not hold up the runs on the event loop."""
    if inspect.iscoroutinefunction(step):
        given = await step(experiences)
    else:
        given = await asyncio.to_thread(step, experiences)
        given = await given if inspect.isawaitable(given) else given
    if not isinstance(given, list):
        raise TypeError(
            f"{_name(step)} returned {type(given).__name__}, it must return experiences"
        )
    return given


def _name(step: Step) -> str:
    return str(getattr(step, "__qualname__", repr(step)))


def _rewards(runs: Iterable[CollectedRun], *, is_eval: bool) -> list[float]:
    rewards = (run.reward for run in runs if run.task.is_eval is is_eval)
    return [reward for reward in rewards if reward is not None]
