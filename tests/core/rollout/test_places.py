"""Where runs are carried out: evenly, and fewer together after each loss."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from recorder_core.rollout import LocalRunnerPool
from recorder_core.rollout.places import Places


async def test_runs_are_spread_evenly() -> None:
    pool = LocalRunnerPool(2)
    places = Places(pool.runners, 4)
    async with AsyncExitStack() as stack:
        taken = [await stack.enter_async_context(places.place()) for _ in range(8)]
    assert [taken.count(runner) for runner in pool.runners] == [4, 4]


async def test_another_runner_is_better_than_the_one_that_was_lost() -> None:
    first, second = LocalRunnerPool(2).runners
    places = Places([first, second], 4)
    async with places.place(1, avoid=first) as taken:
        assert taken is second
    async with Places([first], 4).place(1, avoid=first) as taken:
        assert taken is first


async def test_a_run_waits_until_few_enough_are_beside_it_and_new_ones_wait_behind_it() -> None:
    """A run that has lost its runner often is alone, however many others come.

    W1.
    """
    places = Places(LocalRunnerPool(1).runners, 4)
    order: list[str] = []

    async def run(name: str, losses: int, until: asyncio.Event) -> None:
        async with places.place(losses):
            order.append(name)
            await until.wait()

    first, alone, rest = asyncio.Event(), asyncio.Event(), asyncio.Event()
    runs: list[Any] = [run("first", 0, first), run("alone", 2, alone)]
    runs += [run("late", 0, rest), run("pair", 1, rest)]
    tasks = []
    for each in runs:
        tasks.append(asyncio.create_task(each))
        await asyncio.sleep(0)
    assert order == ["first"]
    first.set()
    await asyncio.sleep(0.01)
    assert order == ["first", "alone"]
    alone.set()
    await asyncio.sleep(0.01)
    assert sorted(order[2:]) == ["late", "pair"]
    rest.set()
    await asyncio.gather(*tasks)


async def test_a_run_that_is_cut_off_while_it_waits_holds_nothing() -> None:
    places = Places(LocalRunnerPool(1).runners, 4)
    async with places.place():
        waits = asyncio.create_task(places.place(2).__aenter__())
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        async with places.place():
            pass
