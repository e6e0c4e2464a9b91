"""The contract of every store on `SQLiteStore`, and what only it has: it comes back."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recorder_core import KeyPrefix, RecordKey, Run
from recorder_core.drops import DropReason
from recorder_core.errors import LeaseError, StoreClosedError
from recorder_core.stores import AddOutcome, RecordStore
from recorder_core.stores.sqlite import SQLiteStore, schema, writer
from recorder_core.stores.testing import (
    ALL,
    KEY,
    LONG_S,
    OTHER,
    SHORT_S,
    RandomSequence,
    RecordStoreContract,
    add,
    check_accounts,
    child,
    drain,
    held,
    names,
    root,
    run_of,
)
from tests.core.sqlite.files import rows, saved


class TestContract(RecordStoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Callable[[int], RecordStore]:
        numbers = itertools.count()
        return lambda max_bytes: SQLiteStore(tmp_path / f"{next(numbers)}.db", max_bytes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.db"


def test_what_a_run_has_comes_back(path):
    store = SQLiteStore(path)
    first = root("a", info={"judge": {"score": 3}}, versions=((0, 3, "step-9"),), flags=("odd",))
    second = child(first, "b", response_text="wörld \N{SNOWMAN}")
    add(store, first, second, root("c", OTHER))
    store.update(KEY, reward=1.5, info={"env": "math"})
    store.update(KEY, sample_ids=["b"], reward=0.25, token_level_reward=[0.0, 1.0])
    store.amend(KEY, "a", delivered=False, flag="late")
    store.note_dropped(KEY, DropReason.LOST)
    expected = store.get(ALL)
    store.close()

    store = SQLiteStore(path)
    assert store.get(ALL) == expected
    assert run_of(store).missing == {"lost": 1}
    check_accounts(store, [])
    # It goes on as if nothing had been.
    assert store.add(child(second, "d"), store.epoch(KEY)) is AddOutcome.STORED
    assert store.add(second) is AddOutcome.STORED
    assert names(held(store, KEY)) == ["a", "b", "d"]
    store.close()


def test_what_is_learnt_after_a_record_was_written_comes_back_and_rewrites_nothing(path):
    store = SQLiteStore(path)
    first = root("a", tokens=5_000)
    add(store, first)
    assert saved(store) is None
    store.amend(KEY, "a", delivered=True)
    store.update(KEY, reward=1.0)
    store.update(KEY, sample_ids=["a"], reward=0.5, info={"x": 1}, token_level_reward=[0.5] * 5_000)
    store.release(drain(store).id)
    lease = drain(store)
    add(store, root("b"))
    assert saved(store) is None
    store.release(lease.id)
    expected = store.get(ALL)
    store.close()
    assert [number for (number,) in rows(path, "SELECT number FROM generations")] == [1, 2]

    store = SQLiteStore(path)
    assert store.get(ALL) == expected
    store.close()


def test_leases_come_back_under_their_names(path):
    store = SQLiteStore(path)
    add(store, root("a"), root("b", OTHER))
    store.drain(KEY, "mine", LONG_S)
    store.drain(OTHER, "done", LONG_S)
    store.ack("done")
    expected = store.drain(KEY, "mine", LONG_S).runs
    store.close()

    store = SQLiteStore(path)
    assert store.get(ALL) == []
    assert store.drain(KEY, "mine", LONG_S).runs == expected
    with pytest.raises(LeaseError, match="mine"):
        store.drain(ALL, "mine", LONG_S)
    with pytest.raises(LeaseError, match="done"):
        store.drain(OTHER, "done", LONG_S)
    assert store.ack("done") == 0
    assert store.ack("mine") == 1
    store.close()
    assert rows(path, "SELECT count(*) FROM generations") == [(0,)]


def test_a_lease_that_ran_out_in_the_meantime_is_over(path):
    store = SQLiteStore(path)
    add(store, root("a"))
    lease = drain(store, lease_s=SHORT_S)
    store.close()
    time.sleep(SHORT_S)
    store = SQLiteStore(path)
    assert names(held(store)) == ["a"]
    with pytest.raises(LeaseError):
        store.ack(lease.id)
    store.close()


def test_what_is_blocked_and_what_was_evicted_is_known_again(path):
    store = SQLiteStore(path)
    add(store, root("a"), root("b", OTHER))
    time.sleep(0.02)
    assert store.sweep(0.01) == 2
    store.block(KeyPrefix("9"))
    store.block(OTHER)
    store.close()

    store = SQLiteStore(path)
    assert store.add(root(key=RecordKey("9", "sum", 0))) is AddOutcome.BLOCKED
    assert store.add(root(key=OTHER)) is AddOutcome.BLOCKED
    add(store, root("c"))
    assert run_of(store).missing == {"evicted": 1}
    store.close()


def test_runs_keep_their_age_and_their_order(path):
    store = SQLiteStore(path)
    add(store, root("a"))
    time.sleep(0.3)
    add(store, root("b", OTHER))
    store.close()

    store = SQLiteStore(path)
    ages = [each.age_s for each in store.keys(ALL)]
    assert ages[0] - ages[1] == pytest.approx(0.3, abs=0.15)
    assert store.sweep(ages[1] + 0.15) == 1
    assert names(held(store)) == ["b"]
    store.close()


def everything(store: RecordStore, leases: list[tuple[object, str]]) -> list[Run]:
    """All runs, in sight or leased; of a run with several parts the order of records may differ."""
    found = store.get(ALL)
    for where, name in leases:
        found += store.drain(where, name, LONG_S).runs
    for run in found:
        run.closed = False
    return [
        Run(
            run.key,
            sorted(run.records.values(), key=lambda record: record.id),
            reward=run.reward,
            info=run.info,
            dropped=run.dropped,
            evicted=run.evicted,
        )
        for run in found
    ]


@pytest.mark.parametrize("seed", range(10))
def test_after_any_sequence_of_calls_the_file_has_what_the_memory_had(path, seed, monkeypatch):
    monkeypatch.setattr(writer, "LINGER_S", 0.0005)  # commits fall between any two calls
    numbers = random.Random(seed)
    store = SQLiteStore(path, 24_000)
    sequence = RandomSequence(store, numbers)
    for _ in range(8):
        for _ in range(numbers.randrange(1, 30)):
            sequence.step()
            if numbers.random() < 0.3:
                assert saved(store) is None
        expected = everything(store, sequence.leases)
        summaries = [each._replace(age_s=0, bytes=0) for each in store.keys(ALL)]
        store.close()
        store = SQLiteStore(path, 24_000)
        assert "lost" not in store.stats().counters
        assert everything(store, sequence.leases) == expected
        assert [each._replace(age_s=0, bytes=0) for each in store.keys(ALL)] == summaries
        check_accounts(store, sequence.leases)
        assert rows_are_sound(path, store)
        sequence._store = store
        store.watch(lambda key: 0)
    sequence.end()
    store.close()
    assert rows(path, "SELECT count(*) FROM generations") == [(0,)]
    assert rows(path, "SELECT count(*) FROM records") == [(0,)]
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


def rows_are_sound(path: Path, store: SQLiteStore) -> bool:
    """Each generation belongs to one record; none was left behind. Of a store just opened."""
    connection = store._file._connection
    ((alone,),) = connection.execute(
        "SELECT count(*) FROM generations WHERE number NOT IN (SELECT generation FROM records)"
    )
    ((generations,),) = connection.execute("SELECT count(*) FROM generations")
    stats = store.stats()
    return alone == 0 and generations == stats.records + stats.leased_records


def pages(store: SQLiteStore) -> int:
    ((count,),) = store._file._connection.execute("PRAGMA page_count")
    return count


def test_the_file_does_not_grow_for_ever(path):
    store = SQLiteStore(path)
    sizes = []
    for cycle in range(16):
        for run in range(10):
            add(store, root(f"{cycle}", RecordKey(f"{cycle}", "sum", run), tokens=20_000))
        assert saved(store) is None
        sizes.append(path.stat().st_size + path.with_name("records.db-wal").stat().st_size)
        store.ack(drain(store).id)
        assert saved(store) is None
    assert max(sizes[8:]) <= 1.2 * max(sizes[:8])
    # What it has no use for goes back some at a time, while nothing else happens.
    deadline = time.monotonic() + 30
    while pages(store) > max(sizes) / schema.PAGE_BYTES / 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    store.close()
    assert path.stat().st_size < max(sizes) / 4
    assert not path.with_name("records.db-wal").exists()


def test_many_acknowledged_leases_leave_bounded_room(path, monkeypatch):
    from recorder_core.stores.sqlite import rows as rows_module

    monkeypatch.setattr(rows_module, "MAX_REMEMBERED", 50)
    monkeypatch.setattr(rows_module, "_SLACK", 10)
    store = SQLiteStore(path)
    for number in range(300):
        store.drain(KEY, f"lease {number}", LONG_S)
        store.ack(f"lease {number}")
        store.block(KeyPrefix(f"{number}"))
        if not number % 7:
            assert saved(store) is None
    store.close()
    for table in ("acknowledged", "blocked"):
        ((count,),) = rows(path, f"SELECT count(*) FROM {table}")
        assert 50 <= count <= 75
    store = SQLiteStore(path)
    assert store.ack("lease 299") == 0
    store.close()


def test_closing_writes_what_is_due(path):
    store = SQLiteStore(path)
    add(store, root("a"))
    store.close()
    with pytest.raises(StoreClosedError):
        store.when_safe(print)
    assert rows(path, "SELECT id FROM records") == [("a",)]
    assert not path.with_name("records.db-tally").exists()


def test_what_came_and_went_is_never_written(path, monkeypatch):
    monkeypatch.setattr(writer, "LINGER_S", 10.0)
    store = SQLiteStore(path)
    add(store, root("a"))
    store.ack(drain(store).id)
    assert saved(store) is None
    add(store, root("b"))
    store.close()
    # The first would have been number 1.
    assert rows(path, "SELECT number FROM generations") == [(1,)]


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.update(KEY, info={"x": object()}),
        lambda store: store.update(KEY, info={"x": "\ud800"}),
        lambda store: store.add(root("b", model="\ud800")),
        lambda store: store.overwrite(KEY, [root("b", info={"x": object()})]),
        lambda store: store.drain(ALL, "\ud800", LONG_S),
    ],
    ids=["info", "surrogate in info", "add", "overwrite", "lease"],
)
def test_what_cannot_be_written_is_refused_and_changes_nothing(path, call):
    store = SQLiteStore(path)
    add(store, root("a"))
    with pytest.raises(ValueError, match=r"written|surrogates"):
        call(store)
    assert held(store) == [root("a")]
    assert saved(store) is None
    store.close()


def test_threads_that_wait_share_transactions(path):
    """So that a reward costs no transaction of its own."""
    store = SQLiteStore(path)
    add(store, *(root("a", RecordKey("7", "sum", run)) for run in range(50)))
    assert saved(store) is None
    batches = []
    write = store._file.write
    store._file.write = lambda batch: (time.sleep(0.02), batches.append(batch), write(batch))[2]
    waiting = []
    for run in range(50):
        store.update(RecordKey("7", "sum", run), reward=1.0)
        store.when_safe(waiting.append)
    assert saved(store) is None
    assert waiting == [None] * 50
    assert len(batches) < 10
    store.close()
