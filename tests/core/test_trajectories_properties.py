"""The prefix rule, for any forest of generations that an engine could make."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recorder_core import Forest, Record, VersionSpan, assemble
from recorder_core.runs import merged_by_key
from tests.core.builders import Generation, expert, forests, ids, record_all


@given(forests())
def test_each_trajectory_reproduces_what_the_engine_saw(generations: list[Generation]) -> None:
    by_id = {each.id: each for each in generations}
    for experience in assemble(record_all(generations).records):
        last = by_id[experience.eid.suffix]
        first = by_id[experience.turns[0].record_id]
        assert experience.tokens.tolist() == list(last.path)
        assert experience.prompt_length == len(first.prompt)
        assert experience.eid.step == len(experience.turns) - 1
        assert experience.adapter == last.fields["adapter"]
        assert experience.multi_modal_inputs == last.fields["multi_modal"]
        for turn in experience.turns:
            generation = by_id[turn.record_id]
            end = experience.prompt_length + turn.end
            assert generation.path == last.path[:end]
            assert turn.end - turn.start == len(generation.response)


@given(forests())
def test_a_run_tells_the_whole_prompt_and_path_of_each_generation(
    generations: list[Generation],
) -> None:
    recording = record_all(generations)
    for generation in generations:
        record = next(each for each in recording.records if each.id == generation.id)
        run = merged_by_key(recording.records)[0]
        assert run.prompt_ids(record).tolist() == list(generation.prompt)
        for begin in (0, record.start, len(generation.prompt)):
            assert run.token_ids(record, begin).tolist() == list(generation.path[begin:])


@given(forests())
def test_every_sampled_token_is_trained_once_with_its_own_logprob(
    generations: list[Generation],
) -> None:
    records = record_all(generations).records
    superseded = {record.id for record in Forest(records).superseded}
    trained: dict[str, int] = defaultdict(int)
    by_id = {each.id: each for each in generations}
    for experience in assemble(records):
        mask, logprobs = experience.action_mask, experience.logprobs
        assert mask is not None
        assert logprobs is not None
        sampled = np.zeros(len(mask), dtype=bool)
        for turn in experience.turns:
            span = slice(turn.start, turn.end)
            sampled[span] = True
            expected = by_id[turn.record_id].fields["logprobs"]
            if expected is None:
                assert np.isnan(logprobs[span]).all()
            else:
                assert logprobs[span].tolist() == expected.tolist()
            assert mask[span].all() or not mask[span].any()
            trained[turn.record_id] += int(mask[span].sum())
        assert np.isnan(logprobs[~sampled]).all()
        assert not mask[~sampled].any()
    assert trained == {
        each.id: len(each.response) for each in generations if each.id not in superseded
    }


@given(forests())
def test_versions_and_routed_experts_stay_with_their_tokens(generations: list[Generation]) -> None:
    by_id = {each.id: each for each in generations}
    for experience in assemble(record_all(generations).records):
        spans = [
            VersionSpan(turn.start + start, turn.start + end, version)
            for turn in experience.turns
            for start, end, version in by_id[turn.record_id].fields["versions"]
        ]
        assert list(experience.model_versions) == spans
        last = by_id[experience.eid.suffix]
        if last.routed_dtype is not None:
            assert experience.routed_experts is not None
            assert experience.routed_experts.valid is None
            assert experience.routed_experts.data[:, 0, 0].tolist() == [
                expert(last.path[: row + 1]) for row in range(len(last.path) - 1)
            ]


@given(forests())
def test_each_sampled_token_has_the_ids_that_it_was_drawn_from(
    generations: list[Generation],
) -> None:
    """And what nobody sampled has none.

    M13.
    """
    by_id = {each.id: each for each in generations}
    for experience in assemble(record_all(generations).records):
        expected: list[list[int]] = [[] for _ in range(experience.response_length)]
        found = [by_id[turn.record_id].fields["sampling_mask"] for turn in experience.turns]
        for turn, mask in zip(experience.turns, found, strict=True):
            if mask is not None:
                expected[turn.start : turn.end] = mask.tolist()
        if all(mask is None for mask in found):
            assert experience.sampling_mask is None
        else:
            assert experience.sampling_mask is not None
            assert experience.sampling_mask.tolist() == expected


@given(st.data())
def test_the_order_of_records_does_not_matter(data: st.DataObject) -> None:
    records = record_all(data.draw(forests())).records
    shuffled = data.draw(st.permutations(records))
    assert assemble(shuffled) == assemble(records)
    assert assemble(shuffled + records) == assemble(records)
    assert assemble(shuffled, keep_superseded=True) == assemble(records, keep_superseded=True)


@given(st.data())
def test_any_part_of_a_run_is_linked_as_the_recorder_linked_it(data: st.DataObject) -> None:
    """In every order, with and without what ended later. S4."""
    recording = record_all(data.draw(forests()))
    stored = {each.id: each.parent for each in recording.records}
    by_id = {each.id: each for each in recording.records}
    chosen: dict[str, Record] = {}
    for each in data.draw(st.lists(st.sampled_from(recording.records), unique_by=lambda r: r.id)):
        needed: list[Record] = [each]
        while needed:
            record = needed.pop()
            chosen[record.id] = record
            needed += [by_id[name] for name in (record.parent, record.base) if name]
    part = data.draw(st.permutations(list(chosen.values())))
    assert Forest(part).parents() == {name: stored[name] for name in chosen}
    whole = Forest(data.draw(st.permutations(recording.records)))
    assert whole.parents() == stored
    assert {each.id for each in whole.superseded} == set(recording.superseded)


@given(st.data())
def test_several_processes_assemble_like_one(data: st.DataObject) -> None:
    generations = data.draw(forests())
    process_of = {each.id: data.draw(st.integers(0, 2)) for each in generations}
    union = [
        record
        for process in range(3)
        for record in record_all(
            each for each in generations if process_of[each.id] == process
        ).records
    ]
    assert _shown(union) == _shown(record_all(generations).records)


def _shown(records: list[Record]) -> list[Any]:
    """Trajectories but for how their records are kept: whole, or after a parent or base."""
    return [
        each.replace(turns=tuple((turn.start, turn.end, turn.record_id) for turn in each.turns))
        for each in assemble(records)
    ]


@given(forests())
def test_a_retry_never_takes_the_last_answer_to_a_prompt(generations: list[Generation]) -> None:
    def request(each: Generation) -> tuple[object, ...]:
        return each.prompt, *each.stream, each.fields["sample_index"]

    records = record_all(generations).records
    superseded = {record.id for record in Forest(records).superseded}
    kept = [request(each) for each in generations if each.id not in superseded]
    assert all(request(each) in kept for each in generations)


@given(forests())
def test_an_answer_that_was_delivered_is_never_superseded(generations: list[Generation]) -> None:
    """Nor one of which nobody knows. M1."""
    for record in Forest(record_all(generations).records).superseded:
        assert record.delivered is False or record.finish_reason in ("abort", "error")


def _images_before(generation: Generation, length: int) -> tuple[object, ...]:
    adapter, images = generation.stream
    return adapter, tuple(image for image in images if image.offset < length)


@given(forests(max_size=16))
def test_the_parent_is_the_longest_earlier_path_that_the_prompt_begins_with(
    generations: list[Generation],
) -> None:
    recording = record_all(generations)
    expected_breaks = 0
    for number, (generation, record) in enumerate(zip(generations, recording.records, strict=True)):
        earlier = [
            other
            for other in generations[:number]
            if other.stream == _images_before(generation, len(other.path))
            and generation.prompt[: len(other.path)] == other.path
            and other.fields["finished_at"] <= generation.fields["created_at"]
        ]
        # Of equal paths the one that ended last.
        parent = max(reversed(earlier), key=lambda other: len(other.path), default=None)
        assert record.parent == (parent.id if parent else None)
        assert record.start >= (len(parent.path) if parent else 0)
        assert record.prompt_ids.tolist() == list(generation.prompt[record.start :])
        above = len(parent.path) if parent else 0
        expected_breaks += any(
            above <= len(other.prompt) < len(generation.prompt)
            and generation.prompt[: len(other.prompt)] == other.prompt
            and _images_before(other, len(other.prompt))
            == _images_before(generation, len(other.prompt))
            for other in generations[:number]
        ) or (
            parent is None
            and any(
                other.fields["adapter"] != generation.fields["adapter"]
                and generation.prompt[: len(other.path)] == other.path
                and other.stream[1] == _images_before(generation, len(other.path))[1]
                for other in generations[:number]
            )
        )
    assert recording.prefix_breaks == expected_breaks


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.data())
def test_one_changed_token_is_another_prefix(tokens: list[int], data: st.DataObject) -> None:
    recording = record_all([])
    recording.turn(tokens, [5])
    paths = recording.paths
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 2**31 - 1).filter(lambda value: value != tokens[at]))
    changed = [*tokens[:at], other, *tokens[at + 1 :]]
    assert paths.place(ids([*tokens, 5, 6]), ids([7]), created_at=1).parent == "0"
    assert paths.place(ids([*changed, 5, 6]), ids([7]), created_at=1).parent is None
