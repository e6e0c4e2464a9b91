"""Load that a recorder has to account for: many clients, and most of what they do to servers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from examples.vllm_server import VLLMServer
from recorder_core import Run
from recorder_core.client import AsyncRecordClient
from recorder_core.drained import Drained
from recorder_core.errors import ClientError
from recorder_core.recorder import RecorderStats
from tests.front_ends import recorder_process
from tests.models import tiny_qwen3

BATCH = "soak"
_DRAIN_EVERY_S = 1.0
_SETTLE_S = 60.0
_KINDS = ["whole", "stream", "stream", "several", "again", "leave", "unkeyed"]
"""What a client does with a run: "again" asks the same twice, "leave" does not wait for the end."""
_FULL_S = 5.0
_RESTART_S = 10.0
"""Between the end of a recorder process and the first answer of the next, at most."""


@dataclass
class Account:
    """What clients were given, and what was drained."""

    answered: dict[str, int] = field(default_factory=dict)
    """Samples of each run whose reply was read to its end."""
    answered_at: dict[str, float] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    """What clients did, by kind."""
    records: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Ids of the records drained of each run."""
    missing: Counter[str] = field(default_factory=Counter)
    """What drained runs say that they lack, by reason."""
    incomplete: set[str] = field(default_factory=set)
    twice: list[str] = field(default_factory=list)
    """Records that were drained before."""
    refused: int = 0
    """Drains that failed, while the recorder was not there."""
    instances: dict[str, float] = field(default_factory=dict)
    """When each start of the recorder was first seen."""
    before: int = 0
    """What had been recorded before."""

    def take(self, run: Run) -> None:
        """Note a drained run."""
        key = run.key.text
        for record in run.records:
            if record in self.records[key]:
                self.twice.append(record)
            self.records[key].add(record)
        if run.missing:
            self.incomplete.add(key)
            self.missing.update(run.missing)

    def unaccounted(self, durable: bool) -> list[str]:
        """Runs whose client has more samples than were drained, and that do not say why.

        Without those that ended when the recorder did: what a store in memory held is gone with it,
        and of a durable one what was taken in the last moment.
        """
        restarts = sorted(self.instances.values())[1:]
        excused = [(at - _RESTART_S if durable else 0.0, at) for at in restarts]
        return [
            key
            for key, count in self.answered.items()
            if len(self.records[key]) < count
            and key not in self.incomplete
            and not any(begin < self.answered_at[key] < end for begin, end in excused)
        ]


class Client:
    """One client, that does one thing after the other until time is up."""

    def __init__(self, http: httpx.AsyncClient, account: Account, number: int, seed: int) -> None:
        self._http = http
        self._account = account
        self._number = number
        self._random = random.Random(seed * 1000 + number)

    async def run(self, until: float) -> None:
        """Until this moment, by `time.monotonic`."""
        turn = 0
        while time.monotonic() < until:
            kind = self._random.choice(_KINDS)
            key = f"{BATCH}/{self._number}/{turn}"
            turn += 1
            self._account.done[kind] += 1
            try:
                await self._ask(kind, key)
            except httpx.HTTPError:
                self._account.done["broken"] += 1
                await asyncio.sleep(0.2)

    async def _ask(self, kind: str, key: str) -> None:
        chat = self._random.random() < 0.5
        body: dict[str, Any] = {
            "model": "model",
            "max_tokens": self._random.randint(1, 40),
            "temperature": 1.0,
            "n": self._random.randint(2, 3) if kind == "several" else 1,
            "stream": kind == "stream" or (kind == "leave" and self._random.random() < 0.5),
        }
        asked = [{"role": "user", "content": "Hello"}] if chat else "Hello"
        body["messages" if chat else "prompt"] = asked
        path = "/v1/chat/completions" if chat else "/v1/completions"
        bearer = self._random.choice(["nobody", "a/b", "x" * 300]) if kind == "unkeyed" else key
        asking = self._read(path, body, {"Authorization": f"Bearer {bearer}"})
        if kind == "leave":
            try:
                await asyncio.wait_for(asking, self._random.uniform(0.01, 0.5))
            except (TimeoutError, asyncio.TimeoutError):
                return  # perhaps it is recorded, perhaps it had not begun
        elif not await asking:
            return
        if kind == "unkeyed":
            return
        self._account.answered[key] = body["n"]
        if kind == "again" and await self._read(path, body, {"Authorization": f"Bearer {bearer}"}):
            self._account.answered[key] += body["n"]
        self._account.answered_at[key] = time.monotonic()

    async def _read(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> bool:
        """Read a reply; whether it was an answer, to its end."""
        async with self._http.stream("POST", path, json=body, headers=headers) as response:
            text = await response.aread()
        if response.status_code != 200:
            self._account.done[f"answered {response.status_code}"] += 1
            return False
        return not body["stream"] or text.endswith(b"data: [DONE]\n\n")


async def soak(
    url: str, admin_key: str | None, seconds: float, *, clients: int = 16, seed: int = 0
) -> tuple[Account, RecorderStats]:
    """Load a server, drain it all the while, then to the last run.

    Returns:
        What happened, and the recorder's counters at the end.
    """
    account = Account()
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=120, limits=limits, verify=False) as http,
        AsyncRecordClient(url, admin_key=admin_key) as records,
    ):
        (reply,) = (await records.stats()).values()
        account.before = reply.recorder.recorded
        working = [
            asyncio.create_task(Client(http, account, number, seed).run(until))
            for number in range(clients)
        ]
        while not all(each.done() for each in working):
            await asyncio.sleep(_DRAIN_EVERY_S)
            await _drain(records, account)
        await asyncio.gather(*working)
        deadline = time.monotonic() + _SETTLE_S
        while (stats := await _stats(records, account)) is None or stats.pending:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not settled after {_SETTLE_S:.0f} s: {stats}")
            await asyncio.sleep(0.2)
        while drained := await _drain(records, account):
            if not drained.runs:
                break
    return account, stats


async def _stats(records: AsyncRecordClient, account: Account) -> RecorderStats | None:
    try:
        (reply,) = (await records.stats()).values()
    except ClientError:
        account.refused += 1
        return None
    account.instances.setdefault(reply.recorder.instance, time.monotonic())
    return reply.recorder


async def _drain(records: AsyncRecordClient, account: Account) -> Drained | None:
    try:
        await _stats(records, account)
        async with records.drain(BATCH) as drained:
            for run in drained.runs:
                account.take(run)
    except ClientError:
        account.refused += 1
        return None
    return drained


def check(account: Account, stats: RecorderStats, durable: bool = False) -> list[str]:
    """What is not as it should be, in words.

    Args:
        account: What clients were given, and what was drained.
        stats: The recorder's counters at the end.
        durable: Whether records outlive the recorder.
    """
    faults = []
    if stats.started != stats.recorded + sum(stats.dropped.values()) + stats.pending:
        faults.append(f"the counters do not add up: {stats}")
    if stats.errors:
        faults.append(f"{stats.errors} errors")
    if account.twice:
        faults.append(f"drained twice: {account.twice[:5]}")
    if unaccounted := account.unaccounted(durable):
        faults.append(f"answered, and neither drained nor missed: {unaccounted[:5]}")
    drained, recorded = sum(map(len, account.records.values())), stats.recorded - account.before
    if len(account.instances) == 1 and drained != recorded:
        faults.append(f"{recorded} were recorded, {drained} drained")
    return faults


async def _kill(process: psutil.Process) -> None:
    process.kill()


async def _fill_disk(process: psutil.Process) -> None:
    """No file of the process grows for a while."""
    _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (0, hard))
    try:
        await asyncio.sleep(_FULL_S)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))


async def _soak_and_harm(server: VLLMServer, args: argparse.Namespace) -> Any:
    soaking = asyncio.create_task(
        soak(server.base_url, None, args.seconds, clients=args.clients, seed=args.seed)
    )

    async def harm_every(period: float, harm: Callable[[psutil.Process], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(period)
            if (process := recorder_process(server)) is not None:
                await harm(process)

    wanted = [(args.kill_every, _kill), (args.full_every, _fill_disk)]
    harming = [asyncio.create_task(harm_every(*each)) for each in wanted if each[0]]
    # Harm ends with the clients: what is left is drained in peace.
    await asyncio.wait([soaking, *harming], timeout=args.seconds, return_when="FIRST_COMPLETED")
    for each in harming:
        each.cancel()
    return await soaking


def main() -> int:
    """Soak a server, and say what came of it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--front-ends", type=int, default=2, help="API servers. Default: 2.")
    parser.add_argument("--durable", action="store_true", help="with a store on the disk")
    parser.add_argument("--kill-every", type=float, metavar="S", help="kill the recorder process")
    parser.add_argument("--full-every", type=float, metavar="S", help="fill its disk for 5 s")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--enable-recording", "--api-server-count", str(args.front_ends)]
        if args.durable:
            options += ["--recording-store", f"sqlite://{folder}/records.db"]
        with VLLMServer(tiny_qwen3(), *options, env={"RECORDER_ADMIN_KEY": None}) as server:
            account, stats = asyncio.run(_soak_and_harm(server, args))
            memory = {
                each.pid: each.memory_info().rss >> 20
                for each in psutil.Process(server.pid).children(recursive=True)
                if "recorder_core.host" in each.cmdline()
            }
    print(f"seed {args.seed}; the clients' doings: {dict(account.done)}")
    print(f"{len(account.answered)} runs answered, {len(account.incomplete)} incomplete", end="; ")
    print(f"{len(account.instances)} starts of the recorder, {account.refused} refusals by it")
    print(f"memory of the recorder process at the end, MiB: {list(memory.values())}")
    print(stats)
    faults = check(account, stats, args.durable)
    print("\n".join(faults) or "all accounted for")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
