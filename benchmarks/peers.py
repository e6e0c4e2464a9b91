"""Recording in the engine against a capture gateway in front of it: its cost, and what is captured.

The gateway is Agent Lightning's server, in an environment of its own; it passes requests on to a
stock engine and keeps what comes back. 64 clients at a time ask the engine alone, the engine that
records, or the gateway, in turns. CPU is that of the processes that serve: the API server, and the
gateway where it takes part.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import httpx
import numpy as np

from benchmarks.harness import Row, main, progress, row
from benchmarks.serving import API, CLIENTS, Mode, Server, cpu_s, one_round, ratio
from examples.engine_server import EngineServer
from examples.vllm_server import VLLMServer
from recorder_core.client import RecordClient
from tests.models import tiny_qwen3

TARGET_CPU = 1 / 3
"""CPU of serving, recorded / through the gateway, at most."""
TARGET_TIME = 1 / 1.3
"""The time that a token takes, likewise."""
ASKED = 8
"""Requests of each kind, to see what is captured of them."""
_LEAVE_S = 1.0


class Gateway(EngineServer):
    """Agent Lightning's server.

    Args:
        python: Of the environment that it is installed in.
    """

    def __init__(self, python: Path) -> None:
        super().__init__([], env={}, name="gateway", health="/healthz", start_timeout_s=60)
        self.command = [
            str(python.with_name("agl-server")),
            *["host=127.0.0.1", f"port={self.port}", "default_proxy.model_name=model"],
            # Its own default is INFO, a line for each request: as quiet as the engines here.
            *["hydra.run.dir=/tmp", "hydra.output_subdir=null"],
        ]

    def register(self, engine: EngineServer, rollouts: list[str]) -> None:
        """Tell it the engine, and the rollouts that are to come."""
        with httpx.Client(base_url=f"{self.base_url}/api") as http:
            model = {"model": "model", "endpoint": f"{engine.base_url}/v1"}
            http.post("/models", json=[model]).raise_for_status()
            asked = [{"input": {}, "rollout_id": each} for each in rollouts]
            http.post("/rollouts", json=asked).raise_for_status()

    def completions(self, rollout: str) -> str:
        """Where the completions of a rollout are asked for."""
        place = f"/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1/completions"
        return self.base_url + place

    def captured(self, rollout: str) -> list[tuple[list[int], list[float]]]:
        """Ids and logprobs of what it kept of a rollout, in its form for trainers."""
        url = f"{self.base_url}/api/rollouts/{rollout}/events"
        events = httpx.get(url, params={"format": "triplet"}).json()
        found = [each["data"] for each in events if each["event_type"] == "model_request"]
        return [
            (each["response_token_ids"], each["response_log_probs"] or [])
            for each in found
            if each["response_token_ids"]
        ]


class Proxied(Server):
    """An engine behind the gateway."""

    def __init__(self, engine: EngineServer, gateway: Gateway) -> None:
        super().__init__(engine)
        self._gateway = gateway

    def completions(self, client: int) -> str:
        return self._gateway.completions(f"bench-{client}")

    def cpu_s(self) -> Counter[str]:
        found = super().cpu_s()
        found[API] += cpu_s(self._gateway.pid)
        return found


async def alternate(servers: dict[Mode, Server], rounds: int, tokens: int) -> dict[Mode, Any]:
    """Each way of serving in every round: CPU in µs per token, and tokens per second."""
    cpu: dict[Mode, list[float]] = {mode: [] for mode in servers}
    speed: dict[Mode, list[float]] = {mode: [] for mode in servers}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for number in range(-2, rounds):  # those before the first only warm up
            for mode in list(servers)[:: 1 if number % 2 else -1]:
                spent, throughput = await one_round(http, servers[mode], mode, tokens)
                if number >= 0:
                    cpu[mode].append(spent[API])
                    speed[mode].append(throughput)
            progress(f"peers: round {max(number + 1, 0)} of {rounds}")
    return {mode: (cpu[mode], speed[mode]) for mode in servers}


class Kind(NamedTuple):
    """A way of asking, and how many samples there are to capture of one request."""

    body: dict[str, Any]
    samples: int = 1
    leaves: bool = False


KINDS = {
    "whole replies": Kind({}),
    "streamed replies": Kind({"stream": True}),
    "samples of requests with n = 2": Kind({"n": 2}, samples=2),
    "generations whose client left": Kind({"max_tokens": 1500}, leaves=True),
}

Sample = tuple[list[int], list[float]]
Captured = Callable[[str], list[Sample]]


async def ask(http: aiohttp.ClientSession, url: str, kind: Kind, key: str) -> list[Sample]:
    """One request; what its client saw: ids and logprobs of each sample, where it saw them."""
    body = {
        "model": "model",
        "prompt": "Hello",
        "max_tokens": 32,
        "temperature": 1.0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        **kind.body,
    }
    headers = {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=_LEAVE_S if kind.leaves else 120)
    seen: dict[int, Sample] = {}
    with contextlib.suppress(asyncio.TimeoutError):
        async with http.post(url, json=body, headers=headers, timeout=timeout) as response:
            if response.status != 200:
                return []
            for reply in await _replies(response, streamed="stream" in kind.body):
                for choice in reply["choices"]:
                    ids, logprobs = seen.setdefault(choice["index"], ([], []))
                    ids += choice["token_ids"] or []
                    logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
    return list(seen.values())


async def _replies(response: aiohttp.ClientResponse, *, streamed: bool) -> list[Any]:
    if not streamed:
        return [await response.json()]
    lines = (await response.text()).splitlines()
    data = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
    return [json.loads(each) for each in data if each != "[DONE]"]


def same(one: Sample, other: Sample) -> bool:
    """Whether ids are equal, and logprobs bit by bit."""
    logprobs = (np.array(each[1], np.float32) for each in (one, other))
    return one[0] == other[0] and np.array_equal(*logprobs)


async def captures(url: Callable[[str], str], captured: Captured, name: str) -> list[Row]:
    """How many samples of each kind are captured, as their clients saw them if they saw them."""
    rows = []
    async with aiohttp.ClientSession() as http:
        for number, (what, kind) in enumerate(KINDS.items()):
            keys = [f"{number}-{each}" for each in range(ASKED)]
            asked: list[Awaitable[list[Sample]]] = [
                ask(http, url(key), kind, f"seen/{key}/0") for key in keys
            ]
            seen = await asyncio.gather(*asked)
            await asyncio.sleep(1)
            right = 0
            for key, shown in zip(keys, seen, strict=True):
                found = await asyncio.to_thread(captured, key)
                right += (
                    sum(bool(ids) and len(ids) == len(logprobs) for ids, logprobs in found)
                    if kind.leaves
                    else sum(any(same(each, other) for other in found) for each in shown)
                )
            rows.append(row(f"captured, {name}: {what}", f"of {ASKED * kind.samples}", [right]))
    return rows


def measure(quick: bool) -> list[Row]:
    model = tiny_qwen3()
    env = {"RECORDER_ADMIN_KEY": None}
    gateway = Gateway(Path(os.environ["RECORDER_PEER_PYTHON"]))
    plain = VLLMServer(model, env=env)
    recording = VLLMServer(model, "--enable-recording", env=env)
    with ExitStack() as running:
        progress("peers: starting two engines and the gateway")
        with ThreadPoolExecutor() as threads:
            list(threads.map(running.enter_context, (plain, recording, gateway)))
        gateway.register(
            plain,
            [
                *(f"bench-{client}" for client in range(CLIENTS)),
                *(f"{kind}-{each}" for kind in range(len(KINDS)) for each in range(ASKED)),
            ],
        )
        alone = Mode("the engine alone", recording=False, logprobs=False, streamed=False)
        recorded = Mode("recorded", recording=True, logprobs=False, streamed=False)
        through = Mode("through the gateway", recording=False, logprobs=False, streamed=False)
        servers = {
            alone: Server(plain),
            recorded: Server(recording),
            through: Proxied(plain, gateway),
        }
        rounds, tokens = (2, 16) if quick else (6, 256)
        measured = asyncio.run(alternate(servers, rounds, tokens))
        records = running.enter_context(RecordClient(recording.base_url))

        def recorded_of(key: str) -> list[Sample]:
            found = records.get(f"seen/{key}/0")
            return [(each.response_ids.tolist(), list(each.logprobs)) for each in found]

        rows = [row(f"serving: {mode.name}", "µs/token", measured[mode][0]) for mode in servers]
        rows += [
            ratio(
                "serving: recorded / through the gateway",
                measured[recorded][0],
                measured[through][0],
                TARGET_CPU,
            ),
            *[row(f"throughput: {mode.name}", "tokens/s", measured[mode][1]) for mode in servers],
            ratio(
                "time per token: recorded / through the gateway",
                [1 / each for each in measured[recorded][1]],
                [1 / each for each in measured[through][1]],
                TARGET_TIME,
            ),
        ]
        rows += asyncio.run(
            captures(lambda key: f"{recording.base_url}/v1/completions", recorded_of, "recorder")
        )
        rows += asyncio.run(captures(gateway.completions, gateway.captured, "gateway"))
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
