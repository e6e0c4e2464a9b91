"""Which runner carries out which run, and with how many others beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from recorder_core.rollout.pool import Runner


class Places:
    """Room for runs on runners; the least busy one is taken.

    A run that always ends its process must not take the others that live there along each time
    until they are given up. So a run that has lost its runner `n` times shares the next one with
    so few that no more than `per_runner / 2**n` are there: soon the guilty one is alone.

    Args:
        runners: The runners.
        per_runner: Runs that one carries out at once.
    """

    def __init__(self, runners: Iterable[Runner], per_runner: int) -> None:
        self._per_runner = per_runner
        self._taken: dict[Runner, list[int]] = {runner: [] for runner in runners}
        """For each run of a runner, how many there may be beside it, itself included."""
        self._kept_free: set[Runner] = set()
        """Those that a run waits for until fewer are there: else new runs would always be first."""
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def place(self, losses: int = 0, avoid: Runner | None = None) -> AsyncIterator[Runner]:
        """A runner for one run, as long as the block lasts.

        Args:
            losses: How often the run has lost its runner.
            avoid: The runner that it has lost; another one is better, if there is one.
        """
        most = max(1, self._per_runner >> losses)
        runner = await self._take(most, avoid)
        try:
            yield runner
        finally:
            self._taken[runner].remove(most)
            self._changed.set()

    async def _take(self, most: int, avoid: Runner | None) -> Runner:
        def price(runner: Runner) -> tuple[bool, int]:
            return runner is avoid, len(self._taken[runner])

        mine: Runner | None = None
        try:
            while True:
                open_ = [
                    each for each in self._taken if each is mine or each not in self._kept_free
                ]
                room = [
                    each
                    for each in open_
                    if len(self._taken[each]) < min([most, *self._taken[each]])
                ]
                if room:
                    found = min(room, key=price)
                    self._taken[found].append(most)
                    return found
                if mine is None and open_ and most < self._per_runner:
                    mine = min(open_, key=price)
                    self._kept_free.add(mine)
                self._changed.clear()
                await self._changed.wait()
        finally:
            if mine is not None:
                self._kept_free.remove(mine)
                self._changed.set()
