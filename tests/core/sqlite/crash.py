"""A process that records until it is killed, and says of each call when it begins and has ended."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from recorder_core import FinishReason, KeyPrefix, Recorder, RecordKey, Turn
from recorder_core.drained import page_name
from recorder_core.stores.sqlite import SQLiteStore, writer

BATCHES = ("0", "1")
LEASE_S = 3600.0
PAGE_BYTES = 6_000


class Call(NamedTuple):
    """What the process is about to do, or has been told is done."""

    kind: str
    what: Any
    """Turns: the run and the names of its generations. A reward: the run and the value. A page of a
    drain, which is a lease, and its end: its name."""
    answer: Any = None
    """Of a lease: the names of the generations that it holds, by run."""


def turn(key: str, name: str, tokens: int) -> Turn:
    return Turn(
        key=RecordKey.parse(key),
        prompt_ids=list(range(tokens)),
        response_ids=[len(name), 8],
        logprobs=[-0.5, -0.25],
        finish_reason=FinishReason.STOP,
        created_at=time.time(),
        finished_at=time.time(),
        request_id=name,
        id=name,
    )


def where(lease: str) -> KeyPrefix:
    """A lease's name begins with the batch that it is of."""
    return KeyPrefix(lease.partition("-")[0])


class Process:
    """Makes calls in an order that the seed decides.

    Args:
        path: The store's file.
        told: Where each call is told, before and after.
        seed: Decides.
        runs: Runs in sight.
        leases: Leases that are open.
    """

    def __init__(
        self, path: Path, told: Connection, seed: int, runs: list[str], leases: list[str]
    ) -> None:
        self._random = random.Random(seed)
        self._told = told
        self._seed = seed
        self._number = 0
        self._runs = runs
        self._leases = leases
        self._store = SQLiteStore(path)
        self._recorder = Recorder(self._store)
        self._told.send((True, Call("open", None)))

    def run(self) -> None:
        while True:
            kinds = ["turns"] * 4
            kinds += ["reward"] * 3 * bool(self._runs) + ["lease"] * 2 * bool(self._runs)
            kinds += ["ack", "ack", "release"] * bool(self._leases)
            getattr(self, f"_{self._random.choice(kinds)}")()

    def _name(self) -> str:
        self._number += 1
        return f"{self._seed}.{self._number}"

    def _begin(self, call: Call) -> None:
        self._told.send((False, call))

    def _end(self, call: Call) -> None:
        self._told.send((True, call))

    def _turns(self) -> None:
        key = f"{self._random.choice(BATCHES)}/t/r{self._name()}"
        if self._runs and self._random.random() < 0.3:
            key = self._random.choice(self._runs)
        names = [self._name() for _ in range(self._random.randrange(1, 6))]
        call = Call("turns", (key, names))
        self._begin(call)
        for name in names:
            self._recorder.submit(turn(key, name, self._random.choice([1, 30, 900])))
        assert self._recorder.flush(30)
        self._end(call)
        self._runs += [key] * (key not in self._runs)

    def _reward(self) -> None:
        call = Call("reward", (self._random.choice(self._runs), self._random.random()))
        self._begin(call)
        key, value = call.what
        self._recorder.write(lambda: self._store.update(RecordKey.parse(key), reward=value)).result(
            30
        )
        self._end(call)

    def _lease(self) -> None:
        """Page after page, as a client drains a batch, or some of them."""
        name, number = f"{self._random.choice(BATCHES)}-{self._name()}", 0
        while self._page(page_name(name, number)) and self._random.random() < 0.7:
            number += 1

    def _page(self, name: str) -> bool:
        """Take one page; returns whether there are more."""
        self._begin(Call("lease", name))
        lease = self._recorder.write(
            lambda: self._store.drain(where(name), name, LEASE_S, PAGE_BYTES)
        ).result(30)
        self._end(Call("lease", name, {run.key.text: [*run.records] for run in lease.runs}))
        for run in lease.runs:
            self._runs.remove(run.key.text)
        self._leases.append(name)
        return lease.more

    def _ack(self) -> None:
        name = self._leases.pop(self._random.randrange(len(self._leases)))
        self._begin(Call("ack", name))
        self._recorder.write(lambda: self._store.ack(name)).result(30)
        self._end(Call("ack", name))

    def _release(self) -> None:
        name = self._leases.pop(self._random.randrange(len(self._leases)))
        self._begin(Call("release", name))
        self._recorder.write(lambda: self._store.release(name)).result(30)
        self._end(Call("release", name))
        self._runs[:] = [run.key.text for run in self._store.get(KeyPrefix())]


def run(path: Path, told: Connection, seed: int, runs: list[str], leases: list[str]) -> None:
    """What the process does from its beginning to its end."""
    writer.LINGER_S = random.Random(seed).choice([0.0, 0.002, 0.05])
    Process(path, told, seed, runs, leases).run()
