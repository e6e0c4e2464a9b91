"""The contract on selections: a prefix means whole components, a key means one run."""

from __future__ import annotations

import pytest

from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.keytree import Selection
from recorder_core.stores.base import AddOutcome, RecordStore
from recorder_core.stores.testing.given import ALL, GivenStore, add, drain, root

METHODS = ["get", "keys", "drain", "remove", "block"]


def found_by(store: RecordStore, method: str, where: Selection) -> list[str]:
    """The keys that a method concerns, in order."""
    every = [summary.key for summary in store.keys(ALL)]
    if method == "remove":
        store.remove(where)
        left = [summary.key for summary in store.keys(ALL)]
        return [str(key) for key in every if key not in left]
    if method == "block":
        store.block(where)
        return [str(key) for key in every if store.add(root("late", key)) is AddOutcome.BLOCKED]
    if method == "drain":
        return [str(run.key) for run in drain(store, where).runs]
    if method == "keys":
        return [str(summary.key) for summary in store.keys(where)]
    return [str(run.key) for run in store.get(where)]


class SelectionsContract(GivenStore):
    """What every method understands by a key and by a prefix."""

    @pytest.mark.parametrize(
        ("prefix", "expected"),
        [
            ("", ["0/eval/1/0", "1/a/0", "1/b/0", "10/a/0"]),
            ("1", ["1/a/0", "1/b/0"]),
            ("1/", ["1/a/0", "1/b/0"]),
            ("1/a/0", ["1/a/0"]),
            ("0/eval", ["0/eval/1/0"]),
            ("0/ev", []),
            ("2", []),
        ],
    )
    @pytest.mark.parametrize("method", METHODS)
    def test_a_prefix_selects_whole_components(
        self, store: RecordStore, method: str, prefix: str, expected: list[str]
    ) -> None:
        """`1` is not `10`, and batches may hold slashes."""
        for key in ["0/eval/1/0", "1/a/0", "1/b/0", "10/a/0"]:
            add(store, root("r", RecordKey.parse(key)))
        assert found_by(store, method, KeyPrefix(prefix)) == expected

    @pytest.mark.parametrize("method", METHODS)
    def test_a_key_selects_no_longer_key(self, store: RecordStore, method: str) -> None:
        """The prefix that is written alike does."""
        every = ["1/a/0", "1/a/0/1", "1/a/0/b/0", "1/a/00/1"]
        for key in every:
            add(store, root("r", RecordKey.parse(key)))
        assert found_by(store, method, RecordKey.parse("1/a/0")) == ["1/a/0"]
        if method in ("drain", "remove"):
            add(store, root("r", RecordKey.parse("1/a/0")))
        assert found_by(store, method, KeyPrefix("1/a/0")) == every[:3]

    @pytest.mark.parametrize("method", METHODS)
    def test_a_key_that_is_not_there_selects_nothing(self, store: RecordStore, method: str) -> None:
        """Also where longer or shorter keys are."""
        add(store, root("r", RecordKey.parse("1/a/0/1")), root("r", RecordKey.parse("1/a/2")))
        for key in ("1/a/0", "1/a/0/1/1", "1/a/1"):
            assert found_by(store, method, RecordKey.parse(key)) == []
