"""From tasks to training batches: finalizes, normalizes, hands over, and only then acknowledges."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

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
    """Completed runs that were not trained, by reason: `eval`, `no_reward`, `policy` or
    `small_group`."""
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


class RolloutCoordinator:
    """Carries batches from tasks to the trainer; several may be in flight.

    A batch is finalized when enough runs have succeeded or its time is up; what failed or comes
    late is deleted and refused. Its runs are normalized: runs without a reward, runs that a
    policy does not want and groups that are too small are dropped, and counted. Then the
    experiences, by task and run, go through the pipeline, and the leases are acknowledged once the
    last function has returned. If one raises, nothing is acknowledged: `finalize` may be called
    again, and if the process dies the records come back.

    Args:
        scheduler: Carries the runs out.
        pipeline: Functions of the experiences, called one after another (plain ones on a thread);
            the last one is the trainer, or puts them where it takes them from.
        enough: The share of a batch's runs that has to succeed; below 1, the slowest are cut off.
        timeout_s: Seconds that a batch may take; None leaves it to the time limits of the runs.
        require_reward: Drop runs of which no trajectory has a reward.
        keep: A policy: whether a completed run is to be trained.
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
        self._min_group = min_group
        self._sizes: Counter[str] = Counter()

    def submit(self, tasks: Iterable[Task], batch_id: str | int) -> int:
        """Begin a batch, or add to it; see `Scheduler.submit`."""
        runs = self._scheduler.submit(tasks, batch_id)
        self._sizes[str(batch_id)] += runs
        return runs

    async def finalize(self, batch_id: str | int) -> BatchReport:
        """Wait until a batch is enough, and see it through the pipeline.

        Raises:
            KeyError: There is no such batch.
            Exception: What a function of the pipeline raises.
        """
        wanted = math.ceil(self._enough * self._sizes[str(batch_id)])
        collected = await self._scheduler.collect(
            batch_id,
            min_runs=wanted if self._enough < 1 else None,
            timeout_s=self._timeout_s,
        )
        trained, dropped = self._normalized(collected)
        experiences = [each for run in trained for each in run.experiences]
        for step in self._pipeline:
            experiences = await _taken(step, experiences)
        unreachable = await self._scheduler.acknowledge(batch_id)
        del self._sizes[str(batch_id)]
        return BatchReport(
            batch_id=collected.batch_id,
            status=collected.status,
            retries=collected.retries,
            dropped=dict(dropped),
            trained_runs=len(trained),
            rewards=_rewards(collected.runs, is_eval=False),
            eval_rewards=_rewards(collected.runs, is_eval=True),
            tokens=sum(run.tokens for run in collected.runs),
            superseded=sum(run.superseded for run in collected.runs),
            unfinished=sum(run.unfinished for run in collected.runs),
            experiences=experiences,
            unreachable=unreachable,
        )

    async def abandon(self, batch_id: str | int) -> None:
        """Give a batch up; see `Scheduler.abandon`."""
        await self._scheduler.abandon(batch_id)
        del self._sizes[str(batch_id)]

    async def run(self, tasks: Iterable[Task], batch_id: str | int) -> BatchReport:
        """`submit` and `finalize`."""
        self.submit(tasks, batch_id)
        return await self.finalize(batch_id)

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
        name = getattr(step, "__qualname__", repr(step))
        raise TypeError(f"{name} returned {type(given).__name__}, it must return experiences")
    return given


def _rewards(runs: Iterable[CollectedRun], *, is_eval: bool) -> list[float]:
    rewards = (run.reward for run in runs if run.task.is_eval is is_eval)
    return [reward for reward in rewards if reward is not None]
