"""The contract on leases: runs handed out under a name, until they are safe or come back."""

from __future__ import annotations

import pytest

from recorder_core.drops import DropReason
from recorder_core.errors import LeaseError
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.keytree import Selection
from recorder_core.stores.base import AddOutcome, RecordStore
from recorder_core.stores.testing.given import (
    ALL,
    KEY,
    LONG_S,
    OTHER,
    SHORT_S,
    GivenStore,
    add,
    child,
    drain,
    held,
    names,
    root,
    run_of,
    run_out,
)


class LeasesContract(GivenStore):
    """What every store keeps of what it hands out."""

    def test_a_drain_hands_everything_out_once(self, store: RecordStore) -> None:
        """Keys in order, parents first, rewards and all."""
        first = root("a")
        second = child(first, "b", reward=1.0)
        add(store, root("m", OTHER), first, second)
        store.update(OTHER, reward=2.0, info={"env": "math"})
        expected = store.get(ALL)
        lease = store.drain(ALL, "mine", LONG_S)
        assert (lease.id, lease.lease_s, lease.more) == ("mine", LONG_S, False)
        assert lease.runs == expected
        assert lease.records == [first, second, root("m", OTHER)]
        assert store.drain(ALL, "another", LONG_S).runs == []

    @pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan")])
    def test_a_lease_of_no_time_is_refused(self, store: RecordStore, lease_s: float) -> None:
        """Its records would be back before they arrive."""
        add(store, root())
        with pytest.raises(ValueError, match="lease_s"):
            store.drain(ALL, "mine", lease_s)
        assert names(held(store)) == ["root"]
        store.drain(ALL, "mine", LONG_S)
        with pytest.raises(ValueError, match="lease_s"):
            store.extend("mine", lease_s)

    def test_leased_records_are_out_of_sight(self, store: RecordStore) -> None:
        """They are counted as leased, and their bytes are still held."""
        add(store, root())
        before = store.stats().bytes
        drain(store)
        assert store.get(ALL) == []
        assert store.keys(ALL) == []
        assert store.epoch(KEY) == 0
        assert store.update(KEY, reward=1.0) == (0, [])
        assert store.update(KEY, sample_ids=["root"], reward=1.0) == (0, ["root"])
        assert store.sweep(0.0) == 0
        assert store.add(child(root(), "c")) is AddOutcome.NO_PARENT
        stats = store.stats()
        assert (stats.keys, stats.records, stats.leases, stats.leased_records) == (0, 0, 1, 1)
        assert stats.bytes == before

    def test_a_drain_whose_reply_was_lost_is_asked_again(self, store: RecordStore) -> None:
        """The same name gives the same runs, whatever was added since. S7."""
        add(store, root("a"), root("b", OTHER))
        lease = store.drain(ALL, "mine", LONG_S)
        add(store, root("later"))
        again = store.drain(ALL, "mine", LONG_S)
        assert (again.id, again.runs, again.more) == (lease.id, lease.runs, lease.more)
        assert store.ack("mine") == 2
        assert names(held(store)) == ["later"]

    def test_an_empty_answer_stays_empty(self, store: RecordStore) -> None:
        """Else what the first reply did not hold would be acknowledged with it."""
        assert store.drain(ALL, "mine", LONG_S).runs == []
        add(store, root())
        assert store.drain(ALL, "mine", LONG_S).runs == []
        assert store.ack("mine") == 0
        assert names(held(store)) == ["root"]

    def test_asking_again_begins_the_time_anew(self, store: RecordStore) -> None:
        """So a slow reply can be waited for."""
        add(store, root())
        store.drain(ALL, "mine", SHORT_S)
        run_out(store.drain(ALL, "other", SHORT_S))
        add(store, root("b"))
        assert len(store.drain(ALL, "longer", SHORT_S).records) == 2
        lease = store.drain(ALL, "longer", LONG_S)
        assert len(lease.records) == 2
        assert lease.lease_s == LONG_S
        run_out(store.drain(ALL, "other", SHORT_S))
        assert store.ack("longer") == 2

    @pytest.mark.parametrize("where", [KeyPrefix("7"), KEY, KeyPrefix(str(KEY))], ids=repr)
    def test_a_name_stands_for_one_selection(self, store: RecordStore, where: Selection) -> None:
        """A name given twice by mistake is told, and hands nothing out."""
        add(store, root())
        store.drain(ALL, "mine", LONG_S)
        add(store, root("b"))
        with pytest.raises(LeaseError, match="mine"):
            store.drain(where, "mine", LONG_S)
        assert names(held(store)) == ["b"]
        assert store.ack("mine") == 1

    def test_an_acknowledged_name_is_used_up(self, store: RecordStore) -> None:
        """A drain repeated too late must not take what came since."""
        add(store, root())
        store.drain(ALL, "mine", LONG_S)
        store.ack("mine")
        add(store, root("b"))
        with pytest.raises(LeaseError, match="mine"):
            store.drain(ALL, "mine", LONG_S)
        with pytest.raises(LeaseError, match="mine"):
            store.extend("mine", LONG_S)
        assert store.release("mine") == 0
        assert names(held(store)) == ["b"]

    def test_an_acknowledged_lease_is_forgotten_for_good(self, store: RecordStore) -> None:
        """Acknowledging it again is no error."""
        add(store, root("a"), root("b", OTHER))
        lease = drain(store, lease_s=SHORT_S)
        assert store.ack(lease.id) == 2
        assert store.ack(lease.id) == 0
        run_out(lease)
        assert store.get(ALL) == []
        assert store.ack(lease.id) == 0
        stats = store.stats()
        assert (stats.bytes, stats.leases, stats.leased_records) == (0, 0, 0)

    def test_leases_are_acknowledged_one_by_one(self, store: RecordStore) -> None:
        """Acknowledging one leaves the other."""
        add(store, root("a"), root("b", OTHER))
        first, second = drain(store, KEY), drain(store, OTHER)
        assert store.stats().leases == 2
        assert store.ack(first.id) == 1
        assert store.release(second.id) == 1
        assert names(held(store)) == ["b"]

    def test_released_records_are_back_at_once(self, store: RecordStore) -> None:
        """Releasing what is not open is no error; the name can be used again."""
        add(store, root("a"), root("b", OTHER))
        expected = store.get(ALL)
        store.drain(ALL, "mine", LONG_S)
        assert store.release("mine") == 2
        assert store.release("mine") == 0
        assert store.release("no-such-lease") == 0
        assert store.get(ALL) == expected
        assert store.stats().counters["returned"] == 2
        with pytest.raises(LeaseError):
            store.ack("mine")
        assert store.drain(KEY, "mine", LONG_S).runs == expected[:1]

    def test_records_come_back_with_their_rewards_when_the_lease_runs_out(
        self, store: RecordStore
    ) -> None:
        """The trainer died: the next drain gets the same runs."""
        first = root("a", info={"env": "math"})
        add(store, first, child(first, "b", reward=0.5))
        store.update(KEY, reward=0.75, info={"x": 1})
        store.note_dropped(KEY, DropReason.LOST)
        lease = drain(store, lease_s=SHORT_S)
        run_out(lease)
        assert store.get(ALL) == lease.runs
        assert store.update(KEY, reward=1.0).records == 2
        assert store.stats().counters["returned"] == 2
        with pytest.raises(LeaseError):
            store.ack(lease.id)
        with pytest.raises(LeaseError):
            store.extend(lease.id, LONG_S)
        assert names(held(store)) == ["a", "b"]

    def test_an_extended_lease_lasts_longer(self, store: RecordStore) -> None:
        """And may be made shorter again."""
        add(store, root("a"), root("b", OTHER))
        longer = drain(store, KEY, SHORT_S)
        shorter = drain(store, OTHER, LONG_S)
        store.extend(longer.id, LONG_S)
        store.extend(shorter.id, SHORT_S)
        run_out(longer)
        assert names(held(store)) == ["b"]
        assert store.ack(longer.id) == 1

    @pytest.mark.parametrize("name", ["no-such-lease", "", "mine\N{SNOWMAN}"])
    def test_an_unknown_lease_cannot_be_acknowledged(self, store: RecordStore, name: str) -> None:
        """Nor extended."""
        with pytest.raises(LeaseError):
            store.ack(name)
        with pytest.raises(LeaseError):
            store.extend(name, LONG_S)

    def test_a_run_that_goes_on_while_it_is_leased_comes_together_again(
        self, store: RecordStore
    ) -> None:
        """Parents first; the later reward and notes; all that is missing. S1."""
        first = root("a")
        add(store, first, child(first, "b"))
        store.update(KEY, reward=0.0, info={"x": 1, "y": 1})
        store.note_dropped(KEY, DropReason.LOST)
        lease = drain(store)
        later = root("c", tokens=5)
        add(store, later, child(later, "d"))
        assert run_of(store).reward is None
        store.update(KEY, reward=1.0, info={"y": 2})
        store.note_dropped(KEY, DropReason.LOST)
        store.note_dropped(KEY, DropReason.ERROR)
        store.release(lease.id)
        run = run_of(store)
        found = names(run.records.values())
        assert sorted(found) == ["a", "b", "c", "d"]
        assert found.index("a") < found.index("b")
        assert found.index("c") < found.index("d")
        assert (run.reward, run.info) == (1.0, {"x": 1, "y": 2})
        assert run.missing == {"lost": 2, "error": 1}
        assert names(lease.records) == ["a", "b"]

    def test_what_came_back_keeps_its_reward_where_no_other_was_given(
        self, store: RecordStore
    ) -> None:
        """A run goes on while it is leased, and has the run's reward when it is whole again. S3."""
        add(store, root("a"))
        store.update(KEY, reward=1.0)
        lease = drain(store)
        add(store, root("b"))
        store.release(lease.id)
        assert (run_of(store).reward, run_of(store).rewarded) == (1.0, 2)

    def test_parts_of_a_run_in_several_leases_come_together(self, store: RecordStore) -> None:
        """In whatever order they come back."""
        leases = []
        for name in ("a", "b", "c"):
            add(store, root(name))
            leases.append(drain(store))
        for lease in (leases[1], leases[0], leases[2]):
            assert store.release(lease.id) == 1
        assert sorted(names(held(store))) == ["a", "b", "c"]
        assert [summary.records for summary in store.keys(ALL)] == [3]

    def test_what_was_handed_out_does_not_change_any_more(self, store: RecordStore) -> None:
        """It may still be on its way to the trainer when the lease runs out and the run goes on."""
        first = root("a")
        add(store, first)
        lease = drain(store)
        store.release(lease.id)
        add(store, child(first, "b"))
        store.update(KEY, reward=1.0)
        assert names(lease.records) == ["a"]
        assert lease.runs[0].reward is None

    @pytest.mark.parametrize("max_bytes", [1, 3_000, 10_000, 10**9])
    def test_pages_cover_everything_once(self, store: RecordStore, max_bytes: int) -> None:
        """Whole runs, each at most so large, but at least one run."""
        keys = [RecordKey("7", "sum", run) for run in range(23)]
        for run, key in enumerate(keys):
            first = root("a", key, tokens=1 + 40 * (run % 3))
            add(store, first, *(child(first, f"c{n}") for n in range(run % 4)))
        sizes = {summary.key: summary.bytes for summary in store.keys(ALL)}
        records = store.stats().records
        pages = []
        while True:
            pages.append(drain(store, max_bytes=max_bytes))
            if not pages[-1].more:
                break
        assert [run.key for page in pages for run in page.runs] == keys
        assert sum(len(page.records) for page in pages) == records
        for page in pages:
            assert page.runs
            assert len(page.runs) == 1 or sum(sizes[run.key] for run in page.runs) <= max_bytes
        assert (len(pages) == 1) == (max_bytes == 10**9)
        assert sum(store.ack(page.id) for page in pages) == records

    def test_a_page_asked_again_is_the_same_page(self, store: RecordStore) -> None:
        """With what it said of further ones. S7."""
        add(store, root("a"), root("b", OTHER))
        for _ in range(2):
            lease = store.drain(ALL, "page 1", LONG_S, 1)
            assert (names(lease.records), lease.more) == (["a"], True)
        lease = store.drain(ALL, "page 2", LONG_S, 1)
        assert (names(lease.records), lease.more) == (["b"], False)

    def test_pages_of_so_many_runs_cover_everything_once(self, store: RecordStore) -> None:
        """To hand out a page costs no more than the page. S7."""
        keys = [RecordKey.parse(f"{run % 3}/sum/{run}") for run in range(23)]
        add(store, *(root("a", key) for key in keys))
        for where, count in ((KeyPrefix("1"), 8), (ALL, 15)):
            found: list[RecordKey] = []
            more = True
            while more:
                page = store.drain(where, f"{where} {len(found)}", LONG_S, max_runs=4)
                assert page.runs == sorted(page.runs, key=lambda run: run.key)
                found += [run.key for run in page.runs]
                more = page.more
                assert len(page.runs) == 4 or not more
            assert len(found) == len(set(found)) == count
        assert store.keys(ALL) == []
