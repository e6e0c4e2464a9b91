"""Runs: which generations a name stands for, what is missing, how parts come together."""

from __future__ import annotations

import pickle

import pytest

from recorder_core import RecordKey
from recorder_core.drops import DropReason
from recorder_core.runs import RUN_BYTES, Run, merged_by_key
from recorder_core.stores.testing import KEY, OTHER, names, root


def run_with(*requests: tuple[str, int]) -> Run:
    """A run of records named as their request and sample, e.g. `chat-1.0`."""
    return Run(KEY, [root(f"{r}.{n}", request_id=r, sample_index=n) for r, n in requests])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("chat.1", ["chat.1"]),
        ("chat", ["chat.0", "chat.1"]),
        (("chat", 1), ["chat.1"]),
        (("chat", 2), []),
        (("chat.1", 0), []),
        ("cha", []),
        ("chat-", []),
        ("", []),
    ],
    ids=repr,
)
def test_a_name_is_a_records_or_a_requests(name, found):
    run = run_with(("chat", 0), ("chat", 1), ("chatter", 0))
    assert names(run.select(name)) == found


@pytest.mark.parametrize("between", ["-", "_"])
def test_the_prompts_of_a_batch_are_one_request(between):
    """The engines number them behind the reply's id. W6."""
    requests = [(f"cmpl{between}{prompt}", n) for prompt in (0, 1, 10) for n in (0, 1)]
    run = run_with(*requests[:4])
    assert len(run.select("cmpl")) == 4
    assert names(run.select(("cmpl", 2))) == [f"cmpl{between}1.0"]
    assert names(run.select(("cmpl", 3))) == [f"cmpl{between}1.1"]
    assert run.select(("cmpl", 4)) == []
    assert len(run_with(*requests).select("cmpl")) == 6


def test_what_is_numbered_otherwise_is_another_request():
    run = run_with(("cmpl-0", 0), ("cmpl-0-1", 0), ("cmpl-a", 0), ("cmpl0", 0), ("cmpl-0_", 0))
    assert names(run.select("cmpl")) == ["cmpl-0.0"]


def test_a_request_is_not_taken_for_a_part_of_one_that_is_there():
    """Clients may choose ids: `step` and `step-1` are two requests, and their rewards differ."""
    run = run_with(("step", 0), ("step-1", 0), ("step-2", 0))
    assert names(run.select("step")) == ["step.0"]
    assert names(run.select(("step", 0))) == ["step.0"]
    assert run.select(("step", 1)) == []
    assert names(run.select("step-1")) == ["step-1.0"]


def test_one_prompt_needs_no_counting():
    """Its choices are its samples, whether or not all are there."""
    run = run_with(("cmpl-0", 0), ("cmpl-0", 2))
    assert names(run.select(("cmpl", 2))) == ["cmpl-0.2"]
    assert run.select(("cmpl", 1)) == []


def test_requests_of_one_id_are_selected_together():
    run = Run(KEY, [root(name, request_id="again") for name in "ab"])
    assert names(run.select("again")) == ["a", "b"]
    assert names(run.select(("again", 0))) == ["a", "b"]


def test_only_what_cuts_a_run_is_missing():
    """S1."""
    run = Run(KEY, dropped={each.value: 2 for each in DropReason}, evicted=3)
    expected = {each.value: 2 for each in DropReason if each.cuts}
    assert run.missing == {**expected, "evicted": 3}
    assert Run(KEY, dropped={"of a later release": 1}).missing == {"of a later release": 1}
    assert Run(KEY).missing == {}


def test_parts_of_a_run_come_together():
    """Counts add up, the later part's values hold, and neither part is changed."""
    first = Run(
        KEY,
        [root("a"), root("b")],
        reward=0.0,
        info={"x": 1, "y": 1},
        dropped={"lost": 1, "error": 1},
        evicted=1,
        pending=1,
    )
    later = Run(KEY, [root("c")], info={"y": 2}, dropped={"lost": 1}, evicted=2, closed=True)
    whole = first.merge(later)
    assert names(whole.records.values()) == ["a", "b", "c"]
    assert (whole.reward, whole.info) == (0.0, {"x": 1, "y": 2})
    assert (whole.dropped, whole.evicted) == ({"lost": 2, "error": 1}, 3)
    assert (whole.pending, whole.closed) == (1, True)
    assert first.merge(Run(KEY, reward=1.0)).reward == 1.0
    assert (len(first.records), first.info, later.reward) == (2, {"x": 1, "y": 1}, None)


def test_runs_and_bare_records_are_put_together_by_key():
    """In the order of the keys; what was given is not changed."""
    tenth = RecordKey("7", "sum", 10)
    run = Run(KEY, [root("a")], reward=1.0)
    found = merged_by_key(
        [root("z", tenth), root("n", OTHER), run, root("b"), root("a"), Run(OTHER, evicted=1)]
    )
    assert [each.key for each in found] == [KEY, OTHER, tenth]
    assert [sorted(each.records) for each in found] == [["a", "b"], ["n"], ["z"]]
    assert [(each.reward, each.evicted) for each in found] == [(1.0, 0), (None, 1), (None, 0)]
    assert list(run.records) == ["a"]


def test_bytes_of_a_run_are_its_own_and_its_records():
    records = [root("a"), root("b", tokens=100)]
    bare = RUN_BYTES + sum(record.nbytes for record in records)
    assert Run(KEY, records).nbytes == bare
    assert Run(KEY, records, info={"note": "x" * 1000}).nbytes > bare + 1000


def test_runs_are_equal_if_all_that_is_known_of_them_is():
    def made(**values):
        return Run(KEY, [root("a")], **{"reward": 1.0, "info": {"x": 1}, **values})

    assert made() == made()
    for values in ({"reward": 0.0}, {"info": {}}, {"dropped": {"lost": 1}}, {"closed": True}):
        assert made() != made(**values)
    assert made() != Run(KEY, [root("a", reward=0.0)], reward=1.0, info={"x": 1})


def test_a_run_is_pickled_with_all_that_is_known_of_it():
    bare = Run(RecordKey.parse("0/t/1"))
    noted = Run(bare.key, info={"env": "math"}, dropped={"error": 2}, evicted=1, reward=0.5)
    assert [pickle.loads(pickle.dumps(run)) for run in (bare, noted)] == [bare, noted]
