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
    RecordKey,
    RoutedExperts,
    Sampling,
    Turn,
    VersionSpan,
)
from recorder_core.drops import DropReason
from recorder_core.recorder import Recorder
from recorder_core.runs import RUN_BYTES
from recorder_core.stores import AddOutcome, MemoryStore, RecordStore
from recorder_core.stores import memory as memory_module
from recorder_core.stores.testing import (
    ALL,
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
from tests.core.builders import masked

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
    """Bytes of so many runs of one record."""
    return count * (RUN_BYTES + root().nbytes)


# Eviction


def test_the_runs_written_to_least_recently_are_evicted_first():
    store = MemoryStore(room_for(4))
    first = root("a", key(0))
    add(store, first, root("b", key(1)), root("c", key(2)))
    add(store, child(first, "d"))  # run 0 is now the latest: run 1 goes first, then run 2
    add(store, root("e", key(3)))
    assert runs(store) == [0, 2, 3]
    add(store, root("f", key(4)))
    assert runs(store) == [0, 3, 4]
    assert store.stats().counters["evicted"] == 2


def test_a_run_is_evicted_whole_and_every_record_of_it_counted():
    store = MemoryStore(room_for(3))
    first = root("a", key(0))
    add(store, first, child(first, "b"), child(first, "c"), root("d", key(1)), root("e", key(2)))
    assert runs(store) == [1, 2]
    assert store.stats().counters["evicted"] == 3


def test_a_run_is_never_evicted_for_its_own_next_turn():
    store = MemoryStore(room_for(1) + 2 * root().nbytes + 100)
    first = root("a", key(0))
    add(store, first, root("b", key(1)))
    add(store, child(first, "c"), child(first, "d"))
    assert runs(store) == [0]
    assert store.add(child(first, "e")) is AddOutcome.FULL
    assert names(held(store)) == ["a", "c", "d"]
    assert store.stats().counters["full"] == 1


def test_a_run_in_flight_is_passed_over():
    """Its next turn is being sampled, and would have lost its head. S1."""
    store = MemoryStore(room_for(3))
    store.watch(lambda other: other == key(0))
    add(store, *(root("r", key(run)) for run in range(6)))
    assert runs(store) == [0, 4, 5]
    store.watch(lambda other: 1)
    assert store.add(root("r", key(6))) is AddOutcome.FULL


def test_an_evicted_run_that_goes_on_says_what_it_lacks():
    """However often it was evicted, and what was dropped of it before. S1."""
    store = MemoryStore(room_for(1))
    store.note_dropped(key(0), DropReason.LOST)
    add(store, root("a", key(0)), root("x", key(1)), root("b", key(0)), root("x", key(1)))
    add(store, root("c", key(0)))
    assert run_of(store, key(0)).missing == {"lost": 1, "evicted": 2}
    assert store.update(key(0), reward=1.0).records == 1


def test_what_was_evicted_while_a_part_was_leased_is_known_when_it_comes_back():
    """The part that comes back is not the whole run. S1."""
    store = MemoryStore(room_for(2))
    add(store, root("a", key(0)))
    lease = drain(store)
    add(store, root("b", key(0)), root("x", key(1)))
    assert runs(store) == [1]
    store.release(lease.id)
    assert run_of(store, key(0)).missing == {"evicted": 1}


@pytest.mark.parametrize("how", ["remove", "overwrite"])
def test_a_run_that_begins_anew_lacks_nothing(how):
    store = MemoryStore(room_for(1))
    add(store, root("a", key(0)), root("x", key(1)))
    if how == "remove":
        store.remove(KeyPrefix("7/sum"))
        add(store, root("b", key(0)))
    else:
        store.overwrite(key(0), [root("b", key(0))])
    assert run_of(store, key(0)).missing == {}


def test_leased_records_are_never_evicted(clock):
    store = MemoryStore(room_for(3), clock=clock)
    add(store, root("a", key(0)), root("b", key(1)))
    lease = drain(store, lease_s=10.0)
    add(store, root("c", key(2)), root("d", key(3)))
    assert runs(store) == [3]
    drain(store, key(3), lease_s=10.0)
    assert store.add(root("e", key(4))) is AddOutcome.FULL
    assert store.ack(lease.id) == 2
    assert store.add(root("e", key(4))) is AddOutcome.STORED


def test_what_came_back_from_a_lease_is_evicted_before_what_is_new(clock):
    store = MemoryStore(room_for(2), clock=clock)
    add(store, root("a", key(0)))
    drain(store, lease_s=10.0)
    add(store, root("b", key(1)))
    clock.now += 11
    add(store, root("c", key(2)))
    assert runs(store) == [1, 2]


def test_a_record_larger_than_the_budget_evicts_nothing():
    store = MemoryStore(room_for(2))
    add(store, root("a", key(0)))
    assert store.add(root("b", key(1), tokens=MIB)) is AddOutcome.FULL
    assert runs(store) == [0]


def test_reject_refuses_what_is_new_and_evicts_nothing():
    store = MemoryStore(room_for(2), when_full="reject")
    outcomes = [store.add(root("r", key(run))) for run in range(4)]
    assert [outcome.value for outcome in outcomes] == ["stored", "stored", "full", "full"]
    assert runs(store) == [0, 1]
    assert store.stats().counters == {"stored": 2, "full": 2}


def test_one_run_cannot_fill_the_store():
    """Its own records are refused; no other run makes way for them. S12."""
    store = MemoryStore(room_for(10), max_run_bytes=room_for(2))
    add(store, *(root("r", key(run)) for run in range(1, 9)))
    outcomes = [store.add(root(str(number), key(0))) for number in range(6)]
    assert AddOutcome.FULL in outcomes
    kept = outcomes.index(AddOutcome.FULL)
    assert set(outcomes[kept:]) == {AddOutcome.FULL}
    assert runs(store) == list(range(9))
    assert store.keys(key(0))[0].bytes <= room_for(2)
    with pytest.raises(ValueError, match=f"budget of {room_for(2)}"):
        store.update(key(0), info={"note": "x" * 4_000})
    with pytest.raises(ValueError, match=f"budget of {room_for(2)}"):
        store.overwrite(key(0), [root(str(number), key(0)) for number in range(6)])
    store.overwrite(key(0), [root(str(number), key(0)) for number in range(kept)])
    assert len(held(store, key(0))) == kept
    check_accounts(store, [])


def test_what_is_leased_of_a_run_makes_no_room_in_its_budget():
    store = MemoryStore(max_run_bytes=room_for(1))
    add(store, root("a", key(0)))
    drain(store)
    with pytest.raises(ValueError, match="budget"):
        store.overwrite(key(0), [root("b", key(0)), root("c", key(0))])
    add(store, root("b", key(0)))


def test_a_full_store_warns_once_a_minute_and_says_how_much_it_held_back(caplog, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = MemoryStore(room_for(1))
    with caplog.at_level(logging.WARNING):
        for run in range(100):
            store.add(root("r", key(run)))
            now += 0.5
        assert len(caplog.records) == 1
        assert "1 runs, those written to least recently, were evicted" in caplog.text
        now += 60
        store.add(root("r", key(100)))
    assert len(caplog.records) == 2
    assert "(98 more since the last such message)" in caplog.text


@pytest.mark.parametrize(
    "options",
    [{"max_bytes": 0}, {"max_bytes": -1}, {"max_run_bytes": 0}, {"when_full": "panic"}],
    ids=str,
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
        prompt_ids = np.zeros(len(routed.data), dtype=np.int32)
        add(store, root("r", key(run), prompt_ids=prompt_ids, routed_experts=routed))
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


# Cost


def microseconds(call: Callable[[int], object], number: int = 400) -> float:
    """CPU time of one call, with numbers from 0 on: the least of eight measurements."""
    found = []
    for numbers in np.array_split(np.arange(number), 8):
        start = time.thread_time()
        for each in numbers.tolist():
            call(each)
        found.append((time.thread_time() - start) / max(len(numbers), 1))
    return min(found) * 1e6


def costs(store: MemoryStore) -> dict[str, float]:
    """What operations on one run take."""

    def one(run: int) -> RecordKey:
        return RecordKey("one", "t", run)

    records = [root("r", one(run)) for run in range(400)]
    found = {"add": microseconds(lambda n: store.add(records[n]))}
    found["update"] = microseconds(lambda n: store.update(one(n), reward=1.0))
    found["update by id"] = microseconds(
        lambda n: store.update(one(n), sample_ids=["r"], reward=1.0)
    )
    found["epoch"] = microseconds(lambda n: store.epoch(one(n)))
    found["keys"] = microseconds(lambda n: store.keys(one(n)))
    found["keys by prefix"] = microseconds(lambda n: store.keys(KeyPrefix(f"one/t/{n}")))
    found["get"] = microseconds(lambda n: store.get(one(n)))
    found["drain"] = microseconds(lambda n: store.drain(one(n), f"lease {n}", 600.0))
    found["extend"] = microseconds(lambda n: store.extend(f"lease {n}", 600.0))
    found["release"] = microseconds(lambda n: store.release(f"lease {n}"))
    found["drain by prefix"] = microseconds(
        lambda n: store.drain(KeyPrefix(f"one/t/{n}"), f"lease {n}", 600.0)
    )
    found["ack"] = microseconds(lambda n: store.ack(f"lease {n}"))
    found["remove"] = microseconds(lambda n: store.remove(one(n)))
    found["stats"] = microseconds(lambda n: store.stats())
    return found


@pytest.fixture(scope="module")
def large_store() -> MemoryStore:
    """100,000 runs of 12,500 tasks in sight, and 10,000 leases of one run."""
    store = MemoryStore()
    keys = [RecordKey.parse(f"many/{run // 8}/{run}") for run in range(110_000)]
    record = root("r")
    for each in keys:
        store.add(record.replace(key=each))
    for number, each in enumerate(keys[:10_000]):
        store.drain(each, f"open {number}", 600.0)
    stats = store.stats()
    assert (stats.keys, stats.leases) == (100_000, 10_000)
    return store


def test_one_run_costs_the_same_among_a_hundred_thousand_others_and_ten_thousand_leases(
    large_store,
):
    empty, full = costs(MemoryStore()), costs(large_store)
    # The bench holds them to less than half of this, on a machine that does nothing else.
    assert {name for name in full if full[name] > 4 * empty[name]} == set(), (full, empty)


def test_a_prefix_costs_what_lies_under_it(large_store):
    few = microseconds(lambda n: large_store.keys(KeyPrefix(f"many/{2000 + n}")))
    start = time.thread_time()
    assert len(large_store.keys(ALL, limit=10)) == 10
    assert few < (time.thread_time() - start) * 1e6 / 20


# Accounts


@pytest.mark.parametrize("when_full", ["evict", "reject"])
@pytest.mark.parametrize("seed", range(8))
def test_bytes_are_those_of_the_runs_after_any_sequence_of_calls(clock, seed, when_full):
    store = MemoryStore(24_000, max_run_bytes=9_000, when_full=when_full, clock=clock)
    sequence = RandomSequence(store, random.Random(seed))
    for _ in range(150):
        sequence.step()
        if random.Random(clock.now).random() < 0.1:
            clock.now += 601  # what is leased comes back
            sequence.leases.clear()
        clock.now += 1
        in_sight, leased = check_accounts(store, sequence.leases)
        assert store.stats().bytes == sum(run.nbytes for run in in_sight + leased)
    sequence.end()
    assert store.stats().bytes == 0


# Memory


def taken_by(act: Callable[[], object]) -> int:
    """Memory that is held when it is done and was not before, in bytes."""
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    act()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture
def remembered(monkeypatch) -> int:
    """How many are remembered: fewer than usual, for a shorter test."""
    monkeypatch.setattr(memory_module, "MAX_REMEMBERED", 1_000)
    return 1_000


@pytest.mark.usefixtures("traced")
def test_blocked_prefixes_take_bounded_memory_over_a_long_training_run(remembered):
    store = MemoryStore()

    def block(batches: range) -> None:
        for batch in batches:
            store.block(KeyPrefix(f"run/{batch}"))

    half = taken_by(lambda: block(range(5_000)))
    assert half < 500 * remembered
    assert taken_by(lambda: block(range(5_000, 10_000))) < 0.05 * half
    assert store.stats().blocked_prefixes == remembered
    assert store.add(root(key=RecordKey("run/9999", "sum", 0))) is AddOutcome.BLOCKED
    assert store.add(root(key=RecordKey("run/10000", "sum", 0))) is AddOutcome.STORED


@pytest.mark.usefixtures("traced")
def test_what_is_known_of_evicted_runs_takes_bounded_memory(remembered):
    store = MemoryStore(room_for(1))

    def evict(numbers: range) -> None:
        for run in numbers:
            store.add(root("r", RecordKey("12", str(run), 0)))

    most = taken_by(lambda: evict(range(remembered + 1)))
    assert most < 1_000 * remembered
    assert taken_by(lambda: evict(range(2_000, 4_000))) < 0.2 * most


@pytest.mark.usefixtures("traced")
def test_a_lease_that_is_extended_for_ever_takes_bounded_memory(clock, remembered):
    store = MemoryStore(clock=clock)
    add(store, root())
    store.drain(ALL, "mine", 1e6)

    def extend() -> None:
        for _ in range(20 * remembered):
            clock.now += 1
            store.extend("mine", 1e6)

    assert taken_by(extend) < 250 * remembered
    assert store.ack("mine") == 1


def test_no_run_leaves_anything_behind():
    """Not the run, nor the places that lead to it."""
    store = MemoryStore()
    kept = store._runs, store._leased, store._gone
    for run in range(50):
        add(store, root("r", RecordKey(f"b/{run}", "t", run)))
    store.ack(drain(store, KeyPrefix("b/1")).id)
    store.release(drain(store, KeyPrefix("b/2")).id)
    drain(store, KeyPrefix("b/3"))
    store.remove(ALL)
    assert [(len(tree), tree._root) for tree in kept] == [(0, {})] * 3


def test_a_late_finish_of_an_aborted_batch_is_dropped_after_its_drain():
    store = MemoryStore()
    add(store, root("a", RecordKey("12", "sum", 0)))
    store.block(KeyPrefix("12"))
    store.ack(drain(store, KeyPrefix("12")).id)
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
        # Beside the store, each with a bound of its own.
        recorder._indexes.clear()
        recorder.recent._generations.clear()
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert store.stats().records == runs * turns
    # Objects differ in size from one Python to the next; what is claimed may be a little too much.
    assert 0.85 * taken <= store.stats().bytes <= 1.3 * taken


def test_whatever_a_client_put_into_a_record_counts():
    bare = root()
    image = MultiModalItem(modality="image", offset=0, length=1, identity="x" * 64)
    for fields, expected in [
        ({"request_id": "r" * 60_000}, 60_000),
        ({"response_text": "日本語" * 1000}, 3 * 3000),
        ({"info": {"notes": "n" * 10_000}}, 10_000),
        ({"versions": tuple(VersionSpan(n, n + 1, f"{n}") for n in range(3))}, 2 * 200),
        ({"multi_modal": (image,) * 10}, 10 * 400),
        ({"token_level_reward": [0.0] * 3}, 12),
        ({"sampling_mask": masked([range(9)] * 3)}, 4 * 27 + 12),
    ]:
        assert root(**fields).nbytes - bare.nbytes >= expected, fields


def test_bytes_follow_every_update():
    store = MemoryStore()
    add(store, root(tokens=1000))
    bare = store.stats().bytes
    store.update(key(0), token_level_reward=[0.0] * 1000)
    assert store.stats().bytes == bare + 4000
    store.update(key(0), token_level_reward=[1.0] * 1000)
    assert store.stats().bytes == bare + 4000
    store.update(key(0), info={"note": "x" * 1000})
    assert store.stats().bytes > bare + 5000
    store.remove(ALL)
    assert store.stats().bytes == 0


# Time


def test_a_lease_lasts_its_time_and_not_longer(clock):
    store = MemoryStore(clock=clock)
    add(store, root())
    store.drain(ALL, "mine", 10.0)
    clock.now += 5
    store.drain(ALL, "mine", 10.0)
    clock.now += 5
    store.extend("mine", 5.0)
    clock.now += 4.9
    assert store.get(ALL) == []
    clock.now += 0.1
    assert names(held(store)) == ["root"]


def test_a_sweep_goes_by_the_last_addition_and_leaves_leased_records(clock):
    store = MemoryStore(clock=clock)
    add(store, root("leased", key(0)))
    drain(store, lease_s=1000.0)
    first = root("a", key(1))
    add(store, first, root("b", key(2)))
    clock.now += 60
    add(store, child(first, "c"))
    assert [summary.age_s for summary in store.keys(ALL)] == [0, 60]
    assert store.sweep(59) == 1
    assert store.stats().counters["swept"] == 1
    clock.now += 1000
    assert sorted(names(held(store))) == ["a", "c", "leased"]
