"""Replicas, and the kind of runner pool that the session tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest

from recorder_core.rollout import RunnerPool, Scheduler
from tests.core.rollout.engine import StandIn, stand_in
from tests.core.rollout.pools import pool_of

Schedulers = Callable[..., Any]


@pytest.fixture
def replica() -> Iterator[StandIn]:
    with stand_in() as replica:
        yield replica


@pytest.fixture
def replicas() -> Iterator[list[StandIn]]:
    with ExitStack() as stack:
        yield [stack.enter_context(stand_in()) for _ in range(2)]


@pytest.fixture
async def scheduling() -> AsyncIterator[Schedulers]:
    """Makes started schedulers, closed at the end: replicas, runners, and settings."""
    async with AsyncExitStack() as stack:

        async def start(
            *replicas: StandIn, runners: int = 1, pool: RunnerPool | None = None, **settings: Any
        ) -> Scheduler:
            settings = {"probe_s": 0.02, **settings}
            engines = [replica.engine for replica in replicas]
            scheduler = Scheduler(pool or pool_of(runners), engines, **settings)
            return await stack.enter_async_context(scheduler)

        yield start
