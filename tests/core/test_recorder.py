"""The recorder: every generation is accounted for, and nothing reaches the engine."""

from __future__ import annotations

import gc
import itertools
import logging
import statistics
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from recorder_core import FinishReason, KeyPrefix, Record, RecordKey, SamplingMask, Turn, assemble
from recorder_core import recorder as recorder_module
from recorder_core.context import MISSING, NOT_A_KEY, SKIPPED, identify
from recorder_core.exchange import Exchange
from recorder_core.local import records_of
from recorder_core.recorder import Recorder, RecorderStats
from recorder_core.stores import AddOutcome, MemoryStore

ALL = KeyPrefix()
KEY = RecordKey("7", "sum", 0)
OTHER = RecordKey("7", "sum", 1)
_clock = itertools.count()


def turn(
    prompt: Sequence[int], response: Sequence[int], key: RecordKey = KEY, **fields: Any
) -> Turn:
    """A finished generation; each was asked for after the one before had ended."""
    now = float(next(_clock))
    given: dict[str, Any] = {
        "finish_reason": FinishReason.STOP,
        "logprobs": [-0.5] * len(response),
        "created_at": now,
        "finished_at": now + 0.5,
    }
    return Turn(key=key, prompt_ids=prompt, response_ids=response, **{**given, **fields})


def cut() -> Exchange:
    """A request whose client did not get the reply."""
    exchange = Exchange()
    exchange.delivered = False
    return exchange


def adds_up(stats: RecorderStats) -> bool:
    return (
        stats.started == stats.recorded + sum(stats.dropped.values()) + stats.pending
        and stats.recorded == stats.extended + stats.roots
    )


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Threads change places after a few operations, not every 5 ms."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


class BlockingStore(MemoryStore):
    """Takes nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def add(self, record: Record, epoch: int | None = None) -> AddOutcome:
        self.released.wait(30)
        return super().add(record, epoch)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.close()
    assert adds_up(recorder.stats())


@pytest.fixture
def blocked() -> Iterator[Recorder]:
    """A recorder whose store blocks."""
    recorder = Recorder(BlockingStore(), max_queued_tokens=100_000)
    yield recorder
    release(recorder)
    recorder.close()
    assert recorder.stats().pending == 0
    assert adds_up(recorder.stats())


def release(recorder: Recorder) -> None:
    assert isinstance(recorder.store, BlockingStore)
    recorder.store.released.set()


def record_all(recorder: Recorder, *turns: Turn) -> list[Record]:
    for each in turns:
        recorder.submit(each)
    assert recorder.flush(10)
    return records_of(recorder.store.get(ALL))


# What is recorded


def test_a_turn_that_continues_another_keeps_only_what_is_new(recorder):
    first, second = record_all(
        recorder, turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6], response_text="six")
    )
    assert (first.parent, first.start, first.prompt_ids.tolist()) == (None, 0, [1, 2])
    assert (second.parent, second.start, second.prompt_ids.tolist()) == (first.id, 4, [5])
    assert (second.response_ids.tolist(), second.response_text) == ([6], "six")
    assert second.logprobs.tolist() == [-0.5]
    stats = recorder.stats()
    assert (stats.recorded, stats.roots, stats.extended, stats.prefix_break) == (2, 1, 1, 0)


@pytest.mark.parametrize(
    "second_prompt",
    [[1, 2, 393, 30002, 5], [1, 2, 53122, 317, 5], [1, 2, 5, 53122, 316]],
    ids=["T1: the same text, other tokens", "T2: one token differs", "T7: tokens are missing"],
)
def test_a_history_that_was_tokenised_anew_is_a_prefix_break(recorder, second_prompt):
    records = record_all(recorder, turn([1, 2], [53122, 316]), turn(second_prompt, [9]))
    assert [record.parent for record in records] == [None, None]
    assert [each.tokens.tolist() for each in assemble(records)] == [
        [1, 2, 53122, 316],
        [*second_prompt, 9],
    ]
    assert recorder.stats().prefix_break == 1
    assert recorder.stats().roots == 2


def test_a_new_prompt_is_no_prefix_break(recorder):
    record_all(recorder, turn([1, 2], [3]), turn([8, 9], [3]))
    assert recorder.stats().prefix_break == 0


def test_a_retry_of_an_aborted_request_is_counted_as_superseding_it(recorder):
    aborted = turn([1, 2], [3], finish_reason=FinishReason.ABORT)
    records = record_all(recorder, aborted, turn([1, 2], [3, 4]))
    assert recorder.stats().superseded == 1
    assert recorder.stats().recorded == 2
    assert [each.tokens.tolist() for each in assemble(records)] == [[1, 2, 3, 4]]


def test_the_same_request_id_under_two_keys_is_two_records(recorder):
    records = record_all(
        recorder,
        turn([1], [2], KEY, request_id="cmpl-1"),
        turn([1], [2], OTHER, request_id="cmpl-1"),
    )
    assert [(record.key, record.request_id) for record in records] == [
        (KEY, "cmpl-1"),
        (OTHER, "cmpl-1"),
    ]


def test_logprobs_of_another_length_are_flagged_and_the_ids_kept(recorder):
    (record,) = record_all(recorder, turn([1], [2, 3, 4], logprobs=[-0.1, -0.2], flags=("odd",)))
    assert record.response_ids.tolist() == [2, 3, 4]
    assert record.logprobs is None
    assert record.flags == ("odd", "logprobs_length_mismatch")
    assert recorder.stats().flagged == {"odd": 1, "logprobs_length_mismatch": 1}


def test_missing_logprobs_are_flagged(recorder):
    (record,) = record_all(recorder, turn([1], [2], logprobs=None))
    assert record.logprobs is None
    assert recorder.stats().flagged == {"logprobs_missing": 1}


def test_logprobs_and_routed_experts_may_be_made_on_the_recorders_thread(recorder):
    threads = []

    def logprobs() -> list[float]:
        threads.append(threading.current_thread().name)
        return [-0.25]

    routed = np.array([[[300, 2]]], dtype=np.uint16)
    (record,) = record_all(recorder, turn([1], [2], logprobs=logprobs, routed_experts=routed))
    assert threads == ["recorder"]
    assert record.logprobs.tolist() == [-0.25]
    assert record.routed_experts.data.tolist() == [[[300, 2]]]


def test_a_sampling_mask_over_other_tokens_is_flagged_and_the_rest_kept(recorder):
    """M13."""
    mask = SamplingMask([2, 7, 3], [2, 1])
    whole, odd = record_all(
        recorder,
        turn([1], [2, 3], sampling_mask=lambda: mask),
        turn([1, 2], [2, 3, 4], sampling_mask=mask),
    )
    assert (whole.sampling_mask, whole.flags) == (mask, ())
    assert (odd.sampling_mask, odd.flags) == (None, ("sampling_mask_length_mismatch",))
    assert odd.logprobs is not None


def test_ids_may_be_arrays(recorder):
    (record,) = record_all(recorder, turn(np.array([1, 2]), np.array([3])))
    assert (record.prompt_ids.tolist(), record.response_ids.tolist()) == ([1, 2], [3])


# What is dropped


def test_an_aborted_turn_is_recorded_with_its_tokens(recorder):
    (record,) = record_all(recorder, turn([1], [2, 3], finish_reason=FinishReason.ABORT))
    assert record.response_ids.tolist() == [2, 3]
    assert record.finish_reason is FinishReason.ABORT


def test_an_aborted_turn_is_dropped_where_so_configured():
    recorder = Recorder(aborted="drop")
    records = record_all(
        recorder, turn([1], [2], finish_reason=FinishReason.ABORT), turn([1], [2, 3])
    )
    assert [record.response_ids.tolist() for record in records] == [[2, 3]]
    assert recorder.stats().dropped == {"aborted": 1}
    assert adds_up(recorder.stats())
    recorder.close()


def test_any_other_policy_for_aborted_turns_is_refused():
    with pytest.raises(ValueError, match="'sometimes'"):
        Recorder(aborted="sometimes")  # type: ignore[arg-type]


def test_a_turn_without_a_token_is_not_recorded(recorder):
    assert record_all(recorder, turn([1, 2], [], finish_reason=FinishReason.ABORT)) == []
    assert recorder.stats().dropped == {"empty": 1}


def test_every_fate_is_counted_and_the_counters_add_up():
    store = MemoryStore(max_bytes=20_000, when_full="reject")
    recorder = Recorder(store)
    store.block(KeyPrefix("aborted-batch"))
    record_all(
        recorder,
        turn([1], [2]),
        turn([1, 2, 3], [4], exchange=cut()),  # continues it
        turn([1, 9, 9], [4]),  # breaks the prefix
        turn([1, 2, 3], [5], attempt=1),  # supersedes the second
        turn([1], []),
        turn([1], [2], RecordKey("aborted-batch", "sum", 0)),
        turn([1], list(range(100_000)), OTHER),
        turn([1], [2**31]),
        turn([1], [2], logprobs=lambda: 1 / 0),
    )
    recorder.start(KEY).drop("rejected")
    recorder.start(KEY)  # forgotten at once
    in_flight = recorder.start(KEY)
    recorder.flush(10)
    stats = recorder.stats()
    assert stats.started == 12
    assert (stats.recorded, stats.roots, stats.extended) == (4, 2, 2)
    assert (stats.prefix_break, stats.superseded, stats.errors) == (1, 1, 2)
    assert stats.dropped == {
        "empty": 1,
        "blocked": 1,
        "full": 1,
        "error": 2,
        "rejected": 1,
        "lost": 1,
    }
    assert stats.pending == 1
    assert adds_up(stats)
    in_flight.drop("rejected")
    assert recorder.stats().pending == 0
    recorder.close()


def test_generations_without_a_key_are_counted_by_reason(recorder):
    for reason in ["missing", "not_a_key", "missing"]:
        recorder.count_unkeyed(reason)
    assert recorder.stats().unkeyed == {"missing": 2, "not_a_key": 1}
    assert recorder.stats().started == 0


def test_of_what_is_served_and_not_recorded_each_reason_is_told_once(recorder, caplog):
    """And what is left out on purpose is not. E6."""
    with caplog.at_level(logging.WARNING):
        for identity in [identify("0/task"), NOT_A_KEY, SKIPPED, identify("1/task"), MISSING] * 50:
            recorder.count_unkeyed(identity.reason, identity.detail)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert "(malformed): '0/task' is no record key." in told[0]
    assert "(not_a_key)" in told[1]
    assert "(missing)" in told[2]
    assert all("<batch>/<task>/<run>" in message for message in told)
    assert recorder.stats().unkeyed == {
        "malformed": 100,
        "not_a_key": 50,
        "skipped": 50,
        "missing": 50,
    }


# In flight


def test_a_generation_is_pending_until_it_is_stored(blocked):
    pending = blocked.start(KEY)
    assert blocked.pending() == 1
    pending.finish(turn([1], [2]))
    assert blocked.pending() == 1
    release(blocked)
    assert blocked.flush(10)
    assert blocked.pending() == 0
    assert blocked.stats().recorded == 1


def test_pending_is_told_by_whole_components(recorder):
    held = [recorder.start(RecordKey.parse(key)) for key in ["1/a/0", "1/a/0", "1/b/0", "10/a/0"]]
    assert recorder.pending(KeyPrefix("1")) == 3
    assert recorder.pending_by_key(KeyPrefix("1")) == {
        RecordKey("1", "a", 0): 2,
        RecordKey("1", "b", 0): 1,
    }
    assert recorder.pending() == len(held)


def test_a_generation_ends_once(recorder):
    pending = recorder.start(KEY)
    pending.finish(turn([1], [2]))
    pending.finish(turn([1], [3]))
    pending.drop("late")
    recorder.flush(10)
    assert recorder.stats().recorded == 1
    assert recorder.stats().dropped == {}


def test_a_generation_that_the_engine_forgets_is_lost_and_not_pending_for_ever(recorder):
    pending = recorder.start(KEY)
    with recorder._lock:  # it may be collected anywhere, in here too
        del pending
    assert recorder.flush(10)
    assert recorder.stats().dropped == {"lost": 1}
    assert recorder.pending() == 0


def test_a_forgotten_generation_in_a_reference_cycle_is_lost_too(recorder):
    request: dict[str, Any] = {"pending": recorder.start(KEY)}
    request["itself"] = request
    del request
    gc.collect()
    assert recorder.flush(10)
    assert recorder.stats().dropped == {"lost": 1}


def test_a_generation_that_is_forgotten_after_the_recorder_is_closed_is_lost(recorder):
    """The counters add up whoever comes last.

    E10.
    """
    before, after = recorder.start(KEY), recorder.start(KEY)
    recorder.close()
    before.drop("failed")
    del after
    assert recorder.pending() == 0
    assert recorder.pending_by_key(KeyPrefix()) == {}
    stats = recorder.stats()
    assert (stats.started, stats.dropped, stats.pending) == (2, {"failed": 1, "lost": 1}, 0)


# Faults


def test_a_store_that_raises_costs_those_records_and_is_logged_once(caplog):
    class RaisingStore(MemoryStore):
        broken = True

        def add(self, record: Record, epoch: int | None = None) -> AddOutcome:
            if self.broken:
                raise OSError("disk gone")
            return super().add(record, epoch)

    store = RaisingStore()
    recorder = Recorder(store)
    with caplog.at_level(logging.WARNING):
        record_all(recorder, *(turn([1], [2], request_id=f"cmpl-{n}") for n in range(100)))
    assert len(caplog.records) == 1
    assert "cmpl-0" in caplog.text
    assert "disk gone" in caplog.text
    store.broken = False
    record_all(recorder, turn([1], [2]))
    stats = recorder.stats()
    assert (stats.errors, stats.dropped, stats.recorded) == (100, {"error": 100}, 1)
    assert adds_up(stats)
    recorder.close()


def test_a_store_that_wants_a_parent_for_a_root_does_not_hang_the_recorder():
    class ConfusedStore(MemoryStore):
        def add(self, record: Record, epoch: int | None = None) -> AddOutcome:
            return AddOutcome.NO_PARENT

    recorder = Recorder(ConfusedStore())
    record_all(recorder, turn([1], [2]))
    assert recorder.stats().dropped == {"no_parent": 1}
    recorder.close()


@pytest.mark.parametrize("broken", [{"response_ids": None}, {"prompt_ids": 7}], ids=str)
def test_a_malformed_turn_raises_nothing_in_the_engine(recorder, broken):
    recorder.submit(
        Turn(
            **{
                "key": KEY,
                "finish_reason": FinishReason.STOP,
                "prompt_ids": [1],
                "response_ids": [2],
                **broken,
            }
        )
    )
    assert recorder.flush(10)
    assert recorder.stats().dropped == {"error": 1}
    assert recorder.pending() == 0


def test_a_store_that_blocks_does_not_hold_up_the_engine(blocked):
    seconds = []
    for _ in range(1000):
        each = turn([1] * 10, [2] * 10)
        start = time.perf_counter()
        blocked.submit(each)
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 100e-6
    assert not blocked.flush(0.05)
    assert blocked.stats().pending == 1000
    release(blocked)
    assert blocked.flush(10)
    assert blocked.stats().recorded == 1000


def test_the_queue_is_bounded_by_tokens(blocked):
    for _ in range(300):
        blocked.submit(turn([1] * 900, [2] * 100))
    stats = blocked.stats()
    assert stats.pending == 100  # of 1,000 tokens each, in a queue of 100,000
    assert stats.dropped == {"queue_full": 200}
    release(blocked)
    assert blocked.flush(10)
    blocked.submit(turn([1] * 900, [2] * 100))
    assert blocked.flush(10)
    assert blocked.stats().recorded == 101


def test_submitting_costs_the_same_for_short_and_long_turns(blocked):
    def microseconds(tokens: int) -> float:
        prompt, response = [1] * tokens, [2] * tokens
        turns = [turn(prompt, response, logprobs=None) for _ in range(300)]
        seconds = []
        for each in turns:
            start = time.perf_counter()
            blocked.submit(each)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) * 1e6

    blocked._max_queued_tokens = 10**9
    short, long = microseconds(8), microseconds(8192)
    assert long < 50
    assert long < 3 * short


# The end


def test_flush_waits_for_what_was_submitted_before(blocked):
    blocked.submit(turn([1], [2]))
    threading.Timer(0.1, release, [blocked]).start()
    assert blocked.flush(10)
    assert blocked.stats().recorded == 1


def test_close_stores_what_is_queued_and_drops_what_comes_later(blocked):
    for _ in range(50):
        blocked.submit(turn([1], [2]))
    threading.Timer(0.1, release, [blocked]).start()
    blocked.close()
    blocked.close()
    blocked.submit(turn([1], [2]))
    assert blocked.flush(1)
    assert blocked.stats().recorded == 50
    assert blocked.stats().dropped == {"closed": 1}


def test_closing_does_not_wait_longer_than_told(blocked):
    blocked.submit(turn([1], [2]))
    start = time.monotonic()
    blocked.close(timeout=0.05)
    assert not blocked.flush(0.05)
    assert time.monotonic() - start < 5  # it would be for ever
    release(blocked)
    assert blocked.flush()  # without a limit: it must not wait for ever
    assert blocked.stats().recorded == 1


def test_turns_finished_while_the_recorder_closes_are_all_accounted_for(busy_threads):
    for _ in range(30):
        recorder = Recorder()
        with ThreadPoolExecutor(4) as threads:
            for _ in range(4):
                threads.submit(lambda r=recorder: [r.submit(turn([1], [2])) for _ in range(50)])
            recorder.close()
        assert recorder.flush(10)
        stats = recorder.stats()
        assert (stats.started, stats.pending) == (200, 0)
        assert adds_up(stats)
        assert stats.recorded == recorder.store.stats().records


# Drains and forgetting


def test_a_turn_after_a_drain_is_a_root_and_assembles_with_the_returned_lease():
    now = 0.0
    store = MemoryStore(clock=lambda: now)
    recorder = Recorder(store)
    record_all(recorder, turn([1], [2, 3]), turn([1, 2, 3, 4], [5]))
    store.update(KEY, reward=1.0)
    lease = store.drain(ALL, "lease", 60)
    (third,) = record_all(recorder, turn([1, 2, 3, 4, 5, 6], [7]))
    assert (third.parent, third.prompt_ids.tolist()) == (None, [1, 2, 3, 4, 5, 6])
    now += 61
    (trajectory,) = assemble(store.get(ALL))
    assert len(lease.records) == 2
    assert trajectory.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert trajectory.action_mask.tolist() == [True, True, False, True, False, True]
    assert trajectory.reward == 1.0
    stats = recorder.stats()
    assert (stats.roots, stats.extended) == (2, 1)
    recorder.close()


def test_a_turn_after_an_acknowledged_drain_stands_alone(recorder):
    record_all(recorder, turn([1], [2]))
    recorder.store.ack(recorder.store.drain(ALL, "lease", 60).id)
    records = record_all(recorder, turn([1, 2, 3], [4]), turn([1, 2, 3, 4, 5], [6]))
    (trajectory,) = assemble(records)
    assert trajectory.prompt_length == 3
    assert trajectory.tokens.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_turn_does_not_continue_a_record_that_was_overwritten(recorder):
    (old,) = record_all(recorder, turn([1], [2, 3]))
    edited = old.replace(response_ids=[8, 9])
    recorder.store.overwrite(KEY, [edited])
    record_all(recorder, turn([1, 2, 3, 4], [5]))
    assert [each.tokens.tolist() for each in assemble(records_of(recorder.store.get(ALL)))] == [
        [1, 8, 9],
        [1, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize("limit", ["MAX_INDEXED_RUNS", "MAX_INDEXED_RECORDS"])
def test_keys_that_the_index_has_forgotten_still_assemble(recorder, monkeypatch, limit):
    monkeypatch.setattr(recorder_module, limit, 4)
    keys = [RecordKey("7", "sum", run) for run in range(10)]
    turns = [
        turn([run, *range(100, 100 + 2 * step)], [100 + 2 * step], key)
        for step in range(5)
        for run, key in enumerate(keys)
    ]
    records = record_all(recorder, *turns)
    assert len(records) == 50
    assert len(recorder._indexes) <= 5
    assert recorder.stats().roots == 10  # what is forgotten is read from the store again
    trajectories = assemble(records)
    assert [each.eid.run for each in trajectories] == list(range(10))
    for run, trajectory in enumerate(trajectories):
        assert trajectory.tokens.tolist() == [run, *range(100, 109)]
        assert trajectory.action_mask.sum() == 5


def test_the_index_holds_no_tokens_after_a_drain(recorder):
    tokens = 50_000

    def record_and_drain(runs: range) -> None:
        for run in runs:
            key = RecordKey("7", "sum", run)
            recorder.submit(turn([run] * tokens, [1] * 10, key, prompt_text="x" * tokens))
            recorder.submit(turn([run] * tokens + [1] * 10, [2], key))
        recorder.flush(30)
        recorder.store.ack(recorder.store.drain(ALL, f"lease-{runs.start}", 60).id)
        recorder.flush(30)

    record_and_drain(range(1))  # grows the hash's weights to this length
    gc.collect()
    tracemalloc.start()
    try:
        record_and_drain(range(1, 41))
        gc.collect()
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert not recorder._indexes
    assert left < 40 * 4_000  # of 200,000 bytes of ids each


# Many threads


def test_nothing_is_crossed_or_lost_when_many_threads_submit(recorder):
    threads, turns = 64, 50
    watching = threading.Event()
    inconsistent = []

    def converse(run: int) -> list[int]:
        history = [run]
        for step in range(turns):
            response = [1000 * run + step, 7]
            pending = recorder.start(RecordKey("7", "sum", run))
            pending.finish(turn(history, response, pending.key, request_id=f"{run}-{step}"))
            history = [*history, *response, step]
        return history[:-1]

    def watch() -> None:
        while not watching.wait(0.001):
            stats = recorder.stats()
            if not adds_up(stats):
                inconsistent.append(stats)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(threads) as pool:
        expected = list(pool.map(converse, range(threads)))
    assert recorder.flush(60)
    watching.set()
    watcher.join()
    assert inconsistent == []
    stats = recorder.stats()
    assert (stats.started, stats.recorded, stats.pending) == (threads * turns, threads * turns, 0)
    assert (stats.roots, stats.extended) == (threads, threads * (turns - 1))
    trajectories = assemble(records_of(recorder.store.get(ALL)))
    assert [each.tokens.tolist() for each in trajectories] == expected
    for run, trajectory in enumerate(trajectories):
        assert [each.request_id for each in trajectory.turns] == [
            f"{run}-{step}" for step in range(turns)
        ]
        assert int(trajectory.action_mask.sum()) == 2 * turns


def test_a_recorder_can_be_told_from_the_one_before_a_restart() -> None:
    first, second = Recorder(), Recorder()
    assert first.stats().instance == first.stats().instance != ""
    assert first.stats().instance != second.stats().instance
    first.close()
    second.close()


@pytest.mark.parametrize(("records", "said"), [(0, False), (2, True)])
def test_a_process_that_ends_says_what_nobody_has_drained(records, said):
    script = f"""
from recorder_core import RecordKey, Turn
from recorder_core.options import RecordingOptions

recorder = RecordingOptions().make_recorder()
for number in range({records}):
    recorder.submit(
        Turn(
            key=RecordKey("7", "sum", number),
            prompt_ids=[1],
            response_ids=[2],
            logprobs=[-0.5],
            finish_reason="stop",
            created_at=1.0,
            finished_at=2.0,
        )
    )
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (f"{records} records were not drained" in ended.stderr) is said
