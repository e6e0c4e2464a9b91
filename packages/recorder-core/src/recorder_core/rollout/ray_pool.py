"""Runners on many hosts: Ray actors. Needs the extra `recorder-core[ray]`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from typing_extensions import Self

from recorder_core.errors import RunnerLostError
from recorder_core.rollout.messages import described
from recorder_core.rollout.status import Status
from recorder_core.rollout.wire import Reply, RunRequest
from recorder_core.rollout.worker import Worker

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
except ModuleNotFoundError as error:
    raise ImportError(
        "recorder_core.rollout.ray_pool needs Ray, which is not installed: "
        'pip install "recorder-core[ray]"'
    ) from error

_MAX_CONCURRENT = 1000
_NUMBER = 0
"""Of every reply: it comes back from the call that asked for it."""


class RayRunnerPool:
    """Runners that are Ray actors; `ray.init` decides on which cluster.

    Workflows are imported by name: the cluster's `runtime_env` must bring them.

    Args:
        count: How many actors.
        start_timeout_s: Seconds that one may take to start, waiting for room included.
        **options: Of the actors, e.g. `num_cpus=1` or `scheduling_strategy="SPREAD"`.

    Example:
        >>> ray.init("auto", runtime_env={"working_dir": "."})  # doctest: +SKIP
        >>> pool = RayRunnerPool(16, num_cpus=1)  # doctest: +SKIP
    """

    def __init__(self, count: int = 1, *, start_timeout_s: float = 300.0, **options: Any) -> None:
        if count < 1:
            raise ValueError(f"count is {count}, at least one runner is needed")
        self.runners: Sequence[RayRunner] = [
            RayRunner(start_timeout_s, options) for _ in range(count)
        ]

    async def close(self) -> None:
        """End the actors; Ray itself stays."""
        for runner in self.runners:
            runner.kill()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class RayRunner:
    """A runner that is a Ray actor; see `Runner`."""

    def __init__(self, start_timeout_s: float, options: dict[str, Any]) -> None:
        self._start_timeout_s = start_timeout_s
        self._options = {"max_concurrency": _MAX_CONCURRENT, **options}
        self._starting = asyncio.Lock()
        self._actor: Any = None

    async def start(self) -> None:
        """See `Runner.start`."""
        async with self._starting:
            if self._actor is not None:
                return
            actor = ray.remote(_Actor).options(**self._options).remote()
            try:
                await asyncio.wait_for(_result(actor.ready.remote()), self._start_timeout_s)
            except (RayError, asyncio.TimeoutError) as error:
                ray.kill(actor)
                raise RunnerLostError(
                    f"the Ray actor was not ready after {self._start_timeout_s:g} s "
                    f"({type(error).__name__}: {error}); has the cluster room for "
                    f"{self._options}?"
                ) from error
            self._actor = actor

    async def run(self, request: RunRequest) -> Status:
        """See `Runner.run`."""
        await self.start()
        actor = self._actor
        answer = actor.run.remote(request.model_dump_json())
        try:
            return _reply(await _result(answer)).status_of(request.task)
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except RayTaskError as error:  # of this call; the actor is there
            return Reply(number=_NUMBER, error=described(error)).status_of(request.task)
        except RayError as error:
            if self._actor is actor:
                self.kill()
            raise RunnerLostError(f"the Ray actor is lost: {error}") from error

    def kill(self) -> None:
        """See `Runner.kill`."""
        actor, self._actor = self._actor, None
        if actor is not None:
            with suppress(RayError):
                ray.kill(actor)


class _Actor:
    """What runs on the cluster."""

    def __init__(self) -> None:
        self._worker = Worker()

    async def ready(self) -> None:
        """Answered once the process is up."""

    async def run(self, request: str) -> bytes:
        return await self._worker.carry_out(_NUMBER, RunRequest.model_validate_json(request))


def _reply(line: bytes) -> Reply:
    return Reply.read(line) or Reply(number=_NUMBER, error="its reply cannot be read")


async def _result(reference: Any) -> Any:
    return await asyncio.wrap_future(reference.future())
