"""The engine's replicas: which are up, which is least busy, what is to be cleaned on each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable

from recorder_core.client import Drained
from recorder_core.errors import LeaseError, RecorderError, ServerUnreachableError
from recorder_core.rollout.address import EngineAddress
from recorder_core.rollout.runner import within
from recorder_core.rollout.task import Task

logger = logging.getLogger(__name__)


class Replica:
    """One engine, as the scheduler sees it."""

    def __init__(self, engine: EngineAddress) -> None:
        self.engine = engine
        self.records = engine.records()
        self.load = 0
        """Runs that live here."""
        self.up = False
        self.instance = ""
        """Which start of the engine this is."""
        self._left_over: set[str] = set()
        """Prefixes to be forgotten once it answers again."""

    async def drain(self, task: Task, wait_s: float, lease_s: float) -> Drained:
        """Take what a run has recorded here; also learns which start of the engine this is."""
        drained = await self.records.lease(key=task.record_key, wait_s=wait_s, lease_s=lease_s)
        await self._learn()
        return drained

    async def acknowledge(self, drained: Drained, key: str) -> None:
        """Drained experiences are in good hands: they must not come back."""
        try:
            await self.records.ack(drained)
        except LeaseError:
            # The lease ended, or the engine did: what has come back is ours already.
            await self.records.delete(key)

    async def forget(self, prefixes: Collection[str]) -> None:
        """Delete and block prefixes, now or when the engine answers again."""
        self._left_over.update(prefixes)
        if self.up:
            await self._clean(prefixes)

    async def probe(self) -> None:
        """Find out whether it answers.

        Raises:
            RecorderError: It answers, but not as an engine that records for us.
        """
        try:
            await self._learn()
            await self._clean(sorted(self._left_over))
            self.up = True
        except ServerUnreachableError:
            self.up = False

    async def _learn(self) -> None:
        (stats,) = (await self.records.stats()).values()
        self.instance = stats.recorder.instance

    async def _clean(self, prefixes: Collection[str]) -> None:
        await self.records.forget(prefixes)
        self._left_over.difference_update(prefixes)


class Replicas:
    """All replicas; those that are down are asked again until they answer.

    Args:
        engines: The replicas.
        probe_s: Seconds between two questions to one that is down.
    """

    def __init__(self, engines: Iterable[EngineAddress], probe_s: float) -> None:
        self.all = [Replica(engine) for engine in engines]
        if not self.all:
            raise ValueError("engines is empty; at least one replica is needed")
        self._probe_s = probe_s
        self._came_up = asyncio.Event()
        self._probing: dict[Replica, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Ask every replica once.

        Raises:
            RecorderError: One answers, but not as an engine that records for us.
        """
        await asyncio.gather(*(replica.probe() for replica in self.all))
        for replica in self.all:
            if not replica.up:
                self.mark_down(replica)

    async def acquire(self, wait_s: float) -> Replica | None:
        """The least busy replica that is up, for one run; None if none came up in time."""
        if self._best() is None:
            await within(wait_s, self._until_any_is_up())
        found = self._best()
        if found is not None:
            found.load += 1
        return found

    def mark_down(self, replica: Replica) -> None:
        """It does not answer: no run goes there until it does."""
        replica.up = False
        if replica not in self._probing:
            logger.warning("engine %s does not answer", replica.engine.base_url)
            self._probing[replica] = asyncio.create_task(self._until_up(replica))

    async def close(self) -> None:
        """Ask no more; close the connections."""
        for probing in self._probing.values():
            probing.cancel()
        await asyncio.gather(*self._probing.values(), return_exceptions=True)
        await asyncio.gather(*(replica.records.close() for replica in self.all))

    async def _until_up(self, replica: Replica) -> None:
        try:
            while not replica.up:
                await asyncio.sleep(self._probe_s)
                try:
                    await replica.probe()
                except RecorderError as error:  # e.g. a proxy that answers for it
                    logger.warning("engine %s: %s", replica.engine.base_url, error)
            logger.warning("engine %s answers again", replica.engine.base_url)
        finally:
            del self._probing[replica]
        self._came_up.set()

    async def _until_any_is_up(self) -> None:
        while self._best() is None:
            self._came_up.clear()
            await self._came_up.wait()

    def _best(self) -> Replica | None:
        up = (replica for replica in self.all if replica.up)
        return min(up, key=lambda replica: replica.load, default=None)
