"""A live view of batches in flight. Needs the extra `recorder-core[rollout]`."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from recorder_core.rollout.scheduler import CollectedRun
from recorder_core.rollout.status import Metrics, Status
from recorder_core.rollout.task import Task

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn
except ModuleNotFoundError as error:
    raise ImportError(
        "recorder_core.rollout.progress needs rich, which is not installed: "
        'pip install "recorder-core[rollout]"'
    ) from error


@dataclass
class Counts:
    """A batch so far."""

    runs: int = 0
    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    tokens: int = 0
    rewarded: int = 0
    reward_sum: float = 0.0

    def metrics(self) -> Metrics:
        """As numbers for any tracker."""
        numbers: Metrics = {
            "runs/total": self.runs,
            "runs/succeeded": self.succeeded,
            "runs/failed": self.failed,
            "runs/retried": self.retried,
            "tokens": self.tokens,
        }
        return numbers | ({"reward": self.reward_sum / self.rewarded} if self.rewarded else {})

    def __str__(self) -> str:
        reward = f"{self.reward_sum / self.rewarded:.3f}" if self.rewarded else "-"
        return (
            f"failed {self.failed}  retried {self.retried}  tokens {self.tokens:,}  reward {reward}"
        )


class LiveProgress:
    """Shows each batch while it is in flight, and a line of it after; a scheduler's listener.

    Prints nothing where there is no terminal; `counts` is kept all the same.

    Args:
        console: Where to; standard error by default.

    Example:
        >>> with LiveProgress() as progress:  # doctest: +SKIP
        ...     scheduler = Scheduler(pool, engines, listeners=[progress])
    """

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self.counts: dict[str, Counts] = {}
        """By batch, those in flight."""
        self._lines: dict[str, TaskID] = {}
        self._progress = Progress(
            "batch {task.description}",
            BarColumn(),
            MofNCompleteColumn(),
            "{task.fields[counts]}",
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def submitted(self, batch_id: str, runs: int) -> None:
        """See `Listener`."""
        counts = self.counts.setdefault(batch_id, Counts())
        counts.runs += runs
        if batch_id not in self._lines:
            self._lines[batch_id] = self._progress.add_task(batch_id, total=None, counts=counts)
        self._show(batch_id)

    def succeeded(self, run: CollectedRun) -> None:
        """See `Listener`."""
        counts = self.counts[run.task.batch_id]
        counts.succeeded += 1
        counts.tokens += run.tokens
        if run.reward is not None:
            counts.rewarded += 1
            counts.reward_sum += run.reward
        self._show(run.task.batch_id)

    def failed(self, task: Task, status: Status, *, retried: bool) -> None:
        """See `Listener`."""
        counts = self.counts[task.batch_id]
        if retried:
            counts.retried += 1
        else:
            counts.failed += 1
        self._show(task.batch_id)

    def closed(self, batch_id: str) -> None:
        """See `Listener`."""
        counts = self.counts.pop(batch_id)
        self._progress.remove_task(self._lines.pop(batch_id))
        if not self._progress.disable:
            done = f"{counts.succeeded}/{counts.runs}"
            self._progress.console.print(f"batch {batch_id}  {done}  {counts}", highlight=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _show(self, batch_id: str) -> None:
        counts = self.counts[batch_id]
        done = counts.succeeded + counts.failed
        self._progress.update(self._lines[batch_id], completed=done, total=counts.runs)
