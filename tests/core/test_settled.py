"""Whoever hands a turn over can be told when it is stored, or why it is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from recorder_core import FinishReason, MemoryStore, Record, RecordKey, Turn
from recorder_core.exchange import Exchange
from recorder_core.intake import Outcome
from recorder_core.recorder import Recorder
from recorder_core.records import RETRY_UNCLEAR
from recorder_core.stores import AddOutcome

KEY = RecordKey("7", "sum", 0)


def turn(response: list[int]) -> Turn:
    return Turn(KEY, [1, 2], response, FinishReason.STOP, logprobs=[-0.5] * len(response))


class BrokenStore(MemoryStore):
    def add(self, record: Record, epoch: int | None = None) -> AddOutcome:
        raise OSError("the disk is gone")


class Told:
    """Waits to be told."""

    def __init__(self, recorder: Recorder) -> None:
        self.outcomes: list[Outcome] = []
        self.stored: list[int] = []
        self.threads: list[str] = []
        self._recorder = recorder
        self._event = threading.Event()

    def __call__(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.stored.append(self._recorder.store.stats().records)
        self.threads.append(threading.current_thread().name)
        self._event.set()

    def wait(self) -> Outcome:
        assert self._event.wait(10)
        return self.outcomes[0]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.close()


def test_a_turn_is_stored_and_counted_when_its_caller_is_told(recorder: Recorder) -> None:
    told = Told(recorder)
    recorder.start(KEY).finish(turn([3, 4]), told)
    assert told.wait() == Outcome()
    assert told.stored == [1]
    assert told.threads == ["recorder"]
    assert (recorder.stats().recorded, recorder.stats().pending) == (1, 0)


def test_each_of_many_turns_is_told_once_and_in_order(recorder: Recorder) -> None:
    told = Told(recorder)
    for number in range(100):
        recorder.start(KEY).finish(turn([number]), told)
    recorder.flush()
    assert told.stored == list(range(1, 101))


def test_a_store_that_raises_is_told_with_what_it_raised() -> None:
    recorder = Recorder(BrokenStore())
    told = Told(recorder)
    recorder.start(KEY).finish(turn([3]), told)
    outcome = told.wait()
    assert outcome.dropped == "error"
    assert isinstance(outcome.error, OSError)
    recorder.close()


def test_a_turn_that_is_refused_is_told_at_once(recorder: Recorder) -> None:
    told = Told(recorder)
    recorder.start(KEY).finish(turn([]), told)
    assert told.outcomes == [Outcome("empty")]
    assert told.threads == [threading.current_thread().name]
    recorder.close()
    recorder.start(KEY).finish(turn([3]), told)
    assert told.outcomes[1:] == [Outcome("closed")]


def test_a_caller_that_fails_when_told_costs_nothing_but_a_count(recorder: Recorder) -> None:
    def fail(outcome: Outcome) -> None:
        raise RuntimeError(outcome)

    recorder.start(KEY).finish(turn([3]), fail)
    recorder.start(KEY).finish(turn([4]))
    recorder.flush()
    assert (recorder.stats().recorded, recorder.stats().errors) == (2, 1)


def test_a_flag_that_comes_after_a_reward_is_kept_with_it(recorder: Recorder) -> None:
    """A reward by record puts another record into the store."""
    recorder.submit(turn([3]))
    exchange = Exchange()
    retried = turn([4])
    retried.id, retried.attempt, retried.exchange = "again", 1, exchange
    recorder.submit(retried)
    store = recorder.store
    recorder.after(lambda: store.update(KEY, sample_ids=[retried.id], reward=1.0)).result(10)
    exchange.delivered = True
    recorder.flush()
    (run,) = store.get(KEY)
    record = run.records[retried.id]
    assert (record.reward, record.delivered, record.flags) == (1.0, True, (RETRY_UNCLEAR,))
    assert recorder.stats().flagged == {RETRY_UNCLEAR: 1}
