"""The prefix rule on cases from the field; the letters are the rows' ids in the list of cases."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import tracemalloc

import numpy as np
import pytest

from recorder_core import (
    Experience,
    FinishReason,
    Forest,
    MultiModalItem,
    Record,
    RecordKey,
    RoutedExperts,
    VersionSpan,
    assemble,
    encode_runs,
)
from recorder_core.errors import MissingParentError, RecorderError
from recorder_core.paths import Paths
from recorder_core.runs import merged_by_key
from tests.core.builders import KEY, Recording, ids, record

BOS, STOP = 1, 2


def paths(experiences: list[Experience]) -> list[list[int]]:
    return [experience.tokens.tolist() for experience in experiences]


def masks(experiences: list[Experience]) -> list[list[bool]]:
    return [experience.action_mask.tolist() for experience in experiences]


# Token identity


def test_the_same_text_in_other_tokens_is_another_trajectory() -> None:  # T1
    recording = Recording()
    recording.turn([10, 11], [53122, 316])
    second = recording.turn([10, 11, 393, 30002, 12], [13])
    assert second.parent is None
    assert recording.prefix_breaks == 1
    assert paths(assemble(recording.records)) == [
        [10, 11, 53122, 316],
        [10, 11, 393, 30002, 12, 13],
    ]


@pytest.mark.parametrize("changed", range(4))
def test_one_changed_token_in_the_history_masks_nothing(changed: int) -> None:  # T2
    recording = Recording()
    recording.turn([10, 11], [20, 21])
    history = [10, 11, 20, 21]
    history[changed] = 99
    recording.turn([*history, 30], [40, 41])
    experiences = assemble(recording.records)
    assert paths(experiences) == [[10, 11, 20, 21], [*history, 30, 40, 41]]
    assert masks(experiences) == [[True, True], [True, True]]


def test_stripped_tool_call_text_leaves_the_ids_alone() -> None:  # T3
    recording = Recording()
    recording.turn([10], [500, 20, 501, STOP], response_text="")
    recording.turn([10, 500, 20, 501, STOP, 30], [40])
    [experience] = assemble(recording.records)
    assert experience.tokens.tolist() == [10, 500, 20, 501, STOP, 30, 40]
    assert experience.action_mask.tolist() == [True, True, True, True, False, True]


def test_the_stop_token_is_a_sampled_token() -> None:  # T4
    recording = Recording()
    recording.turn([10], [20, STOP], stop_reason=STOP, logprobs=[-1.0, -0.25])
    [experience] = assemble(recording.records)
    assert experience.tokens[-1] == STOP
    assert experience.logprobs.tolist() == [-1.0, -0.25]
    assert experience.turns[0].end - experience.turns[0].start == 2
    assert experience.turns[0].stop_reason == STOP


def test_a_doubled_bos_stays_doubled() -> None:  # T5
    recording = Recording()
    recording.turn([BOS, BOS, 10], [20])
    recording.turn([BOS, BOS, 10, 20, 30], [40])
    recording.turn([BOS, 10, 20, 30], [50])
    assert paths(assemble(recording.records)) == [
        [BOS, BOS, 10, 20, 30, 40],
        [BOS, 10, 20, 30, 50],
    ]


def test_a_history_rendered_anew_is_another_trajectory() -> None:  # T6
    spaced, unspaced = [60, 220, 61], [60, 61]
    recording = Recording()
    recording.turn([10], spaced)
    recording.turn([10, *unspaced, 30], [40])
    assert paths(assemble(recording.records)) == [[10, *spaced], [10, *unspaced, 30, 40]]
    assert recording.prefix_breaks == 1


def test_stripped_thinking_gives_one_trajectory_per_rendering() -> None:  # T7
    think, answer = [70, 71, 72], [20, STOP]
    recording = Recording()
    recording.turn([10], [*think, *answer])
    recording.turn([10, *answer, 30], [*think, 21, STOP])
    experiences = assemble(recording.records)
    assert paths(experiences) == [[10, *think, *answer], [10, *answer, 30, *think, 21, STOP]]
    assert all(all(mask) for mask in masks(experiences))


def test_three_siblings_one_continued_are_three_trajectories() -> None:  # T8
    recording = Recording()
    for answer in (20, 21, 22):
        recording.turn([10], [answer])
    recording.turn([10, 21, 30], [40])
    assert paths(assemble(recording.records)) == [[10, 20], [10, 22], [10, 21, 30, 40]]


def test_interleaved_lineages_stay_apart_in_any_interleaving() -> None:  # T9
    lineages = {
        "main": [([10], [20]), ([10, 20, 30], [40])],
        "sub-agent": [([11], [21]), ([11, 21, 31], [41])],
        "after compaction": [([10, 12], [22]), ([10, 12, 22, 32], [42])],
    }
    for order in set(itertools.permutations([name for name in lineages for _ in range(2)])):
        recording, position = Recording(), dict.fromkeys(lineages, 0)
        for name in order:
            prompt, response = lineages[name][position[name]]
            position[name] += 1
            recording.turn(prompt, response)
        assert sorted(paths(assemble(recording.records))) == [
            [10, 12, 22, 32, 42],
            [10, 20, 30, 40],
            [11, 21, 31, 41],
        ]


def test_tokens_between_turns_are_the_engines_own() -> None:  # T10
    end, start, newline = 90, 91, 92
    rendered = [10, 20, end, start, 30]  # the client's template left the newline out
    recording = Recording()
    recording.turn([10], [20, end])
    recording.turn(rendered, [40])
    recording.turn([10, 20, end, newline, start, 30], [50])
    first, second = assemble(recording.records)
    assert first.tokens.tolist() == [*rendered, 40]
    assert first.action_mask.tolist() == [True, True, False, False, True]
    assert second.tokens.tolist() == [10, 20, end, newline, start, 30, 50]
    assert second.action_mask.tolist() == [False, False, False, False, False, True]


def test_tools_matter_only_through_the_tokens_that_they_become() -> None:  # T11
    recording = Recording()
    recording.turn([80, 10], [20])
    recording.turn([80, 10, 20, 30], [40])  # other tools, same tokens
    recording.turn([81, 10, 20, 30], [41])  # the template wrote the tools into the prompt
    assert paths(assemble(recording.records)) == [[80, 10, 20, 30, 40], [81, 10, 20, 30, 41]]


def test_equal_ids_under_two_keys_are_two_experiences() -> None:  # T12
    other = RecordKey("batch", "task", 1)
    twins = [record(request_id="same"), record(request_id="same", key=other)]
    experiences = assemble(twins)
    assert [experience.eid.key for experience in experiences] == [KEY, other]
    assert {experience.eid.suffix for experience in experiences} == {"a"}
    assert masks(experiences) == [[True], [True]]


def test_equal_request_ids_under_one_key_are_two_records() -> None:  # T12
    recording = Recording()
    recording.turn([10], [20], request_id="same")
    recording.turn([10], [21], request_id="same")
    assert paths(assemble(recording.records)) == [[10, 20], [10, 21]]


def test_a_shared_turn_is_trained_in_the_earliest_trajectory_only() -> None:
    recording = Recording()
    recording.turn([10], [20], finished_at=1)
    recording.turn([10, 20, 30], [40], finished_at=9)
    recording.turn([10, 20, 31], [41], finished_at=5)
    experiences = assemble(recording.records)
    assert paths(experiences) == [[10, 20, 31, 41], [10, 20, 30, 40]]
    assert masks(experiences) == [[True, False, True], [False, False, True]]


def test_a_record_from_another_server_joins_its_trajectory() -> None:
    first, second, third = Recording(name="x"), Recording(name="y"), Recording(name="z")
    first.turn([10], [20], finished_at=1)
    second.turn([10, 20, 30], [40], created_at=1, finished_at=2)
    third.turn([10, 20, 30, 40, 50], [60], created_at=2, finished_at=3)
    [experience] = assemble(third.records + first.records + second.records)
    assert experience.tokens.tolist() == [10, 20, 30, 40, 50, 60]
    assert experience.action_mask.tolist() == [True, False, True, False, True]
    assert [turn.record_id for turn in experience.turns] == ["x0", "y0", "z0"]


def test_another_image_behind_the_same_ids_is_another_prompt() -> None:
    def image(identity: str) -> tuple[MultiModalItem, ...]:
        return (MultiModalItem(modality="image", offset=0, length=1, identity=identity),)

    recording = Recording()
    recording.turn([9, 10], [20], multi_modal=image("cat"), finish_reason="abort")
    recording.turn([9, 10], [21], multi_modal=image("dog"))
    recording.turn([9, 10, 20, 30], [40], multi_modal=image("dog"))
    recording.turn([9, 10, 20, 30], [41], multi_modal=image("cat"))
    assert recording.superseded == []
    experiences = assemble(recording.records)
    assert paths(experiences) == [[9, 10, 21], [9, 10, 20, 30, 40], [9, 10, 20, 30, 41]]
    assert [each.multi_modal_inputs[0].identity for each in experiences] == ["dog", "dog", "cat"]


def test_records_without_their_parent_are_refused() -> None:
    recording = Recording()
    recording.turn([10], [20])
    recording.turn([10, 20, 30], [40])
    with pytest.raises(MissingParentError, match="record 1 of batch/task/0 continues record 0"):
        assemble(recording.records[1:])


@pytest.mark.parametrize(
    "forged",
    [
        [record(id="a", parent="a", start=3)],
        [record(id="a", parent="b", start=3), record(id="b", parent="a", start=3)],
        [record(id="a"), record(id="b", parent="a", start=2)],
        [record(id="a"), record(id="b", parent="a", start=0)],
    ],
    ids=["its own parent", "each other's parent", "inside the parent", "before the parent"],
)
def test_links_that_no_recorder_makes_are_refused(forged: list[Record]) -> None:
    with pytest.raises(RecorderError):
        assemble(forged)


# Samples, retries, ends


def test_a_retry_by_header_supersedes_the_first_attempt() -> None:  # A8
    recording = Recording()
    recording.turn([10], [20], attempt=0, delivered=False)
    recording.turn([10], [21], attempt=1)
    assert recording.superseded == ["0"]
    assert paths(assemble(recording.records)) == [[10, 21]]
    assert [each.id for each in Forest(recording.records).superseded] == ["0"]
    assert paths(assemble(recording.records, keep_superseded=True)) == [[10, 20], [10, 21]]


@pytest.mark.parametrize("end", ["abort", "error"])
def test_a_twin_after_an_answer_that_broke_off_supersedes_it(end: str) -> None:  # A8
    recording = Recording()
    recording.turn([10], [20], finish_reason=end)
    recording.turn([10], [21])
    assert recording.superseded == ["0"]
    assert paths(assemble(recording.records)) == [[10, 21]]


def test_each_retry_in_a_chain_supersedes_the_one_before() -> None:  # A8
    recording = Recording()
    recording.turn([10], [20], attempt=0, finish_reason="abort")
    recording.turn([10], [21], attempt=1, delivered=False)
    recording.turn([10], [22], attempt=4)
    assert recording.superseded == ["0", "1"]
    assert paths(assemble(recording.records)) == [[10, 22]]


def test_a_retry_in_the_same_instant_is_the_one_that_counts() -> None:  # A8
    retry = record(id="a", response_ids=[20], attempt=1, finished_at=1)
    first = record(id="b", response_ids=[21], attempt=0, finished_at=2, delivered=False)
    assert [each.id for each in Forest([first, retry]).superseded] == ["b"]


def test_an_absurd_retry_count_costs_no_time() -> None:
    recording = Recording()
    recording.turn([10], [20], delivered=False)
    recording.turn([10], [21], attempt=10**15)
    assert recording.superseded == ["0"]


def test_a_retry_supersedes_one_sibling_only() -> None:  # A8
    recording = Recording()
    recording.turn([10], [20], delivered=False)
    recording.turn([10], [21], delivered=False, created_at=0)
    recording.turn([10], [22], attempt=1)
    assert recording.superseded == ["0"]
    assert paths(assemble(recording.records)) == [[10, 21], [10, 22]]


def test_an_answer_that_was_sent_to_its_end_is_superseded_by_no_retry_count() -> None:
    """An agent that counts 0, 1, 2, 3 un-trains nothing. M1."""
    recording = Recording()
    for attempt in range(4):
        recording.turn([10], [20 + attempt], attempt=attempt, delivered=True)
    assert recording.paths.replaced() == (set(), set())
    assert len(assemble(recording.records)) == 4


def test_where_delivery_is_not_known_a_retry_and_the_earlier_answer_are_both_kept() -> None:
    """M1."""
    recording = Recording()
    recording.turn([10], [20])
    recording.turn([10], [21], attempt=1)
    assert recording.paths.replaced() == (set(), {"1"})
    assert len(assemble(recording.records)) == 2


def test_an_answer_that_was_finished_and_not_delivered_is_superseded_by_a_later_one() -> None:
    """M1."""
    recording = Recording()
    recording.turn([10], [20], delivered=False)
    recording.turn([10], [21], delivered=True)
    assert recording.superseded == ["0"]


def test_each_sample_of_a_retried_request_supersedes_its_own_twin() -> None:  # A8, n > 1
    recording = Recording()
    recording.turn([10], [20], sample_index=0, delivered=False)
    recording.turn([10], [21], sample_index=1, delivered=False)
    recording.turn([10], [22], sample_index=1, attempt=1)
    assert recording.superseded == ["1"]
    recording.turn([10], [23], sample_index=0, attempt=1)
    assert paths(assemble(recording.records)) == [[10, 22], [10, 23]]


def test_siblings_are_no_retries() -> None:  # A8
    recording = Recording()
    for answer in range(20, 24):
        recording.turn([10], [answer])
    assert recording.superseded == []
    assert len(assemble(recording.records)) == 4


def test_siblings_aborted_side_by_side_are_all_kept() -> None:  # A3, V3
    recording = Recording()
    for began in range(4):
        recording.turn(
            [10], [20 + began], finish_reason="abort", created_at=began, finished_at=9 + began / 8
        )
    assert recording.superseded == []
    assert len(assemble(recording.records)) == 4
    for began in range(2):
        recording.turn([10], [30 + began], created_at=10 + began, finished_at=20)
    assert recording.superseded == ["0", "1"]
    assert paths(assemble(recording.records)) == [[10, 22], [10, 23], [10, 30], [10, 31]]


def test_an_answer_that_was_continued_is_never_superseded() -> None:  # A8
    recording = Recording()
    recording.turn([10], [20], finish_reason="abort")
    recording.turn([10, 20], [30])
    recording.turn([10], [21], attempt=1)
    assert recording.superseded == []
    assert paths(assemble(recording.records)) == [[10, 20, 30], [10, 21]]


def test_a_retry_of_a_later_turn_leaves_the_turns_before_it_trained_once() -> None:  # A8
    recording = Recording()
    recording.turn([10], [20])
    recording.turn([10, 20, 30], [40], finish_reason="abort")
    recording.turn([10, 20, 30], [41])
    [experience] = assemble(recording.records)
    assert experience.tokens.tolist() == [10, 20, 30, 41]
    assert experience.action_mask.tolist() == [True, False, True]


def test_the_sample_that_the_next_turn_extends_is_its_parent() -> None:  # A9
    recording = Recording()
    recording.turn([10], [20], sample_index=0)
    recording.turn([10], [21], sample_index=1)
    extended = recording.turn([10, 21, 30], [40])
    assert extended.parent == "1"
    assert [each.eid.suffix for each in assemble(recording.records)] == ["0", "2"]
    assert [turn.sample_index for turn in assemble(recording.records)[1].turns] == [1, 0]


@pytest.mark.parametrize("reason", list(FinishReason))
def test_ends_are_told_apart(reason: FinishReason) -> None:  # A6, V3
    recording = Recording()
    recording.turn([10], [20], finish_reason="length")
    recording.turn([10, 20, 30], [40], finish_reason=reason)
    [experience] = assemble(recording.records)
    assert experience.finish_reason is reason
    truncated = experience.truncate_status == "response_truncated"
    assert truncated == (reason is FinishReason.LENGTH)
    assert [turn.finish_reason for turn in experience.turns] == [FinishReason.LENGTH, reason]


# What the turns carry


def test_a_turn_without_logprobs_is_marked_and_nothing_invented() -> None:  # L4
    recording = Recording()
    recording.turn([10], [20, 21], logprobs=[-0.5, 0.0])
    recording.turn([10, 20, 21, 30], [40], logprobs=None)
    [experience] = assemble(recording.records)
    assert experience.logprobs_valid.tolist() == [True, True, False, False]
    assert experience.logprobs[:2].tolist() == [-0.5, 0.0]
    assert np.isnan(experience.logprobs[2:]).all()
    assert experience.action_mask.tolist() == [True, True, False, True]


def test_version_spans_are_kept_within_and_across_turns() -> None:  # V1, V2
    recording = Recording()
    recording.turn([10], [20, 21, 22], versions=[(0, 2, "3"), (2, 3, "10")])
    recording.turn([10, 20, 21, 22, 30], [40], versions=[(0, 1, "5")])
    [experience] = assemble(recording.records)
    assert experience.model_versions == (
        VersionSpan(0, 2, "3"),
        VersionSpan(2, 3, "10"),
        VersionSpan(4, 5, "5"),
    )
    assert experience.model_version == "3"
    assert experience.model_version_range == ("3", "5")


def test_turns_of_different_adapters_never_merge() -> None:  # V4
    recording = Recording()
    recording.turn([10], [20], adapter="lora-a")
    recording.turn([10, 20, 30], [40], adapter="lora-b")
    recording.turn([10, 20, 30], [41])
    recording.turn([10, 20, 30], [42], adapter="lora-a")
    experiences = assemble(recording.records)
    assert [(each.adapter, each.tokens.tolist()) for each in experiences] == [
        ("lora-b", [10, 20, 30, 40]),
        (None, [10, 20, 30, 41]),
        ("lora-a", [10, 20, 30, 42]),
    ]


def test_the_deepest_reward_on_the_path_counts() -> None:
    recording = Recording()
    recording.turn([10], [20], reward=0.25, info={"a": 1, "b": 1})
    recording.turn([10, 20, 30], [40], reward=0.0, token_level_reward=[0.5], info={"b": 2})
    recording.turn([10, 20, 30, 40, 50], [60])
    [experience] = assemble(recording.records)
    assert experience.reward == 0.0
    assert [turn.reward for turn in experience.turns] == [0.25, 0.0, None]
    assert experience.token_level_reward.tolist() == [0, 0, 0.5, 0, 0]
    assert experience.info == {"a": 1, "b": 2}


def rows(*experts: int, start: int = 0, dtype: str = "uint8", **fields: object) -> RoutedExperts:
    """One layer, top 1."""
    data = np.array(experts, dtype=dtype).reshape(-1, 1, 1)
    return RoutedExperts(data=data, start=start, **fields)


def test_routed_experts_of_two_turns_have_no_gap() -> None:  # R2
    recording = Recording()
    recording.turn([10, 11], [20], routed_experts=rows(1, 2))
    second = recording.turn([10, 11, 20, 30], [40], routed_experts=rows(1, 2, 3, 4))
    assert second.routed_experts.start == 2
    assert second.routed_experts.data.ravel().tolist() == [3, 4]
    [experience] = assemble(recording.records)
    assert experience.routed_experts.data.ravel().tolist() == [1, 2, 3, 4]
    assert experience.routed_experts.valid is None


def test_routed_experts_of_two_dtypes_are_promoted() -> None:  # R1, R3
    recording = Recording()
    recording.turn([10, 11], [20], routed_experts=rows(1, 2))
    recording.turn([10, 11, 20, 30], [40], routed_experts=rows(1, 2, 300, 511, dtype="uint16"))
    [experience] = assemble(recording.records)
    assert experience.routed_experts.data.dtype == np.uint16
    assert experience.routed_experts.data.ravel().tolist() == [1, 2, 300, 511]


def test_an_earlier_turn_fills_the_rows_that_a_later_one_omits() -> None:  # R4
    recording = Recording()
    recording.turn([10, 11], [20], routed_experts=rows(1, 2))
    # The prefix cache had the first three tokens: their rows are invalid, or not even sent.
    recording.turn([10, 11, 20, 30], [40], routed_experts=rows(0, 0, 0, 4, valid=[(3, 4)]))
    recording.turn([10, 11, 20, 30, 40], [50], routed_experts=rows(5, start=4))
    [experience] = assemble(recording.records)
    assert experience.routed_experts.valid == ((0, 2), (3, 5))
    assert experience.routed_experts.data[[0, 1, 3, 4], 0, 0].tolist() == [1, 2, 4, 5]


def test_rows_after_a_hole_are_kept_whole() -> None:  # R4
    recording = Recording()
    recording.turn([10, 11], [20], routed_experts=rows(0, 2, valid=[(1, 2)]))
    second = recording.turn([10, 11, 20, 30], [40], routed_experts=rows(1, 9, 3, 4))
    assert second.routed_experts.start == 0
    [experience] = assemble(recording.records)
    assert experience.routed_experts.valid is None
    assert experience.routed_experts.data.ravel().tolist() == [1, 2, 3, 4]


# Cost


def insert_seconds(paths: Paths, prompt: list[int], made: Record) -> float:
    """CPU time to place and add a record."""
    prompt_ids, response_ids = ids(prompt), made.response_ids
    started = time.thread_time()
    paths.add(made, paths.place(prompt_ids, response_ids))
    return time.thread_time() - started


def branch(number: int) -> tuple[list[int], Record]:
    """A branch off a trunk of 2,000 tokens: some leave it early, some are its siblings."""
    prompt = list(range(2000))[: 2000 - number % 7 * 100] + [number] * (number % 3)
    return prompt, record(id=str(number), prompt_ids=prompt, response_ids=[number, 7])


def test_an_insert_among_ten_thousand_branches_costs_as_much_as_an_early_one() -> None:
    many = Paths()
    for number in range(10_000):
        insert_seconds(many, *branch(number))

    def ratio() -> float:
        few, late = [], []
        gc.disable()
        for number in range(10_000, 10_200):
            one = Paths()
            insert_seconds(one, *branch(0))
            few.append(insert_seconds(one, *branch(number)))
            late.append(insert_seconds(many, *branch(number)))
        gc.enable()
        return statistics.median(late) / statistics.median(few)

    assert min(ratio() for _ in range(3)) <= 2


def long_trajectory(turns: int) -> list[Record]:
    """Each turn adds 500 tokens of prompt and 500 of response."""
    tokens, recording = np.arange(turns * 1000).tolist(), Recording()
    for end in range(500, turns * 1000, 1000):
        response = tokens[end : end + 500]
        recording.turn(tokens[:end], response, logprobs=np.zeros(500, dtype=np.float32))
    return recording.records


def test_a_hundred_turns_cost_their_final_length() -> None:
    records = long_trajectory(100)
    # Per token: 4 bytes of id, and 4 of logprob for the half that was sampled.
    assert len(encode_runs(merged_by_key(records))) < 100_000 * 6 + 100 * 1000
    assert sum(each.nbytes for each in records) < 100_000 * 6 + 100 * 8192

    def peak(given: list[Record]) -> int:
        tracemalloc.start()
        assemble(given)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    def seconds(given: list[Record]) -> float:
        started = time.thread_time()
        assemble(given)
        return time.thread_time() - started

    assemble(records)
    quarter = long_trajectory(25)
    assert peak(records) < 100_000 * 64
    # Four times the length: 4 when linear, 16 when quadratic.
    ratios = [seconds(records) / seconds(quarter) for _ in range(9)]
    assert statistics.median(ratios) < 8
