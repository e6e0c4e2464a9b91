"""CPU time per generated token of an engine server, recording off, on, and off with logprobs asked.

Two servers of one tiny model run side by side, one with `--enable-recording`; 64 clients at a time
ask one of them. Rounds alternate, so that whatever else the machine does meets all alike. CPU time
is the processes' own: what the clients take is no part of it, but on few cores it does slow the
throughput down. With so small a model the API server is the bottleneck, the worst case for us.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# The engines bring it; its parser is C, and streamed answers come in thousands of pieces.
import aiohttp
import numpy as np

from benchmarks.harness import Row, main, progress, row
from examples.engine_server import EngineServer
from examples.sglang_server import SGLangServer
from examples.vllm_server import VLLMServer
from recorder_core.client import AsyncRecordClient
from tests.models import VOCABULARY, tiny_qwen3

CLIENTS = 64
PROMPT = 64
SETTLE_S = 0.3
"""After the last answer: the recorder's thread stores what has just finished."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Mode(NamedTuple):
    """A way of serving and of asking."""

    name: str
    recording: bool
    logprobs: bool
    """Whether the client asks for logprobs."""
    streamed: bool


MODES = [
    Mode(name + (", streamed" if streamed else ""), recording, logprobs, streamed)
    for streamed in (False, True)
    for name, recording, logprobs in (
        ("off", False, False),
        ("on", True, False),
        ("off, client asks logprobs", False, True),
    )
]


@dataclass
class Samples:
    """What was measured in one mode, a value for each round."""

    api: list[float] = field(default_factory=list)
    """Microseconds of CPU per generated token, in the API server process."""
    engine: list[float] = field(default_factory=list)
    """The same of its child processes: the engine core, or the scheduler and detokenizer."""
    throughput: list[float] = field(default_factory=list)
    """Generated tokens per second, all clients together."""


class Server:
    """A running server and its processes."""

    def __init__(self, server: EngineServer) -> None:
        self.url = server.base_url
        self.model = server.name
        self._pid = server.pid
        self._children = descendants(server.pid)

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds so far: of the API server, of its children."""
        return cpu_s(self._pid), sum(cpu_s(child) for child in self._children)


def _stat(pid: int) -> list[str]:
    # The process's name, in parentheses, may hold anything: what counts comes after it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_s(pid: int) -> float:
    """User and system time of a process, all threads, in seconds."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def descendants(pid: int) -> list[int]:
    """The processes under a process."""
    parents = {int(folder.name): _parent(int(folder.name)) for folder in _processes()}
    found = [pid]
    for parent in found:  # grows as it goes
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def _processes() -> Iterator[Path]:
    return Path("/proc").glob("[0-9]*")


def _parent(pid: int) -> int | None:
    try:
        return int(_stat(pid)[1])
    except OSError:  # it has just ended
        return None


async def ask(http: aiohttp.ClientSession, server: Server, mode: Mode, client: int, n: int) -> None:
    """One generation of `n` tokens, its answer read and thrown away."""
    random = np.random.default_rng()
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": random.integers(10, VOCABULARY, PROMPT).tolist(),
        "max_tokens": n,
        "ignore_eos": True,
        "stream": mode.streamed,
    }
    if mode.logprobs:
        body["logprobs"] = 1
    async with http.post(
        f"{server.url}/v1/completions",
        json=body,
        headers={"Authorization": f"Bearer bench/serving/{client}"},
    ) as response:
        end = b""
        async for piece in response.content.iter_any():
            end = end[-16:] + piece if mode.streamed else end + piece
    if response.status != 200:
        raise RuntimeError(f"the server answered {response.status}: {end[-500:]!r}")
    if mode.streamed:
        assert end.endswith(b"data: [DONE]\n\n"), end
    else:
        assert json.loads(end)["usage"]["completion_tokens"] == n


async def one_round(
    http: aiohttp.ClientSession, server: Server, mode: Mode, tokens: int
) -> tuple[float, float, float]:
    """All clients ask once; CPU microseconds per token (API, engine), and tokens per second."""
    api, engine = server.cpu_s()
    begin = time.perf_counter()
    await asyncio.gather(*(ask(http, server, mode, client, tokens) for client in range(CLIENTS)))
    took = time.perf_counter() - begin
    await asyncio.sleep(SETTLE_S)
    api_after, engine_after = server.cpu_s()
    count = CLIENTS * tokens
    return (api_after - api) / count * 1e6, (engine_after - engine) / count * 1e6, count / took


async def alternate(off: Server, on: Server, rounds: int, tokens: int) -> dict[Mode, Samples]:
    """Every mode in every round, each round beginning with another."""
    samples = {mode: Samples() for mode in MODES}
    # One session: its connections are made in the round that warms up.
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        AsyncRecordClient(on.url) as records,
    ):
        # Those before the first only warm up; each server stalls for half a second once or twice.
        for number in range(-3, rounds):
            shift = number % len(MODES)
            for mode in MODES[shift:] + MODES[:shift]:
                server = on if mode.recording else off
                count = tokens if number >= 0 else min(tokens, 32)
                api, engine, throughput = await one_round(http, server, mode, count)
                if mode.recording:
                    assert await records.delete("bench") == CLIENTS
                if number >= 0:
                    samples[mode].api.append(api)
                    samples[mode].engine.append(engine)
                    samples[mode].throughput.append(throughput)
            progress(f"serving: round {max(number + 1, 0)} of {rounds}")
    return samples


def ratios(these: list[float], others: list[float]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(these, others, strict=True)]


def measure(quick: bool) -> list[Row]:
    model = tiny_qwen3()
    # Without an admin key /records answers loopback, whatever this environment holds.
    env = {"RECORDER_ADMIN_KEY": None}
    with ExitStack() as servers:
        progress("serving: starting two servers")
        # Of the two engines, the one that is installed here.
        start = VLLMServer if importlib.util.find_spec("vllm") else SGLangServer
        off = start(model, env=env)
        on = start(model, "--enable-recording", env=env)
        with ThreadPoolExecutor() as threads:
            list(threads.map(servers.enter_context, (off, on)))
        # Six: each of the modes begins one round.
        rounds, tokens = (1, 16) if quick else (len(MODES), 256)
        samples = asyncio.run(alternate(Server(off), Server(on), rounds, tokens))
    rows = []
    for streamed in (False, True):
        modes = [mode for mode in MODES if mode.streamed == streamed]
        rows += [row(f"API server: {mode.name}", "µs/token", samples[mode].api) for mode in modes]
        without, recorded, asked = (samples[mode] for mode in modes)
        suffix = ", streamed" if streamed else ""
        rows += [
            row(f"API server: on / off{suffix}", "x", ratios(recorded.api, without.api)),
            row(f"API server: on / asked{suffix}", "x", ratios(recorded.api, asked.api)),
        ]
        rows += [row(f"engine: {mode.name}", "µs/token", samples[mode].engine) for mode in modes]
        rows += [
            row(f"throughput: {mode.name}", "tokens/s", samples[mode].throughput) for mode in modes
        ]
        rows.append(
            row(
                f"throughput: on / off{suffix}",
                "x",
                ratios(recorded.throughput, without.throughput),
            )
        )
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
