"""A run's forest in brief: it says what `assemble` says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given

from recorder_core import Experience, FinishReason, Run, assemble
from recorder_core.errors import NothingRecordedError
from recorder_core.trajectories import Forest
from recorder_core.view.forest import ForestView, forest_of, leaf_arrays
from tests.core.builders import KEY, Generation, Recording, forests, record_all


def spelled(ranges: list[tuple[int, int]]) -> Iterator[int]:
    for start, end in ranges:
        yield from range(start, end)


def masks(view: ForestView) -> dict[str, list[int]]:
    return {leaf.id: list(spelled(leaf.mask)) for leaf in view.leaves if not leaf.superseded}


def mask_of(experience: Experience) -> list[int]:
    return [experience.prompt_length + int(at) for at in np.flatnonzero(experience.action_mask)]


@given(forests())
def test_leaves_masks_versions_and_superseded_are_those_that_a_trainer_gets(
    generations: list[Generation],
):
    recording = record_all(generations)
    run = Run(KEY, recording.records)
    view, experiences = forest_of(run), assemble([run])
    assert masks(view) == {each.eid.suffix: mask_of(each) for each in experiences}
    trained = {leaf.id: leaf for leaf in view.leaves}
    for each in experiences:
        leaf = trained[each.eid.suffix]
        begin = each.prompt_length
        assert [span.version for span in leaf.versions] == [s.version for s in each.model_versions]
        assert [span.start - begin for span in leaf.versions] == [
            s.start for s in each.model_versions
        ]
        assert [turn.id for turn in leaf.turns] == [turn.record.id for turn in each.turns]
        assert leaf.reward == each.reward
    forest = Forest([run])
    assert {each.id for each in view.records if each.superseded} == {
        record.id for record in forest.superseded
    }
    assert {each.id: each.parent for each in view.records} == forest.parents()
    assert sum(each.prefix_break for each in view.records) == recording.prefix_breaks


@given(forests())
def test_every_generation_is_trained_in_the_leaf_that_says_so(generations: list[Generation]):
    run = Run(KEY, record_all(generations).records)
    view = forest_of(run)
    for record in view.records:
        leaves = [
            leaf.id
            for leaf in view.leaves
            for turn in leaf.turns
            if turn.id == record.id and set(range(turn.start, turn.end)) <= set(spelled(leaf.mask))
        ]
        assert leaves == ([] if record.trained_in is None else [record.trained_in])
        assert (record.trained_in is None) == record.superseded


@given(forests(max_size=6))
def test_the_arrays_of_a_leaf_are_its_ids_and_logprobs(generations: list[Generation]):
    run = Run(KEY, record_all(generations).records)
    for each in assemble([run], keep_superseded=True):
        content = leaf_arrays(run, each.eid.suffix)
        count = len(content) // 8
        assert np.frombuffer(content, "<i4", count).tolist() == each.tokens.tolist()
        logprobs = np.frombuffer(content, "<f4", offset=4 * count)
        assert np.isnan(logprobs[: each.prompt_length]).all()
        np.testing.assert_array_equal(logprobs[each.prompt_length :], each.logprobs)


def test_a_broken_prefix_is_said_where_it_is():
    recording = Recording()
    first = recording.turn([1, 2], [3, 4])
    again = recording.turn([1, 2, 9, 5], [6])
    apart = recording.turn([8], [6])
    view = forest_of(Run(KEY, recording.records))
    assert {each.id: each.prefix_break for each in view.records} == {
        first.id: False,
        again.id: True,
        apart.id: False,
    }


def test_a_retried_answer_is_shown_and_not_trained():
    recording = Recording()
    lost = recording.turn([1], [2], finish_reason=FinishReason.ABORT, delivered=False)
    kept = recording.turn([1], [3], attempt=1)
    view = forest_of(Run(KEY, recording.records))
    assert [(leaf.id, leaf.trained, leaf.superseded) for leaf in view.leaves] == [
        (kept.id, 1, False),
        (lost.id, 0, True),
    ]


def test_a_leaf_that_is_none_is_refused():
    recording = Recording()
    first = recording.turn([1], [2])
    recording.turn([1, 2, 3], [4])
    with pytest.raises(NothingRecordedError, match="it may have gone on"):
        leaf_arrays(Run(KEY, recording.records), first.id)
