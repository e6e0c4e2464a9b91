"""`InFlight` counts generations by key, and tells who waits for the last one exactly once."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder_core import KeyPrefix, RecordKey
from recorder_core.flight import InFlight
from recorder_core.keytree import Selection

KEYS = [RecordKey.parse(text) for text in ("1/a/0", "1/a/0/1", "1/a/1", "1/b/0", "10/a/0")]
ALL = KeyPrefix()


def holds(where: Selection, key: RecordKey) -> bool:
    return where == key if isinstance(where, RecordKey) else where.matches(key)


def ended(flight: InFlight, *keys: RecordKey) -> None:
    """Let generations end, and tell whom that tells."""
    for key in keys:
        for done in flight.remove(key):
            done()


@pytest.mark.parametrize(
    ("where", "count"),
    [
        (ALL, 6),
        (KeyPrefix("1"), 5),
        (KeyPrefix("1/a"), 4),
        (KeyPrefix("1/a/0"), 3),
        (RecordKey.parse("1/a/0"), 2),
        (RecordKey.parse("1/a/2"), 0),
        (KeyPrefix("1/c"), 0),
        (KeyPrefix("1/a/0/1/1"), 0),
    ],
    ids=repr,
)
def test_what_is_in_flight_is_counted_by_key_and_by_prefix(where, count):
    flight = InFlight()
    for key in (*KEYS, KEYS[0]):
        flight.add(key)
    assert flight.count(where) == count
    assert sum(flight.by_key(where).values()) == count
    assert list(flight.by_key(where)) == sorted(flight.by_key(where))


def test_a_key_is_gone_with_its_last_generation():
    flight = InFlight()
    flight.add(KEYS[0])
    flight.add(KEYS[0])
    ended(flight, KEYS[0])
    assert (flight.total, flight.by_key(ALL)) == (1, {KEYS[0]: 1})
    ended(flight, KEYS[0])
    assert (flight.total, flight.by_key(ALL)) == (0, {})
    assert flight._counts._root == {}


def test_nobody_waits_for_nothing():
    flight = InFlight()
    flight.add(KEYS[3])
    assert flight.when_none(KEYS[0], lambda: None) is None
    assert flight.when_none(KeyPrefix("1/a"), lambda: None) is None
    assert flight.when_none(KeyPrefix("1"), lambda: None) is not None


def test_a_generation_that_begins_meanwhile_is_waited_for_too():
    flight, told = InFlight(), []
    flight.add(KEYS[0])
    flight.when_none(KeyPrefix("1"), lambda: told.append("prefix"))
    flight.when_none(KEYS[0], lambda: told.append("key"))
    flight.add(KEYS[2])
    flight.add(KEYS[4])
    ended(flight, KEYS[0])
    assert told == ["key"]
    ended(flight, KEYS[2])
    assert told == ["key", "prefix"]
    assert flight.total == 1


def test_all_who_wait_are_told_once():
    flight, told = InFlight(), Counter()
    flight.add(KEYS[0])
    for name in range(3):
        flight.when_none(KEYS[0], lambda name=name: told.update([name]))
    ended(flight, KEYS[0])
    flight.add(KEYS[0])
    ended(flight, KEYS[0])
    assert told == {0: 1, 1: 1, 2: 1}


def test_who_has_called_it_off_is_not_told():
    flight, told = InFlight(), []
    flight.add(KEYS[0])
    cancel = flight.when_none(ALL, lambda: told.append("cancelled"))
    flight.when_none(ALL, lambda: told.append("waiting"))
    cancel()
    cancel()
    ended(flight, KEYS[0])
    cancel()
    assert told == ["waiting"]


def test_a_call_off_that_comes_late_concerns_nobody_else():
    flight, told = InFlight(), []
    flight.add(KEYS[0])
    cancel = flight.when_none(KEYS[0], lambda: told.append("first"))
    ended(flight, KEYS[0])
    flight.add(KEYS[0])
    flight.when_none(KEYS[0], lambda: told.append("second"))
    cancel()
    ended(flight, KEYS[0])
    assert told == ["first", "second"]


def test_who_waits_leaves_nothing_behind():
    flight = InFlight()
    flight.add(KEYS[0])
    cancel = flight.when_none(KEYS[0], lambda: None)
    flight.when_none(ALL, lambda: None)
    cancel()
    ended(flight, KEYS[0])
    assert flight._waiting == {}


_selections = st.sampled_from([ALL, KeyPrefix("1"), KeyPrefix("1/a/0"), *KEYS])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from(KEYS)),
            st.tuples(st.just("remove"), st.sampled_from(KEYS)),
            st.tuples(st.just("wait"), _selections),
            st.tuples(st.just("cancel"), st.integers(0, 3)),
        ),
        max_size=60,
    )
)
def test_who_waits_is_told_at_the_moment_when_nothing_is_left(steps):
    flight, counts = InFlight(), Counter()
    told: list[int] = []
    waiting: dict[int, Selection] = {}
    cancels = {}
    for number, (step, what) in enumerate(steps):
        told.clear()
        if step == "add":
            flight.add(what)
            counts[what] += 1
        elif step == "remove" and counts[what]:
            ended(flight, what)
            counts[what] -= 1
        elif step == "wait":
            cancels[number] = flight.when_none(what, lambda n=number: told.append(n))
            assert (cancels[number] is None) == (not any(holds(what, k) for k in +counts))
            if cancels[number]:
                waiting[number] = what
        elif step == "cancel" and waiting:
            name = sorted(waiting)[what % len(waiting)]
            cancels[name]()
            del waiting[name]
        over = {n for n, where in waiting.items() if not any(holds(where, k) for k in +counts)}
        assert sorted(told) == sorted(over)
        waiting = {n: where for n, where in waiting.items() if n not in over}
        assert flight.total == counts.total()
        assert flight.by_key(ALL) == +counts


def test_a_generation_costs_the_same_however_many_wait():
    """A thousand schedulers wait for their runs while the engine goes on."""

    def seconds(waiting: int) -> float:
        flight = InFlight()
        for run in range(waiting):
            flight.add(RecordKey("other", "t", run))
            flight.when_none(RecordKey("other", "t", run), lambda: None)
        flight.add(KEYS[0])
        flight.when_none(KEYS[0], lambda: None)
        found = []
        for _ in range(8):
            start = time.thread_time()
            for _ in range(100):
                flight.add(KEYS[0])
                flight.remove(KEYS[0])
            found.append(time.thread_time() - start)
        return min(found)

    assert seconds(2_000) < 4 * seconds(0)
