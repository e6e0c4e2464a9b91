"""`KeyTree` is a dictionary whose prefixes are cheap: held against a plain one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from recorder_core import KeyPrefix, RecordKey
from recorder_core.keytree import KeyTree, name_of, names_of

# Few components, so that keys which begin others are common; "0" may be batch, task or run.
_components = st.sampled_from(["0", "1", "a"])
_keys = st.builds(
    lambda above, run: RecordKey.parse("/".join([*above, str(run)])),
    st.lists(_components, min_size=2, max_size=4),
    st.sampled_from([0, 1, 2, 10]),
)
_prefixes = st.builds(
    lambda parts: KeyPrefix("/".join(parts)), st.lists(_components, min_size=0, max_size=5)
)


class AgainstDictionary(RuleBasedStateMachine):
    """Every call is made on the tree and on a dictionary that remembers the order of writing."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: KeyTree[int] = KeyTree()
        self.known: dict[RecordKey, int] = {}

    @rule(key=_keys, value=st.integers(), oldest=st.booleans())
    def put(self, key: RecordKey, value: int, oldest: bool) -> None:
        self.tree.put(key, value, oldest=oldest)
        self.known.pop(key, None)
        self.known = {key: value, **self.known} if oldest else {**self.known, key: value}

    @rule(key=_keys)
    def pop(self, key: RecordKey) -> None:
        assert self.tree.pop(key) == self.known.pop(key, None)

    @rule(prefix=_prefixes)
    def pop_all(self, prefix: KeyPrefix) -> None:
        for key in self.tree.keys(prefix):
            self.tree.pop(key)
        self.known = {key: value for key, value in self.known.items() if not prefix.matches(key)}

    @rule(key=_keys)
    def read_one(self, key: RecordKey) -> None:
        assert self.tree.get(key) == self.known.get(key)
        assert (key in self.tree) == (key in self.known)
        assert self.tree.keys(key) == [key] * (key in self.known)

    @rule(prefix=_prefixes)
    def read_many(self, prefix: KeyPrefix) -> None:
        expected = sorted(item for item in self.known.items() if prefix.matches(item[0]))
        assert self.tree.items(prefix) == expected
        assert self.tree.values(prefix) == [value for _, value in expected]
        assert sorted(self.tree.keys(prefix)) == [key for key, _ in expected]

    @invariant()
    def order_is_that_of_writing(self) -> None:
        assert list(self.tree.oldest_first()) == list(self.known.items())
        assert len(self.tree) == len(self.known)

    @invariant()
    def no_place_is_empty(self) -> None:
        found = []
        below: list[tuple[Any, Any]] = list(self.tree._root.items())
        while below:
            part, place = below.pop()
            if place is None:
                found.append(part)
            else:
                assert place, f"nothing lies under {part!r}"
                below += place.items()
        assert sorted(found) == sorted(self.known)


TestAgainstDictionary = AgainstDictionary.TestCase
TestAgainstDictionary.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@given(_keys, _prefixes)
def test_a_key_has_the_names_of_the_selections_that_hold_it(key, prefix):
    assert (name_of(prefix) in names_of(key)) == prefix.matches(key)
    assert name_of(key) in names_of(key)


@given(_keys, _keys)
def test_a_key_has_no_name_of_another_key(one, other):
    assert (name_of(one) in names_of(other)) == (one == other)


@pytest.mark.parametrize("text", ["0", "0/t", "0/t/7", "0/t/7/x/0", "0/t/07", "0/t/7/x"])
def test_a_prefix_that_is_written_like_a_key_finds_it_and_what_begins_with_it(text):
    tree: KeyTree[str] = KeyTree()
    for key in ("0/t/7", "0/t/7/x/0", "0/t/7/1", "0/t/70", "0/t/07/1", "00/t/7"):
        tree.put(RecordKey.parse(key), key)
    expected = sorted(
        key for key in tree.values(KeyPrefix()) if KeyPrefix(text).matches(RecordKey.parse(key))
    )
    assert sorted(tree.values(KeyPrefix(text))) == expected
