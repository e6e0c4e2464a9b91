"""The contract of `RecordStore` as a pytest suite, for any store.

To run it against yours, write:

    class TestMyStore(RecordStoreContract):
        @pytest.fixture
        def make_store(self, tmp_path):
            numbers = itertools.count()
            return lambda max_bytes: MyStore(tmp_path / str(next(numbers)), max_bytes=max_bytes)

Each test is one promise of `recorder_core.stores.base`. Time is real: the suite sleeps for a few
seconds in all. Where failures should show values, put
`pytest.register_assert_rewrite("recorder_core.stores.testing")` into your `conftest.py`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from recorder_core.errors import LeaseError, StoreClosedError
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.records import FinishReason, Record
from recorder_core.stores.base import AddOutcome, Lease, RecordStore

ALL = KeyPrefix()
KEY = RecordKey("7", "sum", 0)
OTHER = RecordKey("7", "sum", 1)
LONG_S = 600.0
"""A lease that does not run out during a test."""
SHORT_S = 0.2
"""One that does."""


def root(name: str = "root", key: RecordKey = KEY, tokens: int = 3, **fields: Any) -> Record:
    """A record of `tokens` prompt tokens and as many response tokens, which continues none."""
    return Record(
        id=name,
        key=key,
        prompt_ids=np.arange(tokens, dtype=np.int32),
        response_ids=np.arange(tokens, dtype=np.int32) + 100,
        logprobs=np.full(tokens, -0.5, dtype=np.float32),
        finish_reason=FinishReason.STOP,
        **fields,
    )


def child(parent: Record, name: str, **fields: Any) -> Record:
    """A record of one prompt token and two response tokens, which continues `parent`."""
    return Record(
        id=name,
        key=parent.key,
        parent=parent.id,
        start=parent.end,
        prompt_ids=[7],
        response_ids=[8, 9],
        logprobs=[-1.0, -2.0],
        finish_reason=FinishReason.STOP,
        **fields,
    )


def names(records: list[Record] | tuple[Record, ...]) -> list[str]:
    """The records' ids, in their order."""
    return [record.id for record in records]


def add(store: RecordStore, *records: Record) -> None:
    """Add records that the store has to take."""
    for record in records:
        assert store.add(record) is AddOutcome.STORED


def run_out(lease: Lease) -> None:
    """Wait until a lease is over."""
    time.sleep(lease.lease_s + 0.1)


class RecordStoreContract:
    """What every store keeps. Subclass it, name the class `Test...`, override `make_store`."""

    many_prefixes = 20_000
    """More blocked prefixes than the store remembers."""

    @pytest.fixture
    def make_store(self) -> Callable[[int], RecordStore]:
        """Makes an empty store with a byte budget; called as `make_store(max_bytes)`."""
        raise NotImplementedError("override the fixture make_store")

    @pytest.fixture
    def store(self, make_store: Callable[[int], RecordStore]) -> Iterator[RecordStore]:
        """An empty store with room for everything that the tests put into it."""
        store = make_store(256 * 1024**2)
        yield store
        store.close()

    @pytest.fixture
    def busy_threads(self) -> Iterator[None]:
        """Makes threads change places after a few operations, not every 5 ms."""
        usual = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        yield
        sys.setswitchinterval(usual)

    def test_an_added_record_is_read_back_equal(self, store: RecordStore) -> None:
        """Every field survives, arrays and texts included."""
        record = root(
            reward=0.5,
            response_text="wörld \N{SNOWMAN}",
            info={"judge": {"score": 3, "notes": ["a", None]}},
            versions=((0, 2, "step-9"), (2, 3, "step-10")),
            adapter="lora",
            stop_reason=2,
            flags=("odd",),
        )
        add(store, record)
        assert store.get(ALL) == [record]

    def test_a_record_added_twice_is_stored_once(self, store: RecordStore) -> None:
        """The second call counts as stored, and changes nothing."""
        add(store, root(reward=1.0))
        assert store.add(root(reward=0.0)) is AddOutcome.STORED
        assert [record.reward for record in store.get(ALL)] == [1.0]
        assert store.stats().counters["stored"] == 1

    def test_the_same_id_under_two_keys_is_two_records(self, store: RecordStore) -> None:
        """Ids are compared within a key only."""
        add(store, root("x", KEY), root("x", OTHER))
        assert [record.key for record in store.get(ALL)] == [KEY, OTHER]

    def test_a_record_without_its_parent_is_not_stored(self, store: RecordStore) -> None:
        """Neither where the key is unknown, nor where only another key has the parent."""
        add(store, root("p", OTHER))
        assert store.add(child(root("p", KEY), "c")) is AddOutcome.NO_PARENT
        assert names(store.get(ALL)) == ["p"]

    def test_a_record_that_starts_elsewhere_than_its_parent_ends_is_not_stored(
        self, store: RecordStore
    ) -> None:
        """Its tokens would not continue the parent's."""
        add(store, root("p", tokens=3))
        assert store.add(child(root("p", tokens=4), "c")) is AddOutcome.NO_PARENT

    def test_get_gives_keys_in_order_and_parents_first(self, store: RecordStore) -> None:
        """Runs are ordered as numbers."""
        late = RecordKey("7", "sum", 10)
        first = root("a")
        second = child(first, "b")
        add(store, root("z", late), root("m", OTHER), first, second, child(second, "c"))
        assert names(store.get(ALL)) == ["a", "b", "c", "m", "z"]

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
    @pytest.mark.parametrize("method", ["get", "keys", "drain", "remove"])
    def test_a_prefix_selects_whole_components(
        self, store: RecordStore, method: str, prefix: str, expected: list[str]
    ) -> None:
        """`1` is not `10`, and batches may hold slashes."""
        every = ["0/eval/1/0", "1/a/0", "1/b/0", "10/a/0"]
        add(store, *(root("r", RecordKey.parse(key)) for key in every))
        wanted = KeyPrefix(prefix)
        if method == "remove":
            assert store.remove(wanted) == len(expected)
            left = [str(record.key) for record in store.get(ALL)]
            found = [key for key in every if key not in left]
        elif method == "drain":
            found = [str(record.key) for record in store.drain(wanted, LONG_S).records]
        elif method == "keys":
            found = [str(summary.key) for summary in store.keys(wanted)]
        else:
            found = [str(record.key) for record in store.get(wanted)]
        assert found == expected

    def test_overwrite_replaces_all_that_the_key_has(self, store: RecordStore) -> None:
        """And leaves the other keys."""
        first = root("new")
        add(store, root("old"), root("kept", OTHER))
        store.overwrite(KEY, [first, child(first, "newer")])
        assert names(store.get(ALL)) == ["new", "newer", "kept"]

    def test_overwrite_puts_parents_first(self, store: RecordStore) -> None:
        """Whatever the order in which they are given."""
        first = root("a")
        second = child(first, "b")
        store.overwrite(KEY, [child(second, "c"), second, first])
        assert names(store.get(ALL)) == ["a", "b", "c"]

    def test_overwriting_with_nothing_empties_the_key(self, store: RecordStore) -> None:
        """It is then as if nothing had been added."""
        add(store, root())
        store.overwrite(KEY, [])
        assert store.keys(ALL) == []

    def test_overwrite_replaces_leased_records_too(self, store: RecordStore) -> None:
        """They do not come back."""
        add(store, root("old"))
        lease = store.drain(ALL, SHORT_S)
        store.overwrite(KEY, [root("new")])
        run_out(lease)
        assert names(store.get(ALL)) == ["new"]

    @pytest.mark.parametrize(
        "records",
        [
            [root("a"), root("b", OTHER)],
            [root("a"), child(root("absent"), "b")],
            [root("a"), child(root("a", tokens=5), "b")],
            [root("a"), root("a")],
        ],
        ids=["another key", "absent parent", "parent ends elsewhere", "the same id twice"],
    )
    def test_a_refused_overwrite_changes_nothing(
        self, store: RecordStore, records: list[Record]
    ) -> None:
        """Neither what is there nor what is leased."""
        add(store, root("leased"))
        lease = store.drain(ALL, LONG_S)
        add(store, root("old"))
        with pytest.raises(ValueError, match="record "):
            store.overwrite(KEY, records)
        assert names(store.get(ALL)) == ["old"]
        assert store.ack(lease.id) == 1

    def test_a_reward_by_key_reaches_every_record_of_the_key(self, store: RecordStore) -> None:
        """And none of another key."""
        first = root("a")
        add(store, first, child(first, "b"), root("c", OTHER))
        assert store.update(KEY, reward=1.5) == 2
        assert [record.reward for record in store.get(ALL)] == [1.5, 1.5, None]

    def test_a_reward_by_record_id_reaches_those_records(self, store: RecordStore) -> None:
        """Ids that the key does not have are no error."""
        first = root("a")
        add(store, first, child(first, "b"), root("b", OTHER))
        assert store.update(KEY, record_ids=["b", "absent"], reward=0.0) == 1
        assert [record.reward for record in store.get(ALL)] == [None, 0.0, None]

    def test_a_reward_for_no_record_id_reaches_none(self, store: RecordStore) -> None:
        """An empty selection is not the selection of all."""
        add(store, root())
        assert store.update(KEY, record_ids=[], reward=1.0) == 0
        assert store.get(ALL)[0].reward is None

    def test_info_is_merged_and_the_reward_kept(self, store: RecordStore) -> None:
        """A later value of a name replaces the earlier one."""
        add(store, root(reward=1.0, info={"env": "math", "try": 1}))
        assert store.update(KEY, info={"try": 2, "note": None}) == 1
        (record,) = store.get(ALL)
        assert record.info == {"env": "math", "try": 2, "note": None}
        assert record.reward == 1.0

    def test_a_token_level_reward_is_stored_as_float32(self, store: RecordStore) -> None:
        """One value per response token."""
        add(store, root(tokens=3))
        assert store.update(KEY, token_level_reward=[0.0, 0.25, 1.0]) == 1
        stored = store.get(ALL)[0].token_level_reward
        assert stored is not None
        assert stored.dtype == np.float32
        assert stored.tolist() == [0.0, 0.25, 1.0]

    def test_an_update_that_does_not_fit_one_record_changes_none(self, store: RecordStore) -> None:
        """Three values fit the root's three tokens and not the child's two."""
        first = root("a", tokens=3)
        add(store, first, child(first, "b"))
        with pytest.raises(ValueError, match="3 values"):
            store.update(KEY, reward=1.0, info={"x": 1}, token_level_reward=[0.1, 0.2, 0.3])
        assert store.get(ALL) == [first, child(first, "b")]

    @pytest.mark.parametrize(
        "values",
        [
            {"reward": float("nan")},
            {"reward": float("inf")},
            {"info": {"x": object()}},
            {"info": {"x": float("nan")}},
            {"info": {"x": "\ud800"}},
            {"info": {"x": 10**5000}},
        ],
        ids=["NaN", "infinite", "an object", "NaN in info", "lone surrogate", "5,001 digits"],
    )
    def test_what_could_not_be_read_back_is_refused(
        self, store: RecordStore, values: dict[str, Any]
    ) -> None:
        """And changes nothing."""
        add(store, root())
        with pytest.raises(ValueError):  # noqa: PT011 - the message is the validator's own
            store.update(KEY, **values)
        assert store.get(ALL) == [root()]

    def test_a_reward_for_a_key_without_records_is_not_kept_for_later(
        self, store: RecordStore
    ) -> None:
        """It updates 0, which is no error."""
        assert store.update(KEY, reward=1.0) == 0
        add(store, root())
        assert store.get(ALL)[0].reward is None

    def test_a_reward_does_not_reach_records_added_later(self, store: RecordStore) -> None:
        """A reward by key is for what the key has at that moment."""
        first = root("a")
        add(store, first)
        store.update(KEY, reward=1.0)
        add(store, child(first, "b"))
        assert [record.reward for record in store.get(ALL)] == [1.0, None]

    def test_removed_records_are_gone(self, store: RecordStore) -> None:
        """What continued them is not stored any more."""
        first = root("a")
        add(store, first, child(first, "b"))
        assert store.remove(KeyPrefix(str(KEY))) == 2
        assert store.get(ALL) == []
        assert store.add(child(first, "c")) is AddOutcome.NO_PARENT

    def test_remove_deletes_leased_records_too(self, store: RecordStore) -> None:
        """The lease has nothing left to acknowledge, and nothing comes back."""
        add(store, root("leased"))
        lease = store.drain(ALL, SHORT_S)
        add(store, root("here"))
        assert store.remove(ALL) == 2
        assert store.ack(lease.id) == 0
        run_out(lease)
        assert store.get(ALL) == []

    def test_a_drain_hands_everything_out_once(self, store: RecordStore) -> None:
        """Keys in order, parents first, rewards and all."""
        first = root("a")
        second = child(first, "b", reward=1.0)
        add(store, root("m", OTHER), first, second)
        assert store.drain(ALL, LONG_S).records == (first, second, root("m", OTHER))
        assert store.drain(ALL, LONG_S).records == ()

    @pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan")])
    def test_a_lease_of_no_time_is_refused(self, store: RecordStore, lease_s: float) -> None:
        """Its records would be back before they arrive."""
        add(store, root())
        with pytest.raises(ValueError, match="lease_s"):
            store.drain(ALL, lease_s)
        assert names(store.get(ALL)) == ["root"]

    def test_leased_records_are_out_of_sight(self, store: RecordStore) -> None:
        """They are counted as leased, and their bytes are still held."""
        add(store, root())
        held = store.stats().bytes
        store.drain(ALL, LONG_S)
        assert store.get(ALL) == []
        assert store.keys(ALL) == []
        assert store.update(KEY, reward=1.0) == 0
        assert store.add(child(root(), "c")) is AddOutcome.NO_PARENT
        stats = store.stats()
        assert (stats.keys, stats.records, stats.leased_records) == (0, 0, 1)
        assert stats.bytes == held

    def test_an_acknowledged_lease_is_forgotten_for_good(self, store: RecordStore) -> None:
        """Acknowledging it again is no error."""
        add(store, root("a"), root("b", OTHER))
        lease = store.drain(ALL, SHORT_S)
        assert store.ack(lease.id) == 2
        assert store.ack(lease.id) == 0
        run_out(lease)
        assert store.get(ALL) == []
        assert store.ack(lease.id) == 0
        assert (store.stats().bytes, store.stats().leased_records) == (0, 0)

    def test_an_empty_drain_can_be_acknowledged(self, store: RecordStore) -> None:
        """A scheduler need not look first."""
        assert store.ack(store.drain(ALL, LONG_S).id) == 0

    def test_leases_are_acknowledged_one_by_one(self, store: RecordStore) -> None:
        """Acknowledging one leaves the other."""
        add(store, root("a"), root("b", OTHER))
        first = store.drain(KeyPrefix(str(KEY)), LONG_S)
        second = store.drain(KeyPrefix(str(OTHER)), SHORT_S)
        assert store.ack(first.id) == 1
        run_out(second)
        assert names(store.get(ALL)) == ["b"]

    def test_records_come_back_with_their_rewards_when_the_lease_runs_out(
        self, store: RecordStore
    ) -> None:
        """The trainer died: the next drain gets the same records."""
        first = root("a", info={"env": "math"})
        add(store, first, child(first, "b"))
        store.update(KEY, reward=0.75)
        lease = store.drain(ALL, SHORT_S)
        run_out(lease)
        assert tuple(store.get(ALL)) == lease.records
        assert store.update(KEY, reward=1.0) == 2
        assert store.stats().counters["returned"] == 2

    def test_a_lease_that_has_run_out_cannot_be_acknowledged(self, store: RecordStore) -> None:
        """Its records are back, and stay."""
        add(store, root())
        lease = store.drain(ALL, SHORT_S)
        run_out(lease)
        with pytest.raises(LeaseError):
            store.ack(lease.id)
        assert names(store.get(ALL)) == ["root"]

    def test_an_unknown_lease_cannot_be_acknowledged(self, store: RecordStore) -> None:
        """Whatever its id looks like."""
        with pytest.raises(LeaseError):
            store.ack("no-such-lease")

    def test_records_made_during_a_lease_join_those_that_come_back(
        self, store: RecordStore
    ) -> None:
        """Parents are still first."""
        first = root("a")
        add(store, first, child(first, "b"))
        lease = store.drain(ALL, SHORT_S)
        later = root("c", tokens=5)
        add(store, later, child(later, "d"))
        run_out(lease)
        found = names(store.get(ALL))
        assert sorted(found) == ["a", "b", "c", "d"]
        assert found.index("a") < found.index("b")
        assert found.index("c") < found.index("d")
        assert [summary.records for summary in store.keys(ALL)] == [4]

    def test_a_blocked_prefix_takes_no_more_records(self, store: RecordStore) -> None:
        """What is there stays, and other batches are not concerned."""
        add(store, root("early"))
        store.block(KeyPrefix("7"))
        assert store.add(root("late")) is AddOutcome.BLOCKED
        add(store, root("other", RecordKey("70", "sum", 0)))
        assert names(store.get(ALL)) == ["early", "other"]
        assert store.stats().counters["blocked"] == 1

    @pytest.mark.parametrize("prefix", ["", "7/sum", "7/sum/0"])
    def test_any_prefix_can_be_blocked(self, store: RecordStore, prefix: str) -> None:
        """The empty one blocks everything."""
        store.block(KeyPrefix(prefix))
        assert store.add(root()) is AddOutcome.BLOCKED

    def test_blocked_prefixes_do_not_pile_up(self, store: RecordStore) -> None:
        """The ones blocked last are those that late finishes may still come for."""
        for batch in range(self.many_prefixes):
            store.block(KeyPrefix(str(batch)))
        assert store.stats().blocked_prefixes < self.many_prefixes
        last = RecordKey(str(self.many_prefixes - 1), "sum", 0)
        assert store.add(root(key=last)) is AddOutcome.BLOCKED

    def test_keys_tells_what_is_there(self, store: RecordStore) -> None:
        """In the order of the keys."""
        first = root("a")
        add(store, root("m", RecordKey("7", "sum", 10)), first, child(first, "b"))
        store.update(KEY, record_ids=["b"], reward=0.0)
        found = store.keys(ALL)
        assert [(str(each.key), each.records, each.rewarded) for each in found] == [
            ("7/sum/0", 2, 1),
            ("7/sum/10", 1, 0),
        ]
        assert sum(each.bytes for each in found) == store.stats().bytes
        assert all(0 <= each.age_s < 60 for each in found)

    def test_a_sweep_deletes_what_nothing_was_added_to_for_long(self, store: RecordStore) -> None:
        """A reward is no addition."""
        dead = root("dead")
        live = root("live", OTHER)
        add(store, dead, live)
        time.sleep(0.4)
        store.update(KEY, reward=1.0)
        add(store, child(live, "new"))
        assert store.sweep(0.3) == 1
        assert names(store.get(ALL)) == ["live", "new"]
        assert store.sweep(LONG_S) == 0

    def test_each_stored_record_is_accounted_for(self, store: RecordStore) -> None:
        """Stored is what is held and what became of the rest."""
        for number in range(5):
            add(store, root("r", RecordKey("7", "sum", number)))
        store.add(root("r"))
        store.add(child(root("absent"), "c"))
        store.overwrite(KEY, [root("new")])
        store.ack(store.drain(KeyPrefix("7/sum/1"), LONG_S).id)
        store.drain(KeyPrefix("7/sum/2"), LONG_S)
        store.remove(KeyPrefix("7/sum/3"))
        stats = store.stats()
        assert stats.counters["stored"] == 6
        assert _accounted_for(store) == 6
        assert (stats.keys, stats.records, stats.leased_records) == (2, 2, 1)

    def test_bytes_return_to_nothing(self, store: RecordStore) -> None:
        """Whatever way records took."""
        first = root("a")
        add(store, first, root("b", OTHER))
        lease = store.drain(ALL, SHORT_S)
        add(store, first, child(first, "c"))
        run_out(lease)
        store.update(KEY, info={"note": "x" * 1000}, record_ids=["c"])
        store.overwrite(OTHER, [root("d", OTHER, tokens=50)])
        assert store.stats().bytes == sum(each.bytes for each in store.keys(ALL)) > 0
        store.remove(ALL)
        assert store.stats().bytes == 0

    def test_the_byte_budget_holds(self, make_store: Callable[[int], RecordStore]) -> None:
        """100 records of 100 kB, 1 MiB: the rest is evicted or refused, and counted."""
        budget = 1024**2
        store = make_store(budget)
        outcomes = Counter[AddOutcome]()
        for run in range(100):
            outcomes[store.add(root("r", RecordKey("7", "sum", run), tokens=8_000))] += 1
            assert store.stats().bytes <= budget
        stats = store.stats()
        assert stats.max_bytes == budget
        assert 0 < stats.records < 20
        assert set(outcomes) <= {AddOutcome.STORED, AddOutcome.FULL}
        assert stats.counters.get("full", 0) == outcomes[AddOutcome.FULL]
        assert stats.counters.get("evicted", 0) == outcomes[AddOutcome.STORED] - stats.records
        assert _accounted_for(store) == stats.counters["stored"]
        store.close()

    def test_updates_and_overwrites_keep_to_the_budget(
        self, make_store: Callable[[int], RecordStore]
    ) -> None:
        """Where one does not fit nothing is changed."""
        store = make_store(1024**2)
        add(store, root("a"))
        with pytest.raises(ValueError, match="budget"):
            store.update(KEY, reward=1.0, info={"note": "x" * 2 * 1024**2})
        with pytest.raises(ValueError, match="budget"):
            store.overwrite(KEY, [root("b", tokens=500_000)])
        assert store.get(ALL) == [root("a")]
        store.close()

    def test_leased_records_survive_a_full_store(
        self, make_store: Callable[[int], RecordStore]
    ) -> None:
        """They are promised to come back."""
        store = make_store(1024**2)
        add(store, root("leased", tokens=8_000))
        lease = store.drain(ALL, 1.0)
        for run in range(1, 40):
            store.add(root("r", RecordKey("7", "sum", run), tokens=8_000))
        run_out(lease)
        assert names(store.get(KeyPrefix(str(KEY)))) == ["leased"]
        store.close()

    def test_a_closed_store_raises(self, store: RecordStore) -> None:
        """Closing twice is no error."""
        add(store, root())
        store.close()
        store.close()
        calls: list[Callable[[], object]] = [
            lambda: store.add(root()),
            lambda: store.overwrite(KEY, [root()]),
            lambda: store.update(KEY, reward=1.0),
            lambda: store.get(ALL),
            lambda: store.remove(ALL),
            lambda: store.drain(ALL, LONG_S),
            lambda: store.ack("lease"),
            lambda: store.block(ALL),
            lambda: store.keys(ALL),
            lambda: store.sweep(0.0),
            lambda: store.stats(),
        ]
        for call in calls:
            with pytest.raises(StoreClosedError):
                call()

    @pytest.mark.usefixtures("busy_threads")
    def test_threads_that_write_to_one_key_lose_nothing(self, store: RecordStore) -> None:
        """Neither a record, nor info, nor a byte of the accounts."""

        def write(thread: int) -> None:
            for number in range(30):
                name = f"{thread}-{number}"
                add(store, root(name))
                assert store.update(KEY, record_ids=[name], info={f"by {thread}": number}) == 1

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(write, range(8)))
        records = store.get(ALL)
        expected = {f"{a}-{b}": {f"by {a}": b} for a in range(8) for b in range(30)}
        assert {record.id: record.info for record in records} == expected
        assert _accounted_for(store) == store.stats().counters["stored"] == 240
        assert store.ack(store.drain(ALL, LONG_S).id) == 240
        assert store.stats().bytes == 0

    @pytest.mark.usefixtures("busy_threads")
    def test_each_record_comes_out_exactly_once(self, store: RecordStore) -> None:
        """Eight threads add runs and reward them while two others drain and acknowledge."""
        done = threading.Event()

        def record_runs(thread: int) -> list[str]:
            made = []
            for run in range(40):
                key = RecordKey(str(thread), "sum", run)
                first = root(f"{key}-first", key)
                add(store, first)
                # Not stored where a drain came in between, as the recorder would see it.
                if store.add(child(first, f"{key}-second")) is AddOutcome.STORED:
                    made.append(f"{key}-second")
                store.update(key, reward=float(run))
                made.append(first.id)
            return made

        def drain_all() -> list[str]:
            drained = []
            while True:
                last = done.is_set()
                lease = store.drain(ALL, LONG_S)
                assert store.ack(lease.id) == len(lease.records)
                drained += names(lease.records)
                if last:
                    return drained
                time.sleep(0.002)

        with ThreadPoolExecutor(10) as threads:
            draining = [threads.submit(drain_all) for _ in range(2)]
            try:
                made = [name for batch in threads.map(record_runs, range(8)) for name in batch]
            finally:
                done.set()
            drained = [name for future in draining for name in future.result()]
        assert sorted(drained) == sorted(made)
        assert len(made) >= 320
        assert _accounted_for(store) == store.stats().counters["stored"] == len(made)


def _accounted_for(store: RecordStore) -> int:
    stats = store.stats()
    gone = ("acknowledged", "removed", "overwritten", "evicted", "swept")
    fates = sum(stats.counters.get(fate, 0) for fate in gone)
    return stats.records + stats.leased_records + fates
