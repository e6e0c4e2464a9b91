"""A process that records is killed at any moment: what it was told was done is there, once."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from recorder_core import KeyPrefix
from recorder_core.stores.sqlite import SQLiteStore
from tests.core.sqlite import crash
from tests.core.sqlite.files import rows, saved

KILLS = 100 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 15
ALL = KeyPrefix()

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["__main__", crash.__name__])


@dataclass
class Expected:
    """What has to be there, as the killed processes were told."""

    written: set[str] = field(default_factory=set)
    """Generations that were flushed, and not acknowledged since."""
    perhaps: set[str] = field(default_factory=set)
    """Those that were on their way."""
    gone: set[str] = field(default_factory=set)
    """Those that were acknowledged: nobody gets them again."""
    rewards: dict[str, set[float]] = field(default_factory=dict)
    """What a run's reward may be: the last that was told, or the one that was on its way."""
    leases: dict[str, dict[str, list[str]] | None] = field(default_factory=dict)
    """What each lease that is open holds; None: it was on its way."""
    pages: int = 0
    """Further pages of drains that were taken."""
    ending: crash.Call | None = None
    """The end of a lease that was on its way."""

    def take(self, done: bool, call: crash.Call) -> None:
        """What the process said."""
        getattr(self, f"_{call.kind}")(done, call)

    def _open(self, done: bool, call: crash.Call) -> None:
        pass

    def _turns(self, done: bool, call: crash.Call) -> None:
        _, names = call.what
        if done:
            self.written |= set(names)
            self.perhaps -= set(names)
        else:
            self.perhaps |= set(names)

    def _reward(self, done: bool, call: crash.Call) -> None:
        key, value = call.what
        self.rewards[key] = {value} if done else {*self.rewards.get(key, {None}), value}

    def _lease(self, done: bool, call: crash.Call) -> None:
        self.leases[call.what] = call.answer
        self.pages += done and call.what.count(".") > 1  # the first has the drain's own name

    def _ack(self, done: bool, call: crash.Call) -> None:
        self.ending = None if done else call
        if done:
            self.forget(self.leases.pop(call.what) or {})

    def forget(self, leased: dict[str, list[str]]) -> None:
        """What a lease held is acknowledged."""
        for key, names in leased.items():
            self.gone |= set(names)
            self.written -= set(names)
            self.rewards.pop(key, None)

    def _release(self, done: bool, call: crash.Call) -> None:
        self.ending = None if done else call
        if done:
            self.leases.pop(call.what)


def record_and_kill(path: Path, seed: int, expected: Expected, runs: list[str]) -> None:
    """Have a process record, and kill it in the middle."""
    numbers = random.Random(seed)
    ours, theirs = _processes.Pipe(duplex=False)
    process = _processes.Process(
        target=crash.run, args=(path, theirs, seed, runs, list(expected.leases)), daemon=True
    )
    process.start()
    theirs.close()
    for _ in range(numbers.randrange(1, 60)):
        expected.take(*ours.recv())
    time.sleep(numbers.random() * 0.004)  # into the middle of a call
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    take_the_rest(ours, expected)


def take_the_rest(told: Connection, expected: Expected) -> None:
    """What the process had said before it was killed."""
    try:
        while True:
            expected.take(*told.recv())
    except EOFError:
        told.close()


def check(store: SQLiteStore, expected: Expected) -> None:
    """Nothing that was told is missing, nothing is there twice."""
    # What was on its way is asked again, as a client does.
    if expected.ending is not None:
        kind, name, _ = expected.ending
        leased = expected.leases.pop(name)
        if kind == "ack":
            store.ack(name)
            expected.forget(leased or {})
        else:
            store.release(name)
        expected.ending = None
    runs = store.get(ALL)
    for name, leased in expected.leases.items():
        again = store.drain(crash.where(name), name, crash.LEASE_S, crash.PAGE_BYTES).runs
        names = {run.key.text: [*run.records] for run in again}
        assert leased is None or names == leased
        expected.leases[name] = names
        if leased is None:
            runs = [run for run in runs if run.key.text not in names]
        runs += again
    found = Counter(name for run in runs for name in run.records)
    assert expected.written <= found.keys(), expected.written - found.keys()
    assert found.keys() <= expected.written | expected.perhaps
    assert not found.keys() & expected.gone
    assert not found or max(found.values()) == 1
    for run in runs:
        assert run.reward in expected.rewards.get(run.key.text, {None})
        expected.rewards[run.key.text] = {run.reward}
    expected.written = set(found)
    expected.perhaps.clear()


def test_what_was_told_survives_a_process_that_is_killed(tmp_path):
    path = tmp_path / "records.db"
    expected, runs = Expected(), list[str]()
    for seed in range(KILLS):
        record_and_kill(path, seed, expected, runs)
        store = SQLiteStore(path)
        check(store, expected)
        runs = [run.key.text for run in store.get(ALL)]
        assert saved(store) is None
        store.close()
        assert rows(path, "PRAGMA integrity_check") == [("ok",)]
    assert len(expected.written) + len(expected.gone) > 5 * KILLS
    assert expected.gone
    assert expected.leases
    assert expected.pages > KILLS / 5
