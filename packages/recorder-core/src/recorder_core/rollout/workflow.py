"""Workflows: how one task is played. Subclass one of the two kinds, or `WorkflowBase` itself."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from recorder_core.client import AsyncRecordClient
from recorder_core.errors import NothingRecordedError
from recorder_core.experience import Experience
from recorder_core.rollout.address import EngineAddress
from recorder_core.rollout.handmade import records_of
from recorder_core.rollout.status import Metrics, Status
from recorder_core.rollout.task import Task
from recorder_core.runs import SampleId

Result = TypeVar("Result")


class WorkflowBase(ABC):
    """Carries out one run of a task against one engine.

    Args:
        task: One run.
        engine: Where it is to be carried out, from beginning to end.
        records: The engine's `/records`.
    """

    reusable: ClassVar[bool] = False
    """Whether `reset` makes an instance as good as new: runs then share what is slow to set up."""

    def __init__(self, task: Task, engine: EngineAddress, records: AsyncRecordClient) -> None:
        self.task = task
        self.engine = engine
        self.records = records

    def reset(self, task: Task) -> None:
        """Get ready for another run on the same engine."""
        self.task = task

    @abstractmethod
    async def execute(self) -> Status:
        """Carry the run out; what goes wrong is raised."""


class WorkflowWithRecording(WorkflowBase):
    """An agent that the engine records: it plays, and writes its reward.

    The agent is any program, here or in a container: all it needs is `base_url`, `api_key` and
    `model_name`.

    Example:
        >>> class Capital(WorkflowWithRecording):
        ...     async def run_async(self):
        ...         answer = await ask(self.base_url, self.api_key, self.model_name)
        ...         await self.update_reward(float("Paris" in answer))
        ...         return {"length": len(answer)}
    """

    @property
    def base_url(self) -> str:
        """For an OpenAI client."""
        return self.engine.agent_url

    @property
    def api_key(self) -> str:
        """For an OpenAI client: what makes the run recorded, as this run."""
        return self.engine.api_key(self.task)

    @property
    def model_name(self) -> str:
        """For an OpenAI client."""
        return self.engine.model_name

    @abstractmethod
    async def run_async(self) -> Metrics | None:
        """Play the task, and call `update_reward`; returns what is to be measured of the run."""

    async def update_reward(
        self,
        reward: float,
        info: Mapping[str, Any] | None = None,
        sample_ids: Collection[SampleId] | None = None,
    ) -> int:
        """Write the reward of the run, or of some of its generations.

        Args:
            reward: The reward.
            info: Notes, merged into the records' info.
            sample_ids: Only these generations: the `id` of the API's reply, `(id, index)` for one
                of its choices, or a record's own. None means the run: generations that end later
                have the reward too.

        Returns:
            The number of generations that have it now.

        Raises:
            NothingRecordedError: One of the `sample_ids` is not recorded under this run.
        """
        return await self.records.update_reward(
            self.task.record_key, reward, info=info, sample_ids=sample_ids
        )

    async def execute(self) -> Status:
        """Play, and see that the engine has recorded it."""
        metrics = await self.run_async()
        key = self.task.record_key
        found = await self.records.keys(key)
        if not any(each.records + each.pending for each in found):
            raise NothingRecordedError(
                f"the run ended well, but nothing is recorded under {key}; did the agent send "
                f"{key} as its api_key, to {self.base_url}?"
            )
        return Status.success(self.task, metrics)


class Workflow(WorkflowBase):
    """A workflow that builds its experiences by hand, and returns them.

    They are stored under the run's key, in place of what the engine has recorded there, and are
    drained like recorded ones. Override `run`, which gets a thread of its own, or `run_async`.
    """

    def run(self) -> list[Experience]:
        """Play the task on a thread; returns the experiences."""
        raise NotImplementedError(f"{type(self).__name__} has neither run nor run_async")

    async def run_async(self) -> list[Experience]:
        """Play the task; returns the experiences."""
        return await _on_a_thread(self.run)

    async def execute(self) -> Status:
        """Play, and store what was built."""
        experiences = await self.run_async()
        key = self.task.record_key
        if not experiences:
            raise NothingRecordedError(f"the run ended well, but gave no experience for {key}")
        await self.records.overwrite(key, records_of(experiences, key))
        return Status.success(self.task, _means(experiences))


def _means(experiences: Collection[Experience]) -> Metrics:
    values: dict[str, list[float]] = {}
    for experience in experiences:
        for name, value in experience.metrics.items():
            values.setdefault(name, []).append(float(value))
    return {name: sum(each) / len(each) for name, each in values.items()}


async def _on_a_thread(function: Callable[[], Result]) -> Result:
    """Run on a thread of its own, which can be left behind when it hangs.

    The loop's own executor has few threads, and waits for all of them at the end.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Result | None, BaseException | None]] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if not outcome.done():  # not given up
            # The error as a value: some that a thread can raise, a future cannot hold.
            outcome.set_result((result, error))

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # noqa: BLE001 - raised again where it is waited for
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name="workflow", daemon=True).start()
    result, error = await outcome
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
