"""The contract of every store on `MemoryStore`, and what only it has: eviction, honest bytes."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from recorder_core import (
    FinishReason,
    KeyPrefix,
    MultiModalItem,
    Record,
    RecordKey,
    RoutedExperts,
    Sampling,
    Turn,
    VersionSpan,
)
from recorder_core.recorder import Recorder
from recorder_core.stores import AddOutcome, MemoryStore, RecordStore
from recorder_core.stores import memory as memory_module
from recorder_core.stores.testing import ALL, RecordStoreContract, child, names, root

MIB = 1024**2


class TestContract(RecordStoreContract):
    @pytest.fixture
    def make_store(self) -> Callable[[int], RecordStore]:
        return MemoryStore


class TestRejectingContract(RecordStoreContract):
    @pytest.fixture
    def make_store(self) -> Callable[[int], RecordStore]:
        return lambda max_bytes: MemoryStore(max_bytes, when_full="reject")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def key(run: int) -> RecordKey:
    return RecordKey("7", "sum", run)


def runs(store: MemoryStore) -> list[int]:
    return [summary.key.run for summary in store.keys(ALL)]


def room_for(count: int) -> int:
    return count * root().nbytes


# Eviction


def test_the_keys_written_to_least_recently_are_evicted_first():
    store = MemoryStore(room_for(4))
    first = root("a", key(0))
    for record in (first, root("b", key(1)), root("c", key(2))):
        store.add(record)
    store.add(child(first, "d"))  # run 0 is now the latest: run 1 goes first, then run 2
    store.add(root("e", key(3)))
    assert runs(store) == [0, 2, 3]
    store.add(root("f", key(4)))
    assert runs(store) == [0, 3, 4]
    assert store.stats().counters["evicted"] == 2


def test_a_key_is_evicted_whole_and_every_record_of_it_counted():
    store = MemoryStore(room_for(4))
    first = root("a", key(0))
    for record in (first, child(first, "b"), child(first, "c"), root("d", key(1))):
        store.add(record)
    store.add(root("e", key(2)))
    assert runs(store) == [1, 2]
    assert store.stats().counters["evicted"] == 3


def test_a_run_is_never_evicted_for_its_own_next_turn():
    store = MemoryStore(room_for(2))
    first = root("a", key(0))
    store.add(first)
    store.add(root("b", key(1)))
    assert store.add(child(first, "c")) is AddOutcome.STORED
    assert runs(store) == [0]
    assert store.add(child(first, "d")) is AddOutcome.FULL
    assert names(store.get(ALL)) == ["a", "c"]
    assert store.stats().counters["full"] == 1


def test_leased_records_are_never_evicted(clock):
    store = MemoryStore(room_for(3), clock=clock)
    store.add(root("a", key(0)))
    store.add(root("b", key(1)))
    lease = store.drain(ALL, 10.0)
    store.add(root("c", key(2)))
    assert store.add(root("d", key(3))) is AddOutcome.STORED
    assert runs(store) == [3]
    store.drain(KeyPrefix("7/sum/3"), 10.0)
    assert store.add(root("e", key(4))) is AddOutcome.FULL
    assert store.ack(lease.id) == 2
    assert store.add(root("e", key(4))) is AddOutcome.STORED


def test_what_came_back_from_a_lease_is_evicted_before_what_is_new(clock):
    store = MemoryStore(room_for(2), clock=clock)
    store.add(root("a", key(0)))
    store.drain(ALL, 10.0)
    store.add(root("b", key(1)))
    clock.now += 11
    store.add(root("c", key(2)))
    assert runs(store) == [1, 2]


def test_a_record_larger_than_the_budget_evicts_nothing():
    store = MemoryStore(room_for(2))
    store.add(root("a", key(0)))
    assert store.add(root("b", key(1), tokens=MIB)) is AddOutcome.FULL
    assert runs(store) == [0]


def test_reject_refuses_what_is_new_and_evicts_nothing():
    store = MemoryStore(room_for(2), when_full="reject")
    outcomes = [store.add(root("r", key(run))) for run in range(4)]
    assert [outcome.value for outcome in outcomes] == ["stored", "stored", "full", "full"]
    assert runs(store) == [0, 1]
    assert store.stats().counters == {"stored": 2, "full": 2}


def test_a_full_store_warns_once_a_minute_and_says_how_much_it_held_back(caplog, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = MemoryStore(room_for(1))
    with caplog.at_level(logging.WARNING):
        for run in range(100):
            store.add(root("r", key(run)))
            now += 0.5
        assert len(caplog.records) == 1
        assert "1 records of the least recently written keys were evicted" in caplog.text
        now += 60
        store.add(root("r", key(100)))
    assert len(caplog.records) == 2
    assert "(98 more since the last such message)" in caplog.text


@pytest.mark.parametrize(
    "options", [{"max_bytes": 0}, {"max_bytes": -1}, {"when_full": "panic"}], ids=str
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        MemoryStore(**options)


def test_thousands_of_rollouts_with_large_routed_experts_keep_to_the_budget():
    # R6 scaled: the arrays share one buffer, so that the test itself needs no gigabytes.
    routed = RoutedExperts(data=np.zeros((180 * 1024 // 64, 8, 8), dtype=np.uint8))
    budget = 64 * routed.data.nbytes
    store = MemoryStore(budget)
    for run in range(3_800):
        record = Record(
            id="r",
            key=key(run),
            prompt_ids=np.zeros(len(routed.data), dtype=np.int32),
            response_ids=[1],
            finish_reason=FinishReason.STOP,
            routed_experts=routed,
        )
        assert store.add(record) is AddOutcome.STORED
        assert store.stats().bytes <= budget
    stats = store.stats()
    assert 50 < stats.records < 64
    assert stats.counters["evicted"] == 3_800 - stats.records
    assert runs(store) == list(range(3_800 - stats.records, 3_800))


def test_an_eviction_does_not_scan_the_store():
    def seconds_per_eviction(keys: int) -> float:
        store = MemoryStore(room_for(keys))
        numbers = itertools.count()
        for _ in range(keys):
            store.add(root("r", key(next(numbers))))
        records = [root("r", key(next(numbers))) for _ in range(200)]
        start = time.perf_counter()
        for record in records:
            store.add(record)
        seconds = time.perf_counter() - start
        assert store.stats().counters["evicted"] == 200
        return seconds / 200

    few = min(seconds_per_eviction(100) for _ in range(3))
    many = min(seconds_per_eviction(10_000) for _ in range(3))
    assert many < 10 * few  # a scan would be 100 times as long


# Memory


def test_blocked_prefixes_take_bounded_memory_over_a_long_training_run():
    store = MemoryStore()
    tracemalloc.start()
    try:
        for batch in range(50_000):
            store.block(KeyPrefix(f"run/{batch}"))
        gc.collect()
        half = tracemalloc.get_traced_memory()[0]
        for batch in range(50_000, 100_000):
            store.block(KeyPrefix(f"run/{batch}"))
        gc.collect()
        whole = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert store.stats().blocked_prefixes == memory_module.MAX_BLOCKED_PREFIXES
    assert whole < 8 * MIB
    assert whole < 1.05 * half
    assert store.add(root(key=RecordKey("run/99999", "sum", 0))) is AddOutcome.BLOCKED
    assert store.add(root(key=RecordKey("run/100000", "sum", 0))) is AddOutcome.STORED


def test_a_late_finish_of_an_aborted_batch_is_dropped_after_its_drain():
    store = MemoryStore()
    store.add(root("a", RecordKey("12", "sum", 0)))
    store.block(KeyPrefix("12"))
    store.ack(store.drain(KeyPrefix("12"), 60).id)
    for _ in range(100):
        assert store.add(root("late", RecordKey("12", "sum", 0))) is AddOutcome.BLOCKED
    stats = store.stats()
    assert (stats.records, stats.bytes, stats.counters["blocked"]) == (0, 0, 100)


def _turns(runs: int, turns: int, prompt: int, response: int, text: bool) -> Iterator[Turn]:
    """Multi-turn runs as an engine's hook hands them over; `prompt` new tokens in each turn."""

    def words(tokens: int) -> str | None:
        return "".join(random.choices("abcd ", k=4 * tokens)) if text else None

    for run in range(runs):
        history: list[int] = []
        for _ in range(turns):
            history = [*history, *(random.randrange(150_000) for _ in range(prompt))]
            sampled = [random.randrange(150_000) for _ in range(response)]
            yield Turn(
                key=key(run),
                prompt_ids=history,
                response_ids=sampled,
                logprobs=[-random.random() for _ in range(response)],
                finish_reason=FinishReason.STOP,
                stop_reason=random.randrange(1000, 150_000),
                versions=[VersionSpan(0, response, f"step-{run}")],
                prompt_text=words(len(history)),
                response_text=words(response),
                sampling=Sampling(
                    temperature=random.random(),
                    top_p=0.9,
                    top_k=20,
                    seed=random.randrange(10**9),
                    logprobs_mode="raw_logprobs",
                ),
                request_id=f"chatcmpl-{uuid.uuid4()}",
                created_at=time.time(),
                finished_at=time.time(),
                cached_tokens=random.randrange(1000, 10_000),
            )
            history = history + sampled


@pytest.mark.parametrize("text", [True, False], ids=["text", "no text"])
@pytest.mark.parametrize(
    ("runs", "turns", "prompt", "response"),
    [(200, 1, 64, 64), (20, 10, 64, 64), (60, 1, 512, 512), (12, 5, 512, 512), (8, 1, 8192, 1024)],
)
def test_bytes_are_what_the_records_really_take(runs, turns, prompt, response, text):
    store = MemoryStore()
    recorder = Recorder(store)
    for warm_up in _turns(1, turns, prompt, response, text):
        recorder.submit(warm_up)
    recorder.flush()
    store.remove(ALL)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for turn in _turns(runs, turns, prompt, response, text):
            recorder.submit(turn)
        del turn
        recorder.close()
        recorder._indexes.clear()  # beside the store, with a bound of its own
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert store.stats().records == runs * turns
    # Objects differ in size from one Python to the next; what is claimed may be a little too much.
    assert 0.85 * taken <= store.stats().bytes <= 1.3 * taken


def test_whatever_a_client_or_a_newer_version_put_into_a_record_counts():
    bare = root()
    image = MultiModalItem(modality="image", offset=0, length=1, identity="x" * 64)
    for fields, expected in [
        ({"request_id": "r" * 60_000}, 60_000),
        ({"response_text": "日本語" * 1000}, 2 * 3000),
        ({"info": {"notes": "n" * 10_000}}, 10_000),
        ({"versions": [(n, n + 1, f"{n}") for n in range(3)]}, 3 * 200),
        ({"multi_modal": [image] * 10}, 10 * 500),
        ({"from_a_newer_version": np.zeros(MIB, dtype=np.uint8)}, MIB),
        ({"from_a_newer_version": {"deep": ["text" * 1000]}}, 4000),
    ]:
        assert root(**fields).nbytes - bare.nbytes >= expected, fields


def test_bytes_follow_every_update():
    store = MemoryStore()
    store.add(root(tokens=1000))
    bare = store.stats().bytes
    store.update(key(0), token_level_reward=[0.0] * 1000)
    assert store.stats().bytes == bare + 4000
    store.update(key(0), token_level_reward=[1.0] * 1000)
    assert store.stats().bytes == bare + 4000
    store.remove(ALL)
    assert store.stats().bytes == 0


# Time


def test_a_lease_lasts_its_time_and_not_longer(clock):
    store = MemoryStore(clock=clock)
    store.add(root())
    lease = store.drain(ALL, 10.0)
    clock.now += 9.9
    assert store.get(ALL) == []
    clock.now += 0.1
    assert store.get(ALL) == list(lease.records)


def test_a_sweep_goes_by_the_last_addition_and_leaves_leased_records(clock):
    store = MemoryStore(clock=clock)
    store.add(root("leased", key(0)))
    store.drain(ALL, 1000.0)
    first = root("a", key(1))
    store.add(first)
    store.add(root("b", key(2)))
    clock.now += 60
    store.add(child(first, "c"))
    assert [summary.age_s for summary in store.keys(ALL)] == [0, 60]
    assert store.sweep(59) == 1
    assert store.stats().counters["swept"] == 1
    clock.now += 1000
    assert sorted(names(store.get(ALL))) == ["a", "c", "leased"]
