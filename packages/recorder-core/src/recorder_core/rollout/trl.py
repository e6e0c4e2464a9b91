"""Rollouts for TRL's `AsyncGRPOTrainer`: a scheduler plays while the trainer trains.

Needs TRL, and is imported by itself. Which releases are tested says `recorder_core.export.trl`.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from recorder_core.client import RecordClient
from recorder_core.errors import ExportError, NothingRecordedError
from recorder_core.experience import Experience
from recorder_core.export.advantages import Scale, group_advantages
from recorder_core.export.normal import rows
from recorder_core.export.rules import Rules
from recorder_core.export.trl import Samples, rollout_samples
from recorder_core.rollout.address import EngineAddress
from recorder_core.rollout.coordinator import BatchReport, RolloutCoordinator
from recorder_core.rollout.scheduler import Scheduler
from recorder_core.rollout.task import Task

_TICK_S = 1.0
"""Between two signs of life."""
_FULL_S = 0.1
"""Between two looks at a buffer that is full."""
_STOP_S = 60.0
"""For the runners to end; they are killed long before."""


class RecorderWorker:
    """A `rollout_worker` for `AsyncGRPOTrainer`: tasks, played as fast as their runs are trained.

    A task is a group: when the last of its runs has ended, those that are to be trained become
    samples with their advantages, all at once. Groups whose samples the trainer has no room for
    are still in flight, so that no others begin.

    TRL drops what is older than its `max_staleness`: it counts from the engine's version labels,
    which `labelled` sets.

    Args:
        scheduler: One that is not started: it is started with the training and closed with it, on
            the worker's own thread.
        tasks: Each a group of `repeat_times` runs. Where they end, TRL has to have reached its
            `max_steps`; it fetches a step's samples ahead.
        batch_id: What the record keys begin with, before the number of the group. By default
            another one each time, since engines refuse the keys of what was trained already.
        groups: How many are in flight at once.
        rules: What is done with what a trainer should not take.
        scale: Of the advantages.
        temperature: `args.temperature` of the trainer.
        max_samples: Samples that may wait for the trainer.
        **settings: Of the `RolloutCoordinator`: `enough`, `timeout_s`, `keep`, `min_group`, …

    Example:
        >>> worker = RecorderWorker(Scheduler(LocalRunnerPool(4), engines), tasks)
        >>> trainer = AsyncGRPOTrainer(model, ..., rollout_worker=worker)
        >>> trainer.weight_transfer = worker.labelled(trainer.weight_transfer)
        >>> trainer.train()
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tasks: Iterable[Task],
        *,
        batch_id: str | None = None,
        groups: int = 8,
        rules: Rules | None = None,
        scale: Scale = "std",
        temperature: float = 1.0,
        max_samples: int = 1024,
        **settings: Any,
    ) -> None:
        if groups < 1:
            raise ValueError(f"groups is {groups}, at least one has to be in flight")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(max_samples)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.model_version = 0
        """TRL's number of the weights that are live."""
        self._scheduler = scheduler
        self._coordinator = RolloutCoordinator(scheduler, [self._hand_over], **settings)
        self._tasks = tasks
        self._batch_id = batch_id or f"trl-{secrets.token_hex(4)}"
        self._groups = groups
        self._rules = rules
        self._scale = scale
        self._temperature = temperature
        self._numbers = itertools.count()
        self._fruitless = 0
        """Groups in a row of which no run ended well."""
        self._room = asyncio.Lock()
        self._alive_at = time.monotonic()
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._rolling: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._thread = threading.Thread(target=self._run, name="recorder-rollouts", daemon=True)

    def labelled(self, weight_transfer: Any) -> Any:
        """A `weight_transfer` that also sets every engine's version label to TRL's number.

        It does so before the engine goes on: what it samples from new weights has no version until
        they have a label, and can then not be trained.

        Args:
            weight_transfer: The trainer's own, or what it was given.

        Raises:
            ExportError: There is none: TRL sends only adapters, under names of their own.
        """
        if weight_transfer is None:
            raise ExportError(
                "the trainer has no weight_transfer: TRL names adapters itself; start the server "
                "with --recording-adapter-versions in place of labels"
            )
        return _Labelled(weight_transfer, self._scheduler.engines)

    def start(self) -> None:
        """Begin; TRL calls this once, after it has set the engine's weights."""
        self._alive_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Cut the runs off and close the scheduler; what was not trained is thrown away."""
        self._stopping.set()
        if self._rolling is not None and self._thread.is_alive():
            loop, rolling = self._rolling
            loop.call_soon_threadsafe(rolling.cancel)
        if self._thread.ident is not None:  # else it never was started
            self._thread.join(_STOP_S)

    def update_model_version(self, model_version: int) -> None:
        """TRL has set new weights."""
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """TRL finds nothing to train.

        A run that takes its time is no fault: the scheduler's own limits end it.

        Raises:
            RuntimeError: The rollouts have failed, are at their end, or have given no sign of life
                for `stale_after_s` seconds.
        """
        if self._failure is not None:
            raise RuntimeError(f"the rollouts have failed: {self._failure}") from self._failure
        if not self._thread.is_alive():
            raise RuntimeError("there are no more tasks, and nothing is left to train")
        silent = time.monotonic() - self._alive_at
        if silent > stale_after_s:
            raise RuntimeError(
                f"no sign of life from the rollouts for {silent:.0f} s: something holds up their "
                "event loop, such as the iterator of tasks or a listener of the scheduler"
            )

    def _run(self) -> None:
        try:
            asyncio.run(self._roll_out())
        except asyncio.CancelledError:
            pass  # stopped
        except Exception as error:  # noqa: BLE001 - raised again where TRL asks, on its thread
            self._failure = error

    async def _roll_out(self) -> None:
        rolling: Any = asyncio.current_task()
        self._rolling = asyncio.get_running_loop(), rolling
        if self._stopping.is_set():
            return
        async with self._scheduler:
            groups: set[asyncio.Task[None]] = set()
            tasks = enumerate(self._tasks)
            try:
                while self._begin(tasks, groups):
                    ended, groups = await asyncio.wait(
                        groups, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    self._alive_at = time.monotonic()
                    for each in ended:
                        each.result()
            finally:
                for each in groups:
                    each.cancel()
                await asyncio.gather(*groups, return_exceptions=True)

    def _begin(self, tasks: Iterator[tuple[int, Task]], groups: set[asyncio.Task[None]]) -> bool:
        """Have as many groups in flight as may be; whether there is one."""
        for number, task in itertools.islice(tasks, self._groups - len(groups)):
            groups.add(asyncio.create_task(self._play(number, task)))
        return bool(groups)

    async def _play(self, number: int, task: Task) -> None:
        report = await self._coordinator.run([task], f"{self._batch_id}/{number}")
        self.metrics_queue.put(_metrics(report))
        self._fruitless = 0 if report.status.completed_runs else self._fruitless + 1
        if self._fruitless > self._groups:  # not one bad task, but all
            raise NothingRecordedError(
                f"of {self._fruitless} groups in a row no run ended well, the last of them: "
                f"{report.status.message}"
            )

    async def _hand_over(self, experiences: list[Experience]) -> list[Experience]:
        """The last function of the pipeline: a group's samples, side by side."""
        samples = await asyncio.to_thread(self._samples, experiences)
        async with self._room:
            for sample in samples:
                while not self._stopping.is_set():
                    try:
                        self.rollout_buffer.put_nowait(sample)
                        break
                    except queue.Full:
                        await asyncio.sleep(_FULL_S)
        return experiences

    def _samples(self, experiences: list[Experience]) -> Samples:
        batch = group_advantages(rows(experiences, self._rules), scale=self._scale)
        self.metrics_queue.put(batch.report.metrics())
        return rollout_samples(
            batch, temperature=self._temperature, first_group=next(self._numbers)
        )


def _metrics(report: BatchReport) -> dict[str, float]:
    """A group's numbers, under a name that no trainer has."""
    return {f"recorder/{name}": value for name, value in report.metrics().items()}


class _Labelled:
    """A `weight_transfer`, and labels on the engines."""

    def __init__(self, transfer: Any, engines: Sequence[EngineAddress]) -> None:
        self._transfer = transfer
        self._engines = engines
        self._version = 0

    def init_weight_transfer(self) -> None:
        self._transfer.init_weight_transfer()

    def pause(self) -> None:
        self._transfer.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        self._transfer.send_weights(iterator)

    def resume(self) -> None:
        self._version += 1  # as TRL counts
        for engine in self._engines:
            with RecordClient(engine.base_url, admin_key=engine.admin_key) as records:
                records.set_version(self._version)
        self._transfer.resume()

    def destroy(self) -> None:
        self._transfer.destroy()
