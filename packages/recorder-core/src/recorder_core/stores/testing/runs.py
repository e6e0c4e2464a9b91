"""The contract on runs: rewards and notes, what is missing, what is closed, what is old."""

from __future__ import annotations

import time

import numpy as np
import pytest

from recorder_core.drops import DropReason
from recorder_core.keys import KeyPrefix, RecordKey
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


class RunsContract(GivenStore):
    """What every store keeps of each run."""

    many_prefixes = 20_000
    """More blocked prefixes than the store remembers."""

    def test_a_reward_by_key_belongs_to_the_run(self, store: RecordStore) -> None:
        """Generations that end later have it too, and no other run has. S3."""
        first = root("a")
        add(store, first, root("c", OTHER))
        assert store.update(KEY, reward=1.5) == (1, [])
        add(store, child(first, "b"))
        assert [run.reward for run in store.get(ALL)] == [1.5, None]
        assert [run.rewarded for run in store.get(ALL)] == [2, 0]
        (drained,) = drain(store, KEY).runs
        assert (drained.reward, names(drained.records.values())) == (1.5, ["a", "b"])

    def test_a_reward_by_record_id_is_that_generations(self, store: RecordStore) -> None:
        """The run and the other records have none."""
        first = root("a")
        add(store, first, child(first, "b"), root("b", OTHER))
        assert store.update(KEY, sample_ids=["b"], reward=0.0) == (1, [])
        assert [record.reward for record in held(store)] == [None, 0.0, None]
        assert run_of(store).reward is None

    def test_a_reward_by_request_id_is_that_of_its_samples(self, store: RecordStore) -> None:
        """All of them, or the one whose choice has the index that is given."""
        samples = [root(f"s{n}", request_id="chat-1", sample_index=n) for n in range(3)]
        add(store, *samples, root("other", request_id="chat-2"))
        assert store.update(KEY, sample_ids=["chat-1"], reward=0.0) == (3, [])
        assert store.update(KEY, sample_ids=[("chat-1", 1), ("chat-1", 2)], reward=1.0) == (2, [])
        rewards = {record.id: record.reward for record in held(store)}
        assert rewards == {"s0": 0.0, "s1": 1.0, "s2": 1.0, "other": None}

    def test_a_reward_by_request_id_reaches_the_prompts_of_a_batch(
        self, store: RecordStore
    ) -> None:
        """Engines number them behind the id of the reply; choices count through all of them. W6."""
        for prompt in range(3):
            for n in range(2):
                request = f"cmpl-1-{prompt}"
                add(store, root(f"{prompt}.{n}", request_id=request, sample_index=n))
        assert store.update(KEY, sample_ids=["cmpl-1"], reward=0.0) == (6, [])
        assert store.update(KEY, sample_ids=[("cmpl-1", 3)], reward=1.0) == (1, [])
        assert [each.id for each in held(store) if each.reward == 1.0] == ["1.1"]

    def test_names_that_stand_for_no_generation_are_told(self, store: RecordStore) -> None:
        """The others are done; a name is looked for in its own run."""
        add(store, root("a", request_id="r"), root("b", OTHER))
        found = store.update(KEY, sample_ids=["b", "a", "absent", ("r", 7)], reward=1.0)
        assert found == (1, ["b", "absent", ("r", 7)])
        assert [record.reward for record in held(store)] == [1.0, None]
        nowhere = RecordKey("7", "sum", 2)
        assert store.update(nowhere, sample_ids=["a"], reward=1.0) == (0, ["a"])

    def test_a_reward_for_no_name_reaches_none(self, store: RecordStore) -> None:
        """An empty selection is not the selection of all."""
        add(store, root())
        assert store.update(KEY, sample_ids=[], reward=1.0) == (0, [])
        assert (run_of(store).reward, run_of(store).rewarded) == (None, 0)

    def test_info_is_merged_and_the_reward_kept(self, store: RecordStore) -> None:
        """A later value of a name replaces the earlier one; of the run, and of a generation."""
        add(store, root("a", info={"env": "math", "try": 1}))
        store.update(KEY, reward=1.0, info={"env": "code", "try": 1})
        store.update(KEY, info={"try": 2, "note": None})
        store.update(KEY, sample_ids=["a"], info={"try": 3})
        run = run_of(store)
        assert (run.reward, run.info) == (1.0, {"env": "code", "try": 2, "note": None})
        assert run.records["a"].info == {"env": "math", "try": 3}

    def test_info_of_a_run_is_kept_once(self, store: RecordStore) -> None:
        """However many records the run has. S15."""
        add(store, *(root(f"r{number}") for number in range(50)))
        bare = store.stats().bytes
        store.update(KEY, info={"notes": "x" * 100_000})
        assert store.stats().bytes - bare < 10 * 100_000
        assert all(record.info == {} for record in held(store))

    def test_a_token_level_reward_is_stored_as_float32(self, store: RecordStore) -> None:
        """One value per response token."""
        add(store, root(tokens=3))
        assert store.update(KEY, token_level_reward=[0.0, 0.25, 1.0]).records == 1
        stored = held(store)[0].token_level_reward
        assert stored is not None
        assert stored.dtype == np.float32
        assert stored.tolist() == [0.0, 0.25, 1.0]

    def test_an_update_that_does_not_fit_one_record_changes_none(self, store: RecordStore) -> None:
        """Three values fit the root's three tokens and not the child's two."""
        first = root("a", tokens=3)
        add(store, first, child(first, "b"))
        for sample_ids in (None, ["a", "b"]):
            with pytest.raises(ValueError, match="3 values"):
                store.update(
                    KEY,
                    sample_ids=sample_ids,
                    reward=1.0,
                    info={"x": 1},
                    token_level_reward=[0.1, 0.2, 0.3],
                )
        assert held(store) == [first, child(first, "b")]
        assert (run_of(store).reward, run_of(store).info) == (None, {})

    @pytest.mark.parametrize("reward", [float("nan"), float("inf")], ids=str)
    @pytest.mark.parametrize("sample_ids", [None, ["root"]], ids=["the run", "a generation"])
    def test_a_reward_that_is_no_number_is_refused(
        self, store: RecordStore, reward: float, sample_ids: list[str] | None
    ) -> None:
        """And changes nothing."""
        add(store, root())
        with pytest.raises(ValueError, match="finite"):
            store.update(KEY, sample_ids=sample_ids, reward=reward, info={"x": 1})
        assert run_of(store).rewarded == 0
        assert (run_of(store).info, held(store)) == ({}, [root()])

    def test_a_reward_for_a_run_that_nobody_knows_is_not_kept(self, store: RecordStore) -> None:
        """It updates 0, which is no error."""
        assert store.update(KEY, reward=1.0) == (0, [])
        assert store.keys(ALL) == []
        add(store, root())
        assert run_of(store).reward is None

    def test_a_reward_before_the_first_generation_ends_is_the_runs(
        self, store: RecordStore
    ) -> None:
        """Where one is in flight, the run is known. S3."""
        store.watch(lambda key: key == KEY)
        store.update(KEY, reward=1.0, info={"x": 1})
        store.update(OTHER, reward=1.0)
        assert store.update(KEY, sample_ids=["a"], reward=0.0) == (0, ["a"])
        add(store, root("a"), root("b", OTHER))
        assert [run.reward for run in store.get(ALL)] == [1.0, None]
        assert run_of(store).info == {"x": 1}

    def test_what_is_dropped_of_a_run_is_told_with_it(self, store: RecordStore) -> None:
        """By reason: by `get`, `keys` and `drain`. S1."""
        add(store, root("a"), root("b", OTHER))
        for reason in (DropReason.QUEUE_FULL, DropReason.ERROR, DropReason.ERROR):
            store.note_dropped(KEY, reason)
        expected = [{"queue_full": 1, "error": 2}, {}]
        assert [run.missing for run in store.get(ALL)] == expected
        assert [summary.missing for summary in store.keys(ALL)] == expected
        assert [run.missing for run in drain(store).runs] == expected

    def test_a_run_whose_first_turn_is_dropped_says_so(self, store: RecordStore) -> None:
        """Also before any other turn is recorded. S1."""
        store.note_dropped(KEY, DropReason.LOST)
        (summary,) = store.keys(ALL)
        assert (summary.records, summary.missing) == (0, {"lost": 1})
        add(store, root("a"))
        assert run_of(store).missing == {"lost": 1}

    def test_what_was_no_turn_is_not_missing(self, store: RecordStore) -> None:
        """A refused request does not cut a run: it is kept by reason, and begins none. S1."""
        store.note_dropped(KEY, DropReason.REJECTED)
        assert store.keys(ALL) == []
        add(store, root("a"))
        store.note_dropped(KEY, DropReason.REJECTED)
        assert (run_of(store).dropped, run_of(store).missing) == ({"rejected": 1}, {})

    def test_what_is_dropped_under_a_blocked_prefix_begins_no_run(self, store: RecordStore) -> None:
        """Late generations of an aborted batch leave nothing behind."""
        store.block(KeyPrefix("7"))
        store.note_dropped(KEY, DropReason.LOST)
        assert store.keys(ALL) == []

    @pytest.mark.parametrize("whole", [True, False], ids=["key", "prefix"])
    def test_what_is_blocked_takes_no_more_records(self, store: RecordStore, whole: bool) -> None:
        """What is there stays, and says that it is closed; others are not concerned."""
        add(store, root("early"))
        store.block(KEY if whole else KeyPrefix("7/sum"))
        assert store.add(root("late")) is AddOutcome.BLOCKED
        add(store, root("other", RecordKey("70", "sum", 0)))
        assert names(held(store)) == ["early", "other"]
        assert store.stats().counters["blocked"] == 1
        assert [run.closed for run in store.get(ALL)] == [True, False]
        assert [summary.closed for summary in store.keys(ALL)] == [True, False]
        assert [run.closed for run in drain(store).runs] == [True, False]

    def test_a_blocked_run_can_still_be_rewarded(self, store: RecordStore) -> None:
        """Where it is there; it is not begun."""
        store.watch(lambda key: 1)
        add(store, root("early"))
        store.block(ALL)
        assert store.update(KEY, reward=1.0).records == 1
        assert store.update(OTHER, reward=1.0) == (0, [])
        assert [run.reward for run in store.get(ALL)] == [1.0]

    @pytest.mark.parametrize("prefix", ["", "7", "7/sum", "7/sum/0"])
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
        third = RecordKey("7", "sum", 10)
        add(store, root("m", third), first, child(first, "b"), root("n", OTHER))
        store.update(KEY, sample_ids=["b"], reward=0.0)
        store.update(third, reward=2.0)
        found = store.keys(ALL)
        assert [(str(each.key), each.records, each.rewarded, each.reward) for each in found] == [
            ("7/sum/0", 2, 1, None),
            ("7/sum/1", 1, 0, None),
            ("7/sum/10", 1, 1, 2.0),
        ]
        assert sum(each.bytes for each in found) == store.stats().bytes
        assert all(0 <= each.age_s < 60 for each in found)

    @pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
    def test_keys_are_told_page_by_page(self, store: RecordStore, limit: int) -> None:
        """Each once, in the order of the keys, whatever the size of a page."""
        for run in (3, 10, 1, 9, 2):
            for batch in ("a", "b"):
                add(store, root("r", RecordKey(batch, "sum", run)))
        seen: list[RecordKey] = []
        while page := store.keys(ALL, after=seen[-1] if seen else None, limit=limit):
            assert len(page) <= limit
            seen += [each.key for each in page]
        assert seen == [RecordKey(b, "sum", run) for b in ("a", "b") for run in (1, 2, 3, 9, 10)]
        left = store.keys(KeyPrefix("b"), after=RecordKey("b", "sum", 9))
        assert [each.key.run for each in left] == [10]

    def test_a_sweep_deletes_what_nothing_was_added_to_for_long(self, store: RecordStore) -> None:
        """A reward is no addition."""
        live = root("live", OTHER)
        add(store, root("dead"), live)
        time.sleep(0.4)
        store.update(KEY, reward=1.0)
        add(store, child(live, "new"))
        assert store.sweep(0.3) == 1
        assert names(held(store)) == ["live", "new"]
        assert store.sweep(LONG_S) == 0

    def test_a_sweep_cuts_no_run(self, store: RecordStore) -> None:
        """One that has something in flight stays; one that goes on says what it lacks. S1."""
        store.watch(lambda key: key == KEY)
        add(store, root("a"), root("b", OTHER))
        time.sleep(0.1)
        assert store.sweep(0.05) == 1
        add(store, root("c"), root("d", OTHER))
        assert [run.missing for run in store.get(ALL)] == [{}, {"evicted": 1}]
