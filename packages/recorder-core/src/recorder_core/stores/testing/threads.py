"""The contract on threads: every method is atomic."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from recorder_core.drops import DropReason
from recorder_core.keys import RecordKey
from recorder_core.stores.base import AddOutcome, RecordStore
from recorder_core.stores.testing.given import (
    ALL,
    KEY,
    GivenStore,
    add,
    child,
    drain,
    held,
    names,
    root,
)
from recorder_core.stores.testing.sequences import accounted_for


class ThreadsContract(GivenStore):
    """What every store keeps though many threads use it."""

    @pytest.mark.parametrize("records", [False, True])
    def test_it_is_told_when_what_was_changed_is_safe(
        self, store: RecordStore, records: bool
    ) -> None:
        """Once, wherever it is asked, and also where nothing was changed."""
        told: list[Exception | None] = []
        for calls in range(1, 4):
            store.when_safe(told.append, records=records)
            deadline = time.monotonic() + 10
            while len(told) < calls and time.monotonic() < deadline:
                time.sleep(0.001)
            assert told == [None] * calls
            add(store, root(f"{calls}"))
            store.update(KEY, reward=1.0)

    @pytest.mark.usefixtures("busy_threads")
    def test_threads_that_write_to_one_key_lose_nothing(self, store: RecordStore) -> None:
        """Neither a record, nor info, nor a byte of the accounts."""

        def write(thread: int) -> None:
            for number in range(30):
                name = f"{thread}-{number}"
                add(store, root(name))
                given = {f"by {thread}": number}
                assert store.update(KEY, sample_ids=[name], info=given) == (1, [])
                store.note_dropped(KEY, DropReason.LOST)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(write, range(8)))
        expected = {f"{a}-{b}": {f"by {a}": b} for a in range(8) for b in range(30)}
        assert {record.id: record.info for record in held(store)} == expected
        (summary,) = store.keys(ALL)
        assert summary.missing == {"lost": 240}
        assert accounted_for(store.stats()) == store.stats().counters["stored"] == 240
        assert store.ack(drain(store).id) == 240
        assert store.stats().bytes == 0

    @pytest.mark.usefixtures("busy_threads")
    def test_a_run_is_read_while_it_grows(self, store: RecordStore) -> None:
        """As it is at one moment: what was written in one call is seen together."""
        add(store, root("r0"))
        done = threading.Event()

        def write() -> None:
            try:
                for number in range(1, 400):
                    add(store, root(f"r{number}", reward=0.0))
                    store.update(KEY, sample_ids=["r0"], reward=0.0, info={"n": number})
            finally:
                done.set()

        def read() -> None:
            while not done.is_set():
                (run,) = store.get(KEY)
                first = run.records["r0"]
                assert (first.reward is None) == (first.info == {})
                (summary,) = store.keys(KEY)
                assert summary.records - summary.rewarded in (0, 1)

        with ThreadPoolExecutor(3) as threads:
            for future in [threads.submit(each) for each in (write, read, read)]:
                future.result()

    @pytest.mark.usefixtures("busy_threads")
    def test_each_record_comes_out_exactly_once(self, store: RecordStore) -> None:
        """Eight threads add runs and reward them while two others drain and acknowledge."""
        done = threading.Event()

        def record_runs(thread: int) -> list[str]:
            made = []
            for run in range(40):
                key = RecordKey(str(thread), "sum", run)
                first = root(f"{key}-first", key)
                add(store, first)
                # Not stored where a drain came in between, as the recorder would see it.
                if store.add(child(first, f"{key}-second")) is AddOutcome.STORED:
                    made.append(f"{key}-second")
                store.update(key, reward=float(run))
                made.append(first.id)
            return made

        def drain_all() -> list[str]:
            drained = []
            while True:
                last = done.is_set()
                lease = drain(store)
                assert store.ack(lease.id) == len(lease.records)
                drained += names(lease.records)
                if last:
                    return drained
                time.sleep(0.002)

        with ThreadPoolExecutor(10) as threads:
            draining = [threads.submit(drain_all) for _ in range(2)]
            try:
                made = [name for batch in threads.map(record_runs, range(8)) for name in batch]
            finally:
                done.set()
            drained = [name for future in draining for name in future.result()]
        assert sorted(drained) == sorted(made)
        assert len(made) >= 320
        assert accounted_for(store.stats()) == store.stats().counters["stored"] == len(made)
