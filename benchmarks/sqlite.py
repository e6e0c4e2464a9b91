"""What a store on the disk costs against one in memory: turns, rewards, drains, coming back."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import generations
from benchmarks.harness import Row, main, microseconds, no_gc, progress, row
from recorder_core import KeyPrefix, MemoryStore, Recorder, Turn
from recorder_core.codec import encode_stream
from recorder_core.local import LocalRecords
from recorder_core.stores import RecordStore
from recorder_core.stores.sqlite import SQLiteStore

PROMPT = RESPONSE = 512
BUDGET = 2**40
ALL = KeyPrefix()


@contextmanager
def in_memory() -> Iterator[Callable[[], RecordStore]]:
    """Makes a store in memory."""
    yield lambda: MemoryStore(BUDGET)


@contextmanager
def on_disk() -> Iterator[Callable[[], RecordStore]]:
    """Makes a store in a file, which is the same each time: it comes back."""
    with tempfile.TemporaryDirectory() as folder:
        yield lambda: SQLiteStore(Path(folder) / "records.db", BUDGET)


KINDS = {"memory": in_memory, "SQLite": on_disk}


class Times:
    """What one kind of store was measured at.

    Args:
        make: Makes the store.
    """

    def __init__(self, make: Callable[[], RecordStore]) -> None:
        self._store = make()
        self._recorder = Recorder(self._store)
        self._records = LocalRecords(self._recorder)
        self.submit: list[float] = []
        self.per_second: list[float] = []
        self.reward: list[float] = []
        self.drain: list[float] = []

    def turns(self, turns: list[Turn]) -> None:
        """Turns that finish at once, until all are safe."""
        begin = time.perf_counter()
        self.submit += [microseconds(self._recorder.submit, turn) for turn in turns]
        assert self._recorder.flush()
        self.per_second.append(len(turns) / (time.perf_counter() - begin))
        for turn in turns[:20]:
            self.reward.append(microseconds(self._records.update_reward, turn.key, 1.0))

    def drained(self) -> None:
        """A drain of everything, to bytes, acknowledged."""
        begin = time.perf_counter()
        with self._records.drain() as drained:
            size = sum(map(len, encode_stream(drained.runs)))
        self.drain.append(size / 1e6 / (time.perf_counter() - begin))

    def close(self) -> None:
        self._recorder.close(60)
        self._store.close()


def coming_back(size: int) -> tuple[float, float]:
    """Seconds until a store of so many bytes is open again, and those of CPU that it takes."""
    record = generations.record(generations.fresh_key(), PROMPT, RESPONSE)
    with on_disk() as make:
        store = make()
        for each in generations.copies(record, size // record.nbytes):
            store.add(each)
        held = store.stats()
        store.close()
        begin, used = time.perf_counter(), time.process_time()
        store = make()
        took = time.perf_counter() - begin, time.process_time() - used
        assert (store.stats().records, store.stats().bytes) == (held.records, held.bytes)
        store.close()
    return took


def measure(quick: bool) -> list[Row]:
    rounds, count, size = (2, 20, 2**20) if quick else (20, 1000, 2**30)
    found: dict[str, Times] = {}
    for name, kind in KINDS.items():
        progress(f"sqlite: {name}")
        with kind() as make:
            times = found[name] = Times(make)
            for _ in range(rounds):
                turns = [generations.single(PROMPT, RESPONSE) for _ in range(count)]
                with no_gc():
                    times.turns(turns)
                    times.drained()
            times.close()
    progress("sqlite: coming back")
    tokens = f"{PROMPT} + {RESPONSE} tokens"
    rows = []
    for what, unit, of in (
        (f"{tokens}, until they are safe", "turns/s", lambda times: times.per_second),
        (f"{tokens}: `submit`, on the engine's loop", "µs/turn", lambda times: times.submit),
        ("a reward, until it is safe", "µs", lambda times: times.reward),
        ("a drain, acknowledged", "MB/s", lambda times: times.drain),
    ):
        rows += [row(f"{name}: {what}", unit, of(times)) for name, times in found.items()]
    again = [coming_back(size) for _ in range(1 if quick else 3)]
    name = f"SQLite: {size / 2**20:,.0f} MiB come back at the start"
    rows.append(row(name, "s", [took for took, _ in again]))
    rows.append(row(f"{name}: CPU", "s", [used for _, used in again]))
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
