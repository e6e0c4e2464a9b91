"""The prefix rule, for any forest of generations that an engine could make."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recorder_core import Forest, ParentIndex, VersionSpan, assemble
from tests.core.builders import Generation, expert, forests, ids, record_all

thorough = settings(max_examples=300, deadline=None)


@thorough
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


@thorough
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


@thorough
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


@thorough
@given(st.data())
def test_the_order_of_records_does_not_matter(data: st.DataObject) -> None:
    records = record_all(data.draw(forests())).records
    shuffled = data.draw(st.permutations(records))
    assert assemble(shuffled) == assemble(records)
    assert assemble(shuffled + records) == assemble(records)
    assert assemble(shuffled, keep_superseded=True) == assemble(records, keep_superseded=True)


@thorough
@given(st.data())
def test_several_processes_assemble_like_one(data: st.DataObject) -> None:
    generations = data.draw(forests())
    arrivals = data.draw(st.permutations(generations))
    process_of = {each.id: data.draw(st.integers(0, 2)) for each in generations}
    union = [
        record
        for process in range(3)
        for record in record_all(
            each for each in arrivals if process_of[each.id] == process
        ).records
    ]
    assert assemble(union) == assemble(record_all(generations).records)


@thorough
@given(forests())
def test_a_retry_never_takes_the_last_answer_to_a_prompt(generations: list[Generation]) -> None:
    def request(each: Generation) -> tuple[object, ...]:
        return each.prompt, *each.stream, each.fields["sample_index"]

    records = record_all(generations).records
    superseded = {record.id for record in Forest(records).superseded}
    kept = [request(each) for each in generations if each.id not in superseded]
    assert all(request(each) in kept for each in generations)


def _images_before(generation: Generation, length: int) -> tuple[object, ...]:
    adapter, images = generation.stream
    return adapter, tuple(image for image in images if image.offset < length)


@thorough
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
        ]
        # Of equal paths the latest.
        parent = max(reversed(earlier), key=lambda other: len(other.path), default=None)
        assert record.parent == (parent.id if parent else None)
        assert record.start == (len(parent.path) if parent else 0)
        assert record.prompt_ids.tolist() == list(generation.prompt[record.start :])
        expected_breaks += any(
            record.start <= len(other.prompt) < len(generation.prompt)
            and generation.prompt[: len(other.prompt)] == other.prompt
            and _images_before(other, len(other.prompt))
            == _images_before(generation, len(other.prompt))
            for other in generations[:number]
        )
    assert recording.prefix_breaks == expected_breaks


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.data())
def test_one_changed_token_is_another_prefix(tokens: list[int], data: st.DataObject) -> None:
    index = ParentIndex()
    recording = record_all([])
    recording.index = index
    recording.turn(tokens, [5])
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 2**31 - 1).filter(lambda value: value != tokens[at]))
    changed = [*tokens[:at], other, *tokens[at + 1 :]]
    assert index.place(ids([*tokens, 5, 6]), ids([7])).parent == "0"
    assert index.place(ids([*changed, 5, 6]), ids([7])).parent is None
