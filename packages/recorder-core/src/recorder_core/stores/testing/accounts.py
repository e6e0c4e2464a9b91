"""The contract on accounts: counters add up, bytes are true, the budget holds, whole runs go."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from recorder_core.drops import DropReason
from recorder_core.errors import StoreClosedError
from recorder_core.keys import RecordKey
from recorder_core.stores.base import AddOutcome, RecordStore
from recorder_core.stores.testing.given import (
    ALL,
    KEY,
    LONG_S,
    OTHER,
    GivenStore,
    add,
    child,
    drain,
    held,
    names,
    root,
    run_of,
)
from recorder_core.stores.testing.sequences import RandomSequence, accounted_for, check_accounts

MIB = 1024**2


class AccountsContract(GivenStore):
    """What every store says of its size, and keeps to."""

    def test_each_stored_record_is_accounted_for(self, store: RecordStore) -> None:
        """Stored is what is held and what became of the rest."""
        for number in range(5):
            add(store, root("r", RecordKey("7", "sum", number)))
        store.add(root("r"))
        store.add(child(root("absent"), "c"))
        store.overwrite(KEY, [root("new")])
        store.ack(drain(store, RecordKey("7", "sum", 1)).id)
        drain(store, RecordKey("7", "sum", 2))
        store.remove(RecordKey("7", "sum", 3))
        stats = store.stats()
        assert stats.counters["stored"] == 6
        assert accounted_for(stats) == 6
        assert (stats.keys, stats.records, stats.leased_records) == (2, 2, 1)

    def test_a_record_that_comes_back_beside_its_like_is_counted(self, store: RecordStore) -> None:
        """The same record may have been stored again while the first was leased."""
        add(store, root("a"))
        lease = drain(store)
        add(store, root("a"), root("b"))
        store.release(lease.id)
        assert sorted(names(held(store))) == ["a", "b"]
        assert store.stats().counters["overwritten"] == 1
        check_accounts(store, [])

    def test_bytes_return_to_nothing(self, store: RecordStore) -> None:
        """Whatever way records took."""
        first = root("a")
        add(store, first, root("b", OTHER))
        lease = drain(store)
        add(store, first, child(first, "c"))
        store.release(lease.id)
        store.update(KEY, info={"note": "x" * 1000}, sample_ids=["c"])
        store.update(KEY, info={"note": "x" * 1000})
        store.update(KEY, info={"note": ""})
        store.overwrite(OTHER, [root("d", OTHER, tokens=50)])
        assert store.stats().bytes == sum(each.bytes for each in store.keys(ALL)) > 0
        store.remove(ALL)
        assert store.stats().bytes == 0

    @pytest.mark.parametrize("seed", range(12))
    @pytest.mark.parametrize("max_bytes", [256 * MIB, 24_000], ids=["roomy", "tight"])
    def test_accounts_hold_after_any_sequence_of_calls(
        self, make_store: Callable[[int], RecordStore], seed: int, max_bytes: int
    ) -> None:
        """Running totals are what counting again gives."""
        store = make_store(max_bytes)
        sequence = RandomSequence(store, random.Random(seed))  # noqa: S311 - no secret
        for _ in range(120):
            sequence.step()
            check_accounts(store, sequence.leases)
        sequence.end()
        stats = store.stats()
        assert (stats.keys, stats.records, stats.leased_records, stats.bytes) == (0, 0, 0, 0)
        store.close()

    def test_the_byte_budget_holds(self, make_store: Callable[[int], RecordStore]) -> None:
        """100 records of 100 kB, 1 MiB: the rest is evicted or refused, and counted."""
        store = make_store(MIB)
        outcomes = Counter[AddOutcome]()
        for run in range(100):
            outcomes[store.add(root("r", RecordKey("7", "sum", run), tokens=8_000))] += 1
            assert store.stats().bytes <= MIB
        stats = store.stats()
        assert stats.max_bytes == MIB
        assert 0 < stats.records < 20
        assert set(outcomes) <= {AddOutcome.STORED, AddOutcome.FULL}
        assert stats.counters.get("full", 0) == outcomes[AddOutcome.FULL]
        assert stats.counters.get("evicted", 0) == outcomes[AddOutcome.STORED] - stats.records
        check_accounts(store, [])
        store.close()

    def test_updates_and_overwrites_keep_to_the_budget(
        self, make_store: Callable[[int], RecordStore]
    ) -> None:
        """Where one does not fit nothing is changed."""
        store = make_store(MIB)
        store.watch(lambda key: 1)
        add(store, root("a"))
        large = {"note": "x" * 2 * MIB}
        for key, sample_ids in ((KEY, None), (KEY, ["a"]), (OTHER, None)):
            with pytest.raises(ValueError, match="budget"):
                store.update(key, sample_ids=sample_ids, reward=1.0, info=large)
        with pytest.raises(ValueError, match="budget"):
            store.overwrite(KEY, [root("b", tokens=500_000)])
        assert held(store) == [root("a")]
        assert (run_of(store).reward, run_of(store).info) == (None, {})
        assert [summary.key for summary in store.keys(ALL)] == [KEY]
        check_accounts(store, [])
        store.close()

    def test_a_run_is_there_whole_or_not_at_all(
        self, make_store: Callable[[int], RecordStore]
    ) -> None:
        """Room is made by whole runs, and one that was deleted and goes on says so. S1."""
        store = make_store(MIB)
        turns = Counter[RecordKey]()
        lost = Counter[RecordKey]()
        for number in range(300):
            key = RecordKey("7", "sum", number * 7 % 30)
            before = {each.key: each.records for each in store.keys(ALL)}
            outcome = store.add(root(f"{number}", key, tokens=3_000))
            after = {each.key: each for each in store.keys(ALL)}
            turns[key] += outcome is AddOutcome.STORED
            for gone in before.keys() - after.keys():
                lost[gone] += before[gone]
            for each in after.values():
                assert each.records + each.missing.get("evicted", 0) == turns[each.key]
        assert accounted_for(store.stats()) == sum(turns.values())
        store.close()

    def test_a_run_in_flight_survives_a_full_store(
        self, make_store: Callable[[int], RecordStore]
    ) -> None:
        """Its next turn is being sampled: its head is not deleted. S1."""
        store = make_store(MIB)
        store.watch(lambda key: key == KEY)
        add(store, root("mine", tokens=8_000))
        for run in range(1, 40):
            store.add(root("r", RecordKey("7", "sum", run), tokens=8_000))
        assert names(held(store, KEY)) == ["mine"]
        assert store.stats().bytes <= MIB
        store.close()

    def test_leased_records_survive_a_full_store(
        self, make_store: Callable[[int], RecordStore]
    ) -> None:
        """They are promised to come back."""
        store = make_store(MIB)
        add(store, root("leased", tokens=8_000))
        lease = drain(store)
        for run in range(1, 40):
            store.add(root("r", RecordKey("7", "sum", run), tokens=8_000))
        assert store.release(lease.id) == 1
        assert names(held(store, KEY)) == ["leased"]
        store.close()

    def test_what_is_dropped_is_known_though_there_is_no_room(
        self, make_store: Callable[[int], RecordStore]
    ) -> None:
        """A run whose first turn found no room says so when its second turn does. S1."""
        store = make_store(MIB)
        store.watch(lambda key: 1)
        large = root("r", OTHER, tokens=80_000)
        add(store, large)
        note = (MIB - store.stats().bytes - 1_000) // 4
        store.update(OTHER, info={"note": "x" * note})
        assert store.add(root("a", tokens=1_000)) is AddOutcome.FULL
        store.note_dropped(KEY, DropReason.FULL)
        store.note_dropped(KEY, DropReason.FULL)
        store.remove(OTHER)
        add(store, root("b"))
        assert run_of(store).missing == {"full": 2}
        store.close()

    def test_a_closed_store_raises(self, store: RecordStore) -> None:
        """Closing twice is no error."""
        add(store, root())
        store.close()
        store.close()
        calls: list[Callable[[], object]] = [
            lambda: store.epoch(KEY),
            lambda: store.add(root()),
            lambda: store.note_dropped(KEY, DropReason.LOST),
            lambda: store.amend(KEY, "root", delivered=True),
            lambda: store.overwrite(KEY, [root()]),
            lambda: store.update(KEY, reward=1.0),
            lambda: store.get(ALL),
            lambda: store.remove(ALL),
            lambda: store.drain(ALL, "lease", LONG_S),
            lambda: store.ack("lease"),
            lambda: store.release("lease"),
            lambda: store.extend("lease", LONG_S),
            lambda: store.block(ALL),
            lambda: store.keys(ALL),
            lambda: store.sweep(0.0),
            lambda: store.stats(),
            lambda: store.when_safe(print),
        ]
        for call in calls:
            with pytest.raises(StoreClosedError):
                call()
