"""What drains and readers do to an engine's server: its event loop, its streams, its memory.

The server, the clients that stream, and those that read are processes of their own. On few cores
they stand in each other's way: what is late without a drain is shown beside what is late with one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import numpy as np

from benchmarks.harness import Row, main, microseconds, no_gc, progress, row
from benchmarks.served import Served, forget_most, memory, serving
from recorder_core.client import AsyncRecordClient, RecordClient
from recorder_core.protocol import MAX_PREFIXES

STREAMS = 64
PROMPT = RESPONSE = 4096
READERS = 2
TARGET_STALL_MS = 20.0
TARGET_GAP = 1.2
"""The 99th percentile of the gaps between pieces, against that without a drain."""
TARGET_EXTRA_MIB = 64.0
TARGET_REWARD_MS = 10.0
TARGET_WAITING_PERCENT = 1.0
_TICKS = os.sysconf("SC_CLK_TCK")


def _stream(url: str, pipe: Connection) -> None:
    """Read streams; whenever asked, tell the gaps between pieces since the last time."""
    gaps: list[float] = []

    async def one(http: httpx.AsyncClient) -> None:
        async with http.stream("GET", "/stream") as response:
            last = time.perf_counter()
            async for _ in response.aiter_raw():
                now = time.perf_counter()
                gaps.append((now - last) * 1000)
                last = now

    async def answer() -> None:
        while await asyncio.to_thread(pipe.recv):
            told = list(gaps)
            gaps.clear()
            pipe.send(told)

    async def every() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            streams = [asyncio.create_task(one(http)) for _ in range(STREAMS)]
            await answer()
            for each in streams:
                each.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    asyncio.run(every())


class Streams:
    """Clients that stream in a process of their own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def gaps_ms(self) -> list[float]:
        """The gaps between pieces since this was last asked."""
        self._pipe.send(True)
        gaps: list[float] = self._pipe.recv()
        return gaps


@contextmanager
def streaming(url: str) -> Iterator[Streams]:
    """Have clients stream meanwhile."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_stream, args=(url, theirs), daemon=True)
    process.start()
    try:
        yield Streams(ours)
    finally:
        ours.send(False)
        process.join()


def _drain(url: str) -> tuple[float, int]:
    """Drain everything; returns how long that took, and the memory beyond what is kept."""
    with RecordClient(url, timeout=600) as client, no_gc():
        before = memory()
        forget_most()
        begin = time.perf_counter()
        drained = client.lease()
        took = time.perf_counter() - begin
        extra = memory(most=True) - before - sum(run.nbytes for run in drained.runs)
        client.release(drained)
        return took, extra


def drain_rows(server: Served, size: int, rounds: int, quiet_s: float) -> list[Row]:
    """A large drain beside clients that stream."""
    held = server.call("fill", max(size // 83_000, 1), PROMPT, RESPONSE)
    stalls: dict[bool, list[float]] = {False: [], True: []}
    gaps: dict[bool, list[float]] = {False: [], True: []}
    times, server_extra, client_extra = [], [], []
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        streams = stack.enter_context(streaming(server.url))
        for _ in range(rounds):
            # A process for each: what one has let go of, the next would fill.
            process = stack.enter_context(ProcessPoolExecutor(1, mp_context=context))
            process.submit(memory).result()  # it has started
            time.sleep(quiet_s)
            streams.gaps_ms()
            server.call("latest_s")
            time.sleep(quiet_s)
            stalls[False].append(server.call("latest_s") * 1000)
            gaps[False].append(_p99(streams.gaps_ms()))
            forget_most(server.pid)
            before = memory(server.pid)
            took, extra = process.submit(_drain, server.url).result()
            stalls[True].append(server.call("latest_s") * 1000)
            gaps[True].append(_p99(streams.gaps_ms()))
            times.append(took)
            server_extra.append((memory(server.pid, most=True) - before) / 2**20)
            client_extra.append(extra / 2**20)
    server.call("clear")
    # A gap of nothing: no piece came while it was quiet.
    pairs = zip(gaps[False], gaps[True], strict=True)
    ratio = [other / max(one, 1e-3) for one, other in pairs]
    name = f"a drain of {held / 2**20:,.0f} MiB, {STREAMS} clients stream"
    return [
        row(name, "s", times),
        row(f"{name}: the event loop is late by", "ms", stalls[True], TARGET_STALL_MS),
        row("without it: the event loop is late by", "ms", stalls[False]),
        row(f"{name}: p99 of the gaps between pieces", "ms", gaps[True]),
        row("without it: p99 of the gaps between pieces", "ms", gaps[False]),
        row(f"{name}: p99 against that without it", "x", ratio, TARGET_GAP),
        row(f"{name}: extra memory, server", "MiB", server_extra, TARGET_EXTRA_MIB),
        row(f"{name}: extra memory, client", "MiB", client_extra, TARGET_EXTRA_MIB),
    ]


def _p99(samples: list[float]) -> float:
    return float(np.percentile(samples, 99)) if samples else 0.0


def _read(url: str) -> None:
    with RecordClient(url, timeout=600) as client:
        client.runs()


def reward_rows(server: Served, size: int, rewards: int) -> list[Row]:
    """Rewards, alone and while two clients read all that is stored, again and again."""
    held = server.call("fill", max(size // 83_000, 1), PROMPT, RESPONSE)
    context = multiprocessing.get_context("spawn")
    times: dict[bool, list[float]] = {False: [], True: []}
    with RecordClient(server.url) as client:

        def reward() -> None:
            assert client.update_reward("copies/0/0", 1.0) == 1

        reward()
        with ProcessPoolExecutor(READERS, mp_context=context) as readers:
            reading: list[Future[None]] = [readers.submit(_read, server.url) for _ in range(2)]
            for each in reading:
                each.result()  # they have started
            for beside in (False, True):
                reading = []
                while len(times[beside]) < rewards:
                    if beside:
                        reading = [each for each in reading if not each.done()]
                        reading += [
                            readers.submit(_read, server.url) for _ in range(READERS - len(reading))
                        ]
                    times[beside].append(microseconds(reward) / 1000)
                    time.sleep(0.005)
    server.call("clear")
    name = f"a reward beside {READERS} clients that read {held / 1e6:,.0f} MB each"
    return [
        row("a reward, alone", "ms", times[False]),
        row("a reward, alone: p99", "ms", [_p99(times[False])]),
        row(name, "ms", times[True]),
        row(f"{name}: p99", "ms", [_p99(times[True])], TARGET_REWARD_MS),
    ]


def _cpu_s(pid: int) -> float:
    # The process's name, in parentheses, may hold anything: what counts comes after it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def waiting_rows(server: Served, count: int, seconds: float) -> list[Row]:
    """Drains that wait for generations in flight, while nothing happens."""
    server.call("begin", count)

    async def wait() -> tuple[float, float]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:
            drains = [
                asyncio.create_task(
                    http.post(
                        "/records/drain", json={"prefix": f"waiting/{number}", "wait_s": 600.0}
                    )
                )
                for number in range(count)
            ]
            await asyncio.sleep(2 + count / 200)  # they have been sent
            before, begin = _cpu_s(server.pid), time.perf_counter()
            await asyncio.sleep(seconds)
            used = (_cpu_s(server.pid) - before) / (time.perf_counter() - begin)
            assert not any(each.done() for each in drains)
            begin = time.perf_counter()
            await asyncio.to_thread(server.call, "end")
            for reply in await asyncio.gather(*drains):
                reply.raise_for_status()
            return 100 * used, time.perf_counter() - begin

    before, begin = _cpu_s(server.pid), time.perf_counter()
    time.sleep(seconds)
    idle = 100 * (_cpu_s(server.pid) - before) / (time.perf_counter() - begin)
    used, took = asyncio.run(wait())
    name = f"{count:,} waiting drains"
    return [
        row(f"{name}: CPU beyond an idle server's", "%", [used - idle], TARGET_WAITING_PERCENT),
        row(f"{name}: until all are answered", "s", [took]),
    ]


def single_rows(server: Served, count: int, rounds: int) -> list[Row]:
    """Runs drained one by one, as the scheduler does: a drain, a look, an acknowledgement each."""

    async def drain() -> float:
        gate = asyncio.Semaphore(8)
        async with AsyncRecordClient(server.url) as client:

            async def one(key: str) -> None:
                async with gate, client.drain(key=key) as drained:
                    assert len(drained.experiences) == 1
                    await client.stats()

            began = time.process_time()
            await asyncio.gather(*(one(f"copies/{n // 8}/{n}") for n in range(count)))
            return time.process_time() - began

    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        server.call("fill", count, 512, 512)
        before = _cpu_s(server.pid)
        ours.append(asyncio.run(drain()) / count * 1000)
        theirs.append((_cpu_s(server.pid) - before) / count * 1000)
    name = "a run of 512 + 512 tokens, drained alone"
    return [
        row(f"{name}: CPU of the client", "ms", ours),
        row(f"{name}: CPU of the server", "ms", theirs),
    ]


def forgotten_rows(server: Served, rounds: int) -> list[Row]:
    """The end of a batch, of which nothing is left: its tasks are forgotten."""
    ours: list[float] = []
    theirs: list[float] = []
    calls = 20
    with RecordClient(server.url) as client:
        for _ in range(rounds):
            before, began = _cpu_s(server.pid), time.process_time()
            for batch in range(calls):
                client.forget(f"{batch}/{task}" for task in range(MAX_PREFIXES))
            ours.append((time.process_time() - began) / calls * 1000)
            theirs.append((_cpu_s(server.pid) - before) / calls * 1000)
    name = f"{MAX_PREFIXES:,} prefixes forgotten"
    return [
        row(f"{name}: CPU of the client", "ms", ours),
        row(f"{name}: CPU of the server", "ms", theirs),
    ]


def measure(quick: bool) -> list[Row]:
    size, rounds, quiet_s = (2**23, 1, 0.5) if quick else (2**30, 5, 5.0)
    rows = []
    with serving() as server:
        progress("draining: beside streams")
        rows += drain_rows(server, size, rounds, quiet_s)
        progress("draining: rewards beside readers")
        rows += reward_rows(server, size if quick else 100_000_000, 20 if quick else 1000)
    with serving() as server:  # whose heap is small
        progress("draining: run by run")
        rows += single_rows(server, 20 if quick else 1000, 1 if quick else 5)
        progress("draining: forgetting")
        rows += forgotten_rows(server, 1 if quick else 5)
        progress("draining: waiting")
        rows += waiting_rows(server, 20 if quick else 1000, 1.0 if quick else 20.0)
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
