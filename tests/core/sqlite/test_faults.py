"""Files that are not to be touched, and disks that take no more."""

from __future__ import annotations

import logging
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from recorder_core import FinishReason, Recorder, RecordKey, Turn
from recorder_core.errors import NotSavedError, StoreFileError
from recorder_core.local import LocalRecords
from recorder_core.server import AdminGuard, records_router
from recorder_core.stores import AddOutcome
from recorder_core.stores.sqlite import SQLiteStore, file, schema, writer
from recorder_core.stores.testing import (
    ALL,
    KEY,
    LONG_S,
    OTHER,
    add,
    child,
    drain,
    held,
    names,
    root,
)
from tests.core.sqlite.files import rows, saved


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.db"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again sooner, for a shorter test."""
    monkeypatch.setattr(writer, "RETRY_S", 0.05)


def refused(path: Path, match: str) -> None:
    """The store says why not, and leaves the folder as it is."""
    folder = path.parent
    before = {each: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    with pytest.raises(StoreFileError, match=match) as raised:
        SQLiteStore(path)
    assert str(path) in str(raised.value)
    after = {each: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    # SQLite's own note on the log beside the file, which holds nothing.
    after.pop(path.with_name(f"{path.name}-shm"), None)
    before.pop(path.with_name(f"{path.name}-shm"), None)
    if not before.get(path.with_name(f"{path.name}-wal")):
        assert not after.pop(path.with_name(f"{path.name}-wal"), b"")
    assert after == before


# Files


@pytest.mark.parametrize("text", [b"step,reward\n1,0.5\n" * 100, b"x", b"\0" * 5_000])
def test_a_file_that_is_no_database_is_refused(path, text):
    path.write_bytes(text)
    refused(path, "no record store")


def test_a_database_of_another_program_is_refused(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE runs (key TEXT)")
    connection.close()
    refused(path, "no record store, but another program's")


def filled(path: Path) -> None:
    """A store of 40 runs, closed."""
    store = SQLiteStore(path)
    add(store, *(root("r", RecordKey("7", "sum", run), tokens=3_000) for run in range(40)))
    store.close()


@pytest.mark.parametrize("part", [0.3, 0.6, 0.95])
def test_a_file_that_was_cut_off_is_refused(path, part):
    filled(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    refused(path, "damaged")


def test_a_file_that_was_overwritten_in_the_middle_is_refused(path):
    filled(path)
    data = bytearray(path.read_bytes())
    data[4096 * 12 : 4096 * 49] = b"\xff" * 4096 * 37
    path.write_bytes(data)
    refused(path, "damaged")


def test_a_record_that_is_none_is_refused(path):
    filled(path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE generations SET record = x'93' WHERE number = 17")
    connection.close()
    refused(path, "damaged")


def test_a_damaged_file_with_a_log_beside_it_is_left_as_it_is(path, tmp_path):
    """As a killed process leaves it."""
    store = SQLiteStore(path)
    add(store, *(root("r", RecordKey("7", "sum", run), tokens=3_000) for run in range(40)))
    assert saved(store) is None
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / "records.db"
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    store.close()
    with copy.open("r+b") as damaged:
        damaged.seek(schema.PAGE_BYTES * 2)
        damaged.write(b"\xff" * schema.PAGE_BYTES * 3)
    with Path(f"{copy}-wal").open("r+b") as log:
        log.truncate(32 + 24 + schema.PAGE_BYTES)
    refused(copy, "damaged")


def test_a_log_that_was_killed_is_read(path, tmp_path):
    """What was written, and not yet moved into the file."""
    store = SQLiteStore(path)
    add(store, root("a"))
    assert saved(store) is None
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / "records.db"
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    store.close()
    again = SQLiteStore(copy)
    assert held(again) == [root("a")]
    again.close()


def test_a_file_that_is_in_use_is_refused(path, monkeypatch):
    monkeypatch.setattr(file, "_BUSY_S", 0.05)
    store = SQLiteStore(path)
    add(store, root("a"))
    with pytest.raises(StoreFileError, match="in use by another process"):
        SQLiteStore(path)
    script = f"""
from recorder_core.stores.sqlite import SQLiteStore
SQLiteStore({str(path)!r})
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "in use by another process" in ended.stderr
    assert saved(store) is None
    store.close()
    store = SQLiteStore(path)
    assert held(store) == [root("a")]
    store.close()


def test_a_file_of_a_later_release_is_refused(path):
    filled(path)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    connection.close()
    refused(path, f"version {schema.VERSION + 1}")


def test_a_folder_and_a_file_in_none_are_refused(tmp_path):
    with pytest.raises(StoreFileError, match="is a folder"):
        SQLiteStore(tmp_path)
    with pytest.raises(StoreFileError, match="make it first"):
        SQLiteStore(tmp_path / "absent" / "records.db")


def test_an_empty_file_becomes_a_store(path):
    path.touch()
    store = SQLiteStore(path)
    add(store, root("a"))
    store.close()
    assert rows(path, "SELECT id FROM records") == [("a",)]


def test_a_file_of_an_earlier_version_is_brought_up(path, monkeypatch):
    filled(path)

    def with_notes(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE notes (text TEXT)")

    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    monkeypatch.setitem(schema.MIGRATIONS, schema.VERSION - 1, with_notes)
    store = SQLiteStore(path)
    assert len(held(store)) == 40
    store.close()
    assert rows(path, "PRAGMA user_version") == [(schema.VERSION,)]
    assert rows(path, "SELECT * FROM notes") == []


def test_a_migration_that_fails_leaves_the_file_as_it_was(path, monkeypatch):
    filled(path)

    def half(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM generations")
        connection.execute("UPDATE absent SET x = 1")

    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    monkeypatch.setitem(schema.MIGRATIONS, schema.VERSION - 1, half)
    with pytest.raises(StoreFileError, match="absent"):
        SQLiteStore(path)
    monkeypatch.undo()
    store = SQLiteStore(path)
    assert len(held(store)) == 40
    store.close()


# Disks


def limit_pages(store: SQLiteStore, more: int) -> None:
    """A disk on which so many pages are left."""
    connection = store._file._connection
    ((pages,),) = connection.execute("PRAGMA page_count")
    connection.execute(f"PRAGMA max_page_count = {pages + more}")


def wait_until_fault(store: SQLiteStore, there: bool) -> None:
    deadline = time.monotonic() + 10
    while bool(store._writer.fault) is not there:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_full_disk_refuses_records_and_gives_out_what_is_there(path, caplog):
    store = SQLiteStore(path)
    add(store, *(root("r", RecordKey("7", "old", run), tokens=3_000) for run in range(40)))
    assert saved(store) is None
    limit_pages(store, 3)
    first = root("a", tokens=10_000)
    with caplog.at_level(logging.WARNING):
        add(store, first)
        error = saved(store)
    assert isinstance(error, NotSavedError)
    assert "full" in str(error)
    assert "generations are served and not recorded" in caplog.text
    assert store.add(child(first, "b")) is AddOutcome.DISK
    assert store.stats().counters["disk"] == 1
    # What takes a few bytes is still written, and what is drained makes room.
    assert store.update(RecordKey("7", "old", 1), reward=1.0).records == 1
    assert saved(store, records=False) is None
    lease = store.drain(RecordKey("7", "old", 0), "mine", LONG_S)
    assert saved(store, records=False) is None
    assert isinstance(saved(store), NotSavedError)
    assert len(lease.records) == 1
    for run in range(10, 30):
        store.ack(drain(store, RecordKey("7", "old", run)).id)
    assert saved(store, records=False) is None
    wait_until_fault(store, False)
    add(store, child(first, "c"))
    assert saved(store) is None
    store.ack("mine")
    expected = held(store)
    store.close()
    store = SQLiteStore(path)
    assert held(store) == expected
    assert "lost" not in store.stats().counters
    store.close()


def test_a_disk_that_became_read_only_refuses_until_it_can_be_written(path):
    store = SQLiteStore(path)
    add(store, root("a"))
    assert saved(store) is None
    store._file._connection.execute("PRAGMA query_only = ON")
    store.update(KEY, reward=1.0)
    error = saved(store, records=False)
    assert isinstance(error, NotSavedError)
    assert "readonly" in str(error)
    assert store.add(root("b", OTHER)) is AddOutcome.DISK
    assert names(held(store)) == ["a"]
    store._file._connection.execute("PRAGMA query_only = OFF")
    wait_until_fault(store, False)
    assert saved(store) is None
    add(store, root("b", OTHER))
    store.close()
    store = SQLiteStore(path)
    assert [(run.reward, len(run.records)) for run in store.get(ALL)] == [(1.0, 1), (None, 1)]
    store.close()


def test_a_disk_that_fails_in_the_system_calls_does_no_harm(path):
    """The kernel itself refuses what goes beyond a size."""
    store = SQLiteStore(path)
    add(store, root("a"))
    assert saved(store) is None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        add(store, root("b", OTHER, tokens=50_000))
        assert isinstance(saved(store), NotSavedError)
        assert store.add(root("c", OTHER)) is AddOutcome.DISK
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    wait_until_fault(store, False)
    assert saved(store) is None
    store.close()
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]
    assert rows(path, "SELECT id FROM records ORDER BY id") == [("a",), ("b",)]


def test_what_could_not_be_written_before_the_end_is_counted_at_the_next_start(path, caplog):
    store = SQLiteStore(path)
    add(store, root("a"))
    assert saved(store) is None
    store._file._connection.execute("PRAGMA query_only = ON")
    add(store, root("b", OTHER))
    assert saved(store) is not None
    with caplog.at_level(logging.WARNING):
        store.close()
        assert "1 records could not be written" in caplog.text
        store = SQLiteStore(path)
    assert names(held(store)) == ["a"]
    assert store.stats().counters["lost"] == 1
    assert "1 records had been taken when the process before ended" in caplog.text
    store.close()
    store = SQLiteStore(path)
    assert "lost" not in store.stats().counters  # told once
    store.close()


def turn(key: RecordKey, prompt: list[int]) -> Turn:
    return Turn(
        key=key,
        prompt_ids=prompt,
        response_ids=[7, 8],
        logprobs=[-0.5, -0.25],
        finish_reason=FinishReason.STOP,
        created_at=time.time(),
        finished_at=time.time(),
    )


def test_a_run_says_what_a_full_disk_cost_it(path):
    store = SQLiteStore(path)
    recorder = Recorder(store)
    records = LocalRecords(recorder)
    recorder.submit(turn(KEY, [1]))
    assert records.flush()
    store._file._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(NotSavedError, match="ask again"):
        records.update_reward(KEY, 1.0)
    with pytest.raises(NotSavedError), records.drain():
        pass
    assert store.stats().leases == 0  # nobody was given it
    recorder.submit(turn(KEY, [1, 7, 8, 2]))
    assert not records.flush(10)
    store._file._connection.execute("PRAGMA query_only = OFF")
    wait_until_fault(store, False)
    recorder.submit(turn(KEY, [1, 7, 8, 2, 7, 8, 3]))
    assert records.update_reward(KEY, 1.0) == 2
    stats = recorder.stats()
    assert (stats.recorded, stats.dropped, stats.pending) == (2, {"disk": 1}, 0)
    with records.drain() as drained:
        (run,) = drained.runs
        assert run.missing == {"disk": 1}
    recorder.close()
    store.close()


async def test_the_routes_say_what_is_not_on_the_disk(path):
    store = SQLiteStore(path)
    recorder = Recorder(store)
    app = FastAPI()
    app.include_router(records_router(recorder, guard=AdminGuard("k")))
    recorder.submit(turn(KEY, [1]))
    transport = httpx.ASGITransport(app)
    headers = {"authorization": "Bearer k"}
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as http:
        assert (await http.post("/records/flush")).json() == {"flushed": True}
        store._file._connection.execute("PRAGMA query_only = ON")
        reply = await http.patch("/records", json={"key": str(KEY), "reward": 1.0})
        assert reply.status_code == 507
        assert "would be lost if the process ended before" in reply.json()["detail"]
        for _ in range(2):
            assert (await http.post("/records/drain", json={"prefix": ""})).status_code == 507
        # Nobody was given it: it is there for who asks next.
        assert (await http.get("/records/stats")).json()["store"]["leases"] == 0
        recorder.submit(turn(KEY, [1, 7, 8, 2]))
        assert (await http.post("/records/flush")).json() == {"flushed": False}
        # What only looks does not depend on the disk.
        assert (await http.get("/records/stats")).json()["recorder"]["dropped"] == {"disk": 1}
        assert (await http.get("/records/keys", params={"prefix": ""})).status_code == 200
        store._file._connection.execute("PRAGMA query_only = OFF")
        wait_until_fault(store, False)
        reply = await http.patch("/records", json={"key": str(OTHER), "reward": 1.0})
        assert reply.status_code == 200
    recorder.close()
    store.close()


def test_a_disk_that_is_slower_than_the_engine_holds_the_recorder_up(path, monkeypatch):
    """What is taken and not written is bounded."""
    monkeypatch.setattr(writer, "MAX_UNSAVED_BYTES", 200_000)
    store = SQLiteStore(path)
    most = 0
    write = store._file.write

    def slowly(batch):
        time.sleep(0.02)
        return write(batch)

    store._file.write = slowly
    for run in range(60):
        add(store, root("r", RecordKey("7", "sum", run), tokens=2_000))
        most = max(most, store._writer.changes.unsaved_bytes)
    assert 200_000 < most < 200_000 + 60_000
    assert saved(store) is None
    assert store._writer.changes.unsaved_bytes == 0
    store.close()
