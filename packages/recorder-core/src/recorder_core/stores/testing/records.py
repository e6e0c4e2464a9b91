"""The contract on records: how they come in, are read back, replaced and removed."""

from __future__ import annotations

import pytest

from recorder_core.drops import DropReason
from recorder_core.keys import RecordKey
from recorder_core.records import Record
from recorder_core.stores.base import AddOutcome, RecordStore
from recorder_core.stores.testing.given import (
    ALL,
    KEY,
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


class RecordsContract(GivenStore):
    """What every store keeps of each record."""

    def test_an_added_record_is_read_back_equal(self, store: RecordStore) -> None:
        """Every field survives, arrays and texts included."""
        record = root(
            reward=0.5,
            response_text="wörld \N{SNOWMAN}",
            info={"judge": {"score": 3, "notes": ["a", None]}},
            versions=((0, 2, "step-9"), (2, 3, "step-10")),
            adapter="lora",
            stop_reason=2,
            delivered=True,
            token_level_reward=[0.0, 0.5, 1.0],
            flags=("odd",),
        )
        add(store, record)
        assert held(store) == [record]

    def test_a_record_added_twice_is_stored_once(self, store: RecordStore) -> None:
        """The second call counts as stored, and changes nothing."""
        add(store, root(reward=1.0))
        assert store.add(root(reward=0.0)) is AddOutcome.STORED
        assert [record.reward for record in held(store)] == [1.0]
        assert store.stats().counters["stored"] == 1

    def test_the_same_id_under_two_keys_is_two_records(self, store: RecordStore) -> None:
        """Ids are compared within a key only."""
        add(store, root("x", KEY), root("x", OTHER))
        assert [record.key for record in held(store)] == [KEY, OTHER]

    def test_a_record_without_its_parent_is_not_stored(self, store: RecordStore) -> None:
        """Neither where the key is unknown, nor where only another key has the parent."""
        add(store, root("p", OTHER))
        assert store.add(child(root("p", KEY), "c")) is AddOutcome.NO_PARENT
        assert names(held(store)) == ["p"]
        assert len(store.keys(ALL)) == 1

    def test_a_record_that_starts_elsewhere_than_its_parent_ends_is_not_stored(
        self, store: RecordStore
    ) -> None:
        """Its tokens would not continue the parent's."""
        add(store, root("p", tokens=3))
        assert store.add(child(root("p", tokens=4), "c")) is AddOutcome.NO_PARENT

    @pytest.mark.parametrize(
        ("start", "outcome"),
        [(3, AddOutcome.STORED), (6, AddOutcome.STORED), (4, AddOutcome.NO_PARENT)],
        ids=["after its prompt", "after its response", "in its response"],
    )
    def test_a_record_may_share_the_tokens_of_one_that_it_does_not_continue(
        self, store: RecordStore, start: int, outcome: AddOutcome
    ) -> None:
        """Samples of one prompt keep it once. S12."""
        add(store, root("first", tokens=3))
        sample = root("second", prompt_ids=[], base="first", start=start)
        assert store.add(sample) is outcome
        absent = root("third", prompt_ids=[], base="absent", start=3)
        assert store.add(absent) is AddOutcome.NO_PARENT

    def test_get_gives_keys_in_order_and_parents_first(self, store: RecordStore) -> None:
        """Runs are ordered as numbers."""
        late = RecordKey("7", "sum", 10)
        first = root("a")
        second = child(first, "b")
        add(store, root("z", late), root("m", OTHER), first, second, child(second, "c"))
        assert [run.key for run in store.get(ALL)] == [KEY, OTHER, late]
        assert names(held(store)) == ["a", "b", "c", "m", "z"]

    def test_what_was_read_does_not_change_any_more(self, store: RecordStore) -> None:
        """Whoever reads may take their time, whatever becomes of the run."""
        first = root("a")
        add(store, first)
        run = run_of(store)
        add(store, child(first, "b"))
        store.update(KEY, reward=1.0, info={"x": 1})
        store.note_dropped(KEY, DropReason.LOST)
        store.remove(KEY)
        assert (names(run.records.values()), run.reward, run.info) == (["a"], None, {})
        assert run.missing == {}

    def test_an_epoch_lasts_while_records_are_only_added(self, store: RecordStore) -> None:
        """So the recorder need not look at the run again for each turn."""
        assert store.epoch(KEY) == 0
        first = root("a")
        add(store, first)
        epoch = store.epoch(KEY)
        assert epoch != 0
        assert store.add(child(first, "b"), epoch) is AddOutcome.STORED
        store.update(KEY, reward=1.0)
        store.note_dropped(KEY, DropReason.LOST)
        assert store.epoch(KEY) == epoch
        assert store.epoch(OTHER) == 0

    @pytest.mark.parametrize("change", ["remove", "drain", "release", "overwrite"])
    def test_an_epoch_ends_when_records_are_taken_away(
        self, store: RecordStore, change: str
    ) -> None:
        """A record that was placed among those of before is to be placed anew."""
        first = root("a")
        add(store, first)
        epoch = store.epoch(KEY)
        if change == "remove":
            store.remove(KEY)
        elif change == "overwrite":
            store.overwrite(KEY, [first])
        else:
            lease = drain(store)
            if change == "release":
                store.release(lease.id)
        now = store.epoch(KEY)
        assert now != epoch
        assert store.add(child(first, "b"), epoch) is AddOutcome.MOVED
        assert store.add(root("c"), now) is AddOutcome.STORED

    def test_no_two_epochs_of_a_run_are_the_same(self, store: RecordStore) -> None:
        """Also where it begins anew with the same record."""
        seen = {0}
        for _ in range(10):
            add(store, root("a"))
            assert store.epoch(KEY) not in seen
            seen.add(store.epoch(KEY))
            store.remove(KEY)

    def test_a_first_record_is_placed_where_there_is_none(self, store: RecordStore) -> None:
        """A run that has no records, only a reward to come or a turn that is missing."""
        store.note_dropped(KEY, DropReason.LOST)
        assert store.epoch(KEY) == 0
        assert store.add(root("a"), 0) is AddOutcome.STORED
        assert store.add(root("b"), 0) is AddOutcome.MOVED

    def test_whether_a_reply_was_sent_may_come_later(self, store: RecordStore) -> None:
        """The store keeps it with the record, a leased one too."""
        add(store, root("a"), root("b", OTHER))
        store.amend(KEY, "a", delivered=True)
        lease = drain(store, OTHER)
        store.amend(OTHER, "b", delivered=False)
        store.amend(OTHER, "absent", delivered=True)
        store.release(lease.id)
        assert [record.delivered for record in held(store)] == [True, False]

    def test_a_flag_may_come_later(self, store: RecordStore) -> None:
        """Once, and beside the others, whatever has been written to the record since."""
        add(store, root("a", flags=("odd",)))
        store.update(KEY, sample_ids=["a"], reward=1.0)
        for _ in range(2):
            store.amend(KEY, "a", flag="late")
        (record,) = held(store)
        assert (record.flags, record.reward, record.delivered) == (("odd", "late"), 1.0, None)

    def test_overwrite_replaces_all_that_the_key_has(self, store: RecordStore) -> None:
        """And leaves the other keys."""
        first = root("new")
        add(store, root("old"), root("kept", OTHER))
        store.overwrite(KEY, [first, child(first, "newer")])
        assert names(held(store)) == ["new", "newer", "kept"]

    def test_an_overwritten_run_is_another_one(self, store: RecordStore) -> None:
        """What was known of the old one is not said of the new one."""
        add(store, root("old"))
        store.update(KEY, reward=1.0, info={"x": 1})
        store.note_dropped(KEY, DropReason.LOST)
        store.overwrite(KEY, [root("new")])
        run = run_of(store)
        assert (run.reward, run.info, run.missing) == (None, {}, {})

    def test_overwrite_puts_parents_first(self, store: RecordStore) -> None:
        """Whatever the order in which they are given."""
        first = root("a")
        second = child(first, "b")
        store.overwrite(KEY, [child(second, "c"), second, first])
        assert names(held(store)) == ["a", "b", "c"]

    def test_overwriting_with_nothing_empties_the_key(self, store: RecordStore) -> None:
        """It is then as if nothing had been added."""
        add(store, root())
        store.overwrite(KEY, [])
        assert store.keys(ALL) == []
        assert store.stats().bytes == 0

    def test_overwrite_replaces_leased_records_too(self, store: RecordStore) -> None:
        """They do not come back."""
        add(store, root("old"))
        lease = drain(store)
        store.overwrite(KEY, [root("new")])
        assert store.release(lease.id) == 0
        assert names(held(store)) == ["new"]

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
        lease = drain(store)
        add(store, root("old"))
        with pytest.raises(ValueError, match="record "):
            store.overwrite(KEY, records)
        assert names(held(store)) == ["old"]
        assert store.ack(lease.id) == 1

    def test_removed_records_are_gone(self, store: RecordStore) -> None:
        """What continued them is not stored any more."""
        first = root("a")
        add(store, first, child(first, "b"))
        assert store.remove(KEY) == 2
        assert store.remove(KEY) == 0
        assert store.get(ALL) == []
        assert store.add(child(first, "c")) is AddOutcome.NO_PARENT

    def test_a_removed_run_begins_anew(self, store: RecordStore) -> None:
        """A workflow that tries once more is not told of what its first try lacked."""
        add(store, root("a"))
        store.update(KEY, reward=1.0)
        store.note_dropped(KEY, DropReason.LOST)
        store.remove(KEY)
        add(store, root("b"))
        assert (run_of(store).reward, run_of(store).missing) == (None, {})

    def test_remove_deletes_leased_records_too(self, store: RecordStore) -> None:
        """The lease has nothing left to acknowledge, and nothing comes back."""
        add(store, root("leased"))
        lease = drain(store)
        other = drain(store)
        add(store, root("here"))
        assert store.remove(ALL) == 2
        assert store.ack(lease.id) == 0
        assert store.release(other.id) == 0
        assert store.get(ALL) == []
