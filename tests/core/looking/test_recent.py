"""What happened lately: summaries in a ring, drained runs within a budget, and waiting for news."""

from __future__ import annotations

import argparse
import threading
from typing import Any

import pytest

from recorder_core import KeyPrefix, RecordKey, Turn
from recorder_core.options import RecordingOptions, add_arguments
from recorder_core.recent import Recent
from recorder_core.recorder import Recorder
from recorder_core.stores import MemoryStore
from recorder_core.stores.testing import root

ALL = KeyPrefix()
KEY = RecordKey.parse("0/task/0")
OTHER = RecordKey.parse("0/task/1")
MIB = 1024**2


def turn(key: RecordKey = KEY, **fields: Any) -> Turn:
    given = {
        "prompt_ids": [1, 2],
        "response_ids": [7, 8],
        "logprobs": [-0.5, -2.5],
        "finish_reason": "stop",
    }
    return Turn(key=key, **{**given, **fields})


def test_a_finished_generation_is_told_in_brief():
    recorder = Recorder()
    recorder.submit(turn(finished_at=2.0, versions=[(0, 1, "41"), (1, 2, "42")]))
    recorder.close()
    (told,) = recorder.recent.since("", 10).generations
    assert (told.key, told.prompt, told.response) == ("0/task/0", 2, 2)
    assert (told.logprob_mean, told.logprob_min) == (-1.5, -2.5)
    assert (told.versions, told.finish_reason, told.finished_at) == (("41", "42"), "stop", 2.0)


def test_a_cursor_goes_on_where_it_stopped_and_a_foreign_one_begins_anew():
    recent = Recent()
    for number in range(5):
        recent.add(root(f"r{number}"))
    first = recent.since("", 3)
    rest = recent.since(first.next, 10)
    assert [each.id for each in first.generations + rest.generations] == [
        "r0",
        "r1",
        "r2",
        "r3",
        "r4",
    ]
    assert recent.since(rest.next, 10).generations == []
    for foreign in ("0000.3", "nonsense", "0000.x", f"{rest.next}9999"):
        assert recent.since(foreign, 10).missed is False
    assert len(recent.since("0000.3", 10).generations) == 5


def test_the_ring_is_bounded_and_says_what_was_missed():
    recent = Recent(max_generations=3)
    recent.add(root("first"))
    cursor = recent.since("", 10).next
    for number in range(3):
        recent.add(root(f"r{number}"))
    assert not recent.since(cursor, 10).missed
    recent.add(root("r3"))
    news = recent.since(cursor, 10)
    assert news.missed
    assert [each.id for each in news.generations] == ["r1", "r2", "r3"]


def test_rewards_and_hand_outs_are_told_in_order():
    store = MemoryStore(recent=Recent(MIB))
    store.add(root(key=KEY))
    store.update(KEY, reward=0.25)
    store.update(KEY, reward=1.0, sample_ids=["root"])
    store.update(KEY, info={"no": "reward"})
    store.drain(ALL, "lease", 60)
    store.release("lease")
    store.remove(KeyPrefix("0"))
    told = store.recent.since("", 10).runs
    assert [(each.reward, each.drained, each.removed) for each in told] == [
        (0.25, None, False),
        (1.0, None, False),
        (None, True, False),
        (None, False, False),
        (None, None, True),
    ]
    assert [each.key for each in told] == ["0/task/0"] * 4 + ["0"]


def test_a_drained_run_can_still_be_read_once_it_is_acknowledged():
    store = MemoryStore(recent=Recent(MIB))
    store.add(record := root(key=KEY))
    store.update(KEY, reward=0.5)
    store.drain(ALL, "lease", 60)
    store.ack("lease")
    assert store.get(ALL) == []
    (run,) = store.recent.drained(KEY)
    assert list(run.records.values()) == [record]
    assert run.reward == 0.5


def test_keeping_a_drained_run_copies_nothing():
    store = MemoryStore(recent=Recent(MIB))
    store.add(record := root(key=KEY))
    store.drain(ALL, "lease", 60)
    store.ack("lease")
    (run,) = store.recent.drained(KEY)
    assert run.records["root"].data is record.data


def test_a_run_that_came_back_is_not_there_twice():
    store = MemoryStore(recent=Recent(MIB))
    store.add(root(key=KEY))
    store.drain(ALL, "lease", 60)
    store.release("lease")
    assert store.recent.drained(ALL) == []
    assert store.recent.bytes == 0


def test_the_oldest_hand_outs_are_given_up_for_the_budget():
    size = MemoryStore()
    size.add(root(key=KEY, tokens=1000))
    budget = int(size.stats().bytes * 1.5)
    store = MemoryStore(recent=Recent(budget))
    for key in (KEY, OTHER):
        store.add(root(key=key, tokens=1000))
        store.drain(key, f"lease of {key}", 60)
        store.ack(f"lease of {key}")
    assert [run.key for run in store.recent.drained(ALL)] == [OTHER]
    assert 0 < store.recent.bytes <= budget


def test_without_a_budget_nothing_is_kept():
    store = MemoryStore()
    store.add(root(key=KEY))
    store.drain(ALL, "lease", 60)
    assert store.recent.drained(ALL) == []


@pytest.mark.parametrize("gone", ["remove", "overwrite"])
def test_what_is_deleted_is_not_shown_either(gone: str):
    store = MemoryStore(recent=Recent(MIB))
    store.add(root(key=KEY))
    store.drain(ALL, "lease", 60)
    store.ack("lease")
    if gone == "remove":
        store.remove(KeyPrefix("0"))
    else:
        store.overwrite(KEY, [])
    assert store.recent.drained(ALL) == []


def test_what_is_drained_in_parts_is_kept_in_parts():
    store = MemoryStore(recent=Recent(MIB))
    store.add(root("first", key=KEY))
    store.drain(ALL, "one", 60)
    store.add(root("late", key=KEY))
    store.drain(ALL, "two", 60)
    assert [list(run.records) for run in store.recent.drained(KEY)] == [["first"], ["late"]]


def test_whoever_waits_is_told_once_there_is_news():
    recent, told = Recent(), threading.Event()
    cursor = recent.since("", 10).next
    assert recent.when_news("", told.set) is None
    cancelled = recent.when_news(cursor, lambda: pytest.fail("it was called off"))
    assert cancelled is not None
    cancelled()
    assert recent.when_news(cursor, told.set) is not None
    recent.add(root())
    assert told.is_set()
    assert recent.when_news(cursor, told.set) is None


@pytest.mark.parametrize(("given", "size"), [([], 64 * MIB), (["2MiB"], 2 * MIB), (["0"], 0)])
def test_the_flag_says_how_much_is_kept(given: list[str], size: int):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = [f"--recording-recent-bytes={each}" for each in given]
    options = RecordingOptions.from_args(parser.parse_args(["--enable-recording", *flags]), {})
    assert options.recent_bytes == size


def test_a_flag_that_is_no_size_is_refused(capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--recording-recent-bytes", "some"])
    assert "'some' is no size" in capsys.readouterr().err


def test_what_another_tells_is_told_on_in_its_order():
    there, here = Recent(), Recent()
    there.add(root("a"))
    there.rewarded(KEY, 1.0)
    there.add(root("b"))
    here.add(root("own"))
    here.forward(there.since("", 10))
    news = here.since("", 10)
    assert [each.id for each in news.generations] == ["own", "a", "b"]
    assert [each.seq for each in news.generations] == [1, 2, 4]
    assert [(each.seq, each.reward) for each in news.runs] == [(3, 1.0)]
