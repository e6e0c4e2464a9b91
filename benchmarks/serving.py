"""CPU time per generated token of an engine server, recording off, on, and off with logprobs asked.

Three servers of one tiny model run side by side, one with `--enable-recording`; 64 clients at a
time ask one of them. Rounds alternate, so that whatever else the machine does meets all alike. The
third shows how far two servers differ that are alike, for as long as both run; so sets of servers
follow one another, and a figure within that spread says nothing of recording. CPU time is the
processes' own: what the clients take is no part of it, but on few cores it does slow the throughput
down. With so small a model the API server is the bottleneck, the worst case for us.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import time
from collections import Counter, defaultdict
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
SETS = 4
ROUNDS = 3
PROMPT = 64
# On / off, at most.
TARGET_API, TARGET_API_STREAMED = 1.05, 1.03
TARGET_ENGINE = 1.05
TARGET_ALL = 1.05
TARGET_TIME = 1 / 0.97
"""The time that a token takes: the throughput is to stay above 0.97."""
SETTLE_S = 0.3
"""After the last answer: the recorder's thread stores what has just finished."""
API, ENGINE = "API server", "engine"
_TICKS = os.sysconf("SC_CLK_TCK")


class Mode(NamedTuple):
    """A way of serving and of asking."""

    name: str
    recording: bool
    logprobs: bool
    """Whether the client asks for logprobs."""
    streamed: bool
    twin: bool = False
    """Whether the other of the servers without recording is asked."""


MODES = [
    Mode(name + (", streamed" if streamed else ""), recording, logprobs, streamed, twin)
    for streamed in (False, True)
    for name, recording, logprobs, twin in (
        ("off", False, False, False),
        ("on", True, False, False),
        ("off, client asks logprobs", False, True, False),
        ("off, another server", False, False, True),
    )
]


@dataclass
class Samples:
    """What was measured in one mode, a value for each round."""

    api: list[float] = field(default_factory=list)
    """Microseconds of CPU per generated token, in the API server process."""
    children: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The same of its child processes, by what each is, e.g. `scheduler`."""
    throughput: list[float] = field(default_factory=list)
    """Generated tokens per second, all clients together."""

    @property
    def engine(self) -> list[float]:
        """CPU of the child processes together, in microseconds per token."""
        return [sum(each) for each in zip(*self.children.values(), strict=True)]

    @property
    def all(self) -> list[float]:
        """CPU of all serving processes, in microseconds per token."""
        return [sum(pair) for pair in zip(self.api, self.engine, strict=True)]

    @property
    def times(self) -> list[float]:
        """Microseconds that pass per token."""
        return [1e6 / each for each in self.throughput]


class Server:
    """A running server and its processes."""

    def __init__(self, server: EngineServer) -> None:
        self.url = server.base_url
        self.model = server.name
        self._pid = server.pid
        self._children = descendants(server.pid)

    def completions(self, client: int) -> str:
        """Where a client asks for a completion."""
        return f"{self.url}/v1/completions"

    def cpu_s(self) -> Counter[str]:
        """CPU seconds so far: of the API server, and of its children by what they are."""
        found = Counter({API: cpu_s(self._pid)})
        for child in self._children:
            found[kind(child)] += cpu_s(child)
        return found


def kind(pid: int) -> str:
    """What a child process is, by the title that SGLang gives to each of its own."""
    title = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return next((each for each in ("scheduler", "detokenizer") if f"::{each}" in title), ENGINE)


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
        server.completions(client),
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
) -> tuple[dict[str, float], float]:
    """All clients ask once; CPU microseconds per token by process, and tokens per second."""
    before = server.cpu_s()
    begin = time.perf_counter()
    await asyncio.gather(*(ask(http, server, mode, client, tokens) for client in range(CLIENTS)))
    took = time.perf_counter() - begin
    await asyncio.sleep(SETTLE_S)
    after = server.cpu_s()
    count = CLIENTS * tokens
    return {name: (after[name] - before[name]) / count * 1e6 for name in after}, count / took


async def alternate(
    off: Server, on: Server, twin: Server, rounds: int, tokens: int, samples: dict[Mode, Samples]
) -> None:
    """Every mode in every round, each round beginning with another."""
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
                server = on if mode.recording else twin if mode.twin else off
                count = tokens if number >= 0 else min(tokens, 32)
                cpu, throughput = await one_round(http, server, mode, count)
                if mode.recording:
                    assert await records.delete("bench") == CLIENTS
                if number >= 0:
                    samples[mode].api.append(cpu.pop(API))
                    for process, spent in cpu.items():
                        samples[mode].children[process].append(spent)
                    samples[mode].throughput.append(throughput)
            progress(f"serving: round {max(number + 1, 0)} of {rounds}")


def ratio(name: str, these: list[float], others: list[float], target: float | None = None) -> Row:
    """What some cost against others, round by round."""
    samples = [one / other for one, other in zip(these, others, strict=True)]
    return row(name, "x", samples, target)


def measure(quick: bool) -> list[Row]:
    model = tiny_qwen3()
    # Without an admin key /records answers loopback, whatever this environment holds.
    env = {"RECORDER_ADMIN_KEY": None}
    # Of the two engines, the one that is installed here.
    start = VLLMServer if importlib.util.find_spec("vllm") else SGLangServer
    sets, rounds, tokens = (1, 1, 16) if quick else (SETS, ROUNDS, 256)
    samples = {mode: Samples() for mode in MODES}
    for number in range(sets):
        progress(f"serving: starting set {number + 1} of {sets}")
        three = [start(model, *flags, env=env) for flags in ((), ("--enable-recording",), ())]
        with ExitStack() as servers, ThreadPoolExecutor() as threads:
            list(threads.map(servers.enter_context, three))
            off, on, twin = map(Server, three)
            asyncio.run(alternate(off, on, twin, rounds, tokens, samples))
    vllm = start is VLLMServer  # the targets of single processes are vLLM's
    rows = []
    for streamed in (False, True):
        modes = [mode for mode in MODES if mode.streamed == streamed]
        off, on, asked, twin = (samples[mode] for mode in modes)
        suffix = ", streamed" if streamed else ""
        api = TARGET_API_STREAMED if streamed else TARGET_API
        rows += [row(f"API server: {mode.name}", "µs/token", samples[mode].api) for mode in modes]
        rows += [
            ratio(f"API server: on / off{suffix}", on.api, off.api, api if vllm else None),
            ratio(f"API server: on / asked{suffix}", on.api, asked.api),
            ratio(f"API server: another server / off{suffix}", twin.api, off.api),
        ]
        rows += [
            row(f"{process}: {mode.name}", "µs/token", samples[mode].children[process])
            for process in off.children
            for mode in modes
        ]
        rows += [
            ratio(
                f"engine: on / off{suffix}", on.engine, off.engine, TARGET_ENGINE if vllm else None
            ),
            ratio(f"engine: another server / off{suffix}", twin.engine, off.engine),
            ratio(f"all processes: on / off{suffix}", on.all, off.all, TARGET_ALL),
        ]
        rows += [
            row(f"throughput: {mode.name}", "tokens/s", samples[mode].throughput) for mode in modes
        ]
        target = TARGET_TIME if vllm else None
        rows += [
            ratio(f"time per token: on / off{suffix}", on.times, off.times, target),
            ratio(f"time per token: another server / off{suffix}", twin.times, off.times),
        ]
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
