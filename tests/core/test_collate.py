"""Padded and packed batches: values by hand, and nothing lost or invented on the way."""

from __future__ import annotations

import copy
import importlib
import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder_core import EID, Experience, FinishReason, Record, RecordKey, assemble, export
from recorder_core.errors import CollateError
from recorder_core.records import RoutedExperts, VersionSpan

torch = pytest.importorskip("torch")

from recorder_core.collate import (  # noqa: E402
    Batch,
    PackedBatch,
    PaddedBatch,
    collate_packed,
    collate_packs,
    collate_padded,
)

NAN = math.nan
PAD = 999


def experience(
    prompt: list[int], response: list[int], *, suffix: str = "x", **fields: Any
) -> Experience:
    given_fields = {"logprobs": [-0.5] * len(response), "reward": 1.0, **fields}
    return Experience(
        eid=EID(batch="b", task="t", run=0, suffix=suffix),
        tokens=prompt + response,
        prompt_length=len(prompt),
        **given_fields,
    )


def collate_both(experiences: list[Experience], **options: Any) -> tuple[PaddedBatch, PackedBatch]:
    return (
        collate_padded(experiences, pad_token_id=PAD, **options),
        collate_packed(experiences, **options),
    )


def record(name: str, prompt: list[int], response: list[int], **fields: Any) -> Record:
    return Record.of(
        id=name,
        key=RecordKey("b", "t", 0),
        prompt_ids=prompt,
        response_ids=response,
        finish_reason=FinishReason.STOP,
        **fields,
    )


# Two turns with an observation of two tokens between them, then a short single turn.
TWO_TURNS = experience(
    [1, 2, 3],
    [10, 11, 20, 21, 12],
    logprobs=[-0.1, -0.2, NAN, NAN, -0.3],
    action_mask=[True, True, False, False, True],
    reward=0.5,
    model_versions=(VersionSpan(0, 2, "step-9"), VersionSpan(4, 5, "step-10")),
    adapter="lora-a",
    suffix="two",
)
ONE_TURN = experience(
    [7],
    [30, 31],
    logprobs=[-0.4, 0.0],
    action_mask=[True, True],
    reward=-1,
    model_versions=(VersionSpan(0, 1, "step-10"), VersionSpan(1, 2, "step-11")),
    suffix="one",
)


def test_padded_prompts_end_and_responses_begin_at_one_column() -> None:
    batch = collate_padded([TWO_TURNS, ONE_TURN], pad_token_id=PAD)

    assert batch.batch_size == 2
    assert batch.prompt_length == 3
    assert batch.tokens.dtype == torch.int64
    assert batch.tokens.tolist() == [
        [1, 2, 3, 10, 11, 20, 21, 12],
        [PAD, PAD, 7, 30, 31, PAD, PAD, PAD],
    ]
    assert batch.attention_mask.dtype == torch.bool
    assert batch.attention_mask.int().tolist() == [[1] * 8, [0, 0, 1, 1, 1, 0, 0, 0]]
    assert batch.position_ids.tolist() == [list(range(8)), [0, 0, 0, 1, 2, 0, 0, 0]]
    assert batch.action_mask.int().tolist() == [[1, 1, 0, 0, 1], [1, 1, 0, 0, 0]]
    torch.testing.assert_close(
        batch.logprobs,
        torch.tensor([[-0.1, -0.2, 0.0, 0.0, -0.3], [-0.4, 0.0, 0.0, 0.0, 0.0]]),
        rtol=0,
        atol=0,
    )
    assert batch.logprobs_valid.int().tolist() == [[1, 1, 0, 0, 1], [1, 1, 0, 0, 0]]
    assert batch.prompt_lengths.tolist() == [3, 1]
    assert batch.rewards is not None
    assert batch.rewards.dtype == torch.float32
    assert batch.rewards.tolist() == [0.5, -1.0]
    assert batch.eids == [TWO_TURNS.eid, ONE_TURN.eid]
    assert batch.adapters == ["lora-a", None]


def test_packed_values_stand_at_their_own_token() -> None:
    batch = collate_packed([TWO_TURNS, ONE_TURN])

    assert batch.tokens.tolist() == [1, 2, 3, 10, 11, 20, 21, 12, 7, 30, 31]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 8, 11]
    assert batch.max_seqlen == 8
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]
    assert batch.action_mask.int().tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1]
    assert batch.logprobs.tolist() == pytest.approx([0, 0, 0, -0.1, -0.2, 0, 0, -0.3, 0, -0.4, 0.0])
    assert batch.logprobs_valid.int().tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1]
    assert batch.version_index.tolist() == [-1, -1, -1, 0, 0, -1, -1, 1, -1, 1, 2]
    assert batch.rewards is not None
    assert batch.rewards.tolist() == [0.5, -1.0]


def test_version_labels_are_kept_as_text_in_order_of_first_appearance() -> None:
    batch = collate_padded([TWO_TURNS, ONE_TURN], pad_token_id=PAD)

    assert batch.versions == ["step-9", "step-10", "step-11"]
    assert batch.version_index.dtype == torch.int32
    assert batch.version_index.tolist() == [[0, 0, -1, -1, 1], [1, 2, -1, -1, -1]]


def test_unknown_versions_leave_an_empty_table() -> None:
    padded, packed = collate_both([experience([1], [2, 3])])

    assert padded.versions == packed.versions == []
    assert padded.version_index.tolist() == [[-1, -1]]
    assert packed.version_index.tolist() == [-1, -1, -1]


def test_a_shared_prefix_is_trained_in_one_trajectory_and_keeps_its_logprobs_in_both() -> None:
    first = record("r1", [1, 2], [3, 4], logprobs=[-0.1, -0.2])
    left = record("r2", [5], [6], parent="r1", start=4, logprobs=[-0.3], finished_at=1.0)
    right = record("r3", [7], [8], parent="r1", start=4, logprobs=[-0.4], finished_at=2.0)
    experiences = assemble([first, left, right])

    batch = collate_padded(experiences, pad_token_id=PAD, require_rewards=False)

    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8]]
    assert batch.action_mask.int().tolist() == [[1, 1, 0, 1], [0, 0, 0, 1]]
    assert batch.logprobs_valid.int().tolist() == [[1, 1, 0, 1], [1, 1, 0, 1]]
    assert batch.logprobs[1].tolist() == pytest.approx([-0.1, -0.2, 0.0, -0.4])


def test_a_sampled_token_without_logprob_is_refused_by_name_and_count() -> None:
    turn_without = experience([1], [2, 3, 4], logprobs=[-0.1, NAN, NAN], suffix="holes")
    none_at_all = experience([1], [2], logprobs=None, suffix="none")

    for collate in (collate_packed, lambda batch: collate_padded(batch, pad_token_id=PAD)):
        with pytest.raises(CollateError) as caught:
            collate([ONE_TURN, turn_without, none_at_all])
        assert "b/t/0/0/holes (2 of 3), b/t/0/0/none (1 of 1)" in str(caught.value)
        assert "b/t/0/0/one" not in str(caught.value)


def test_missing_logprobs_can_be_masked_and_never_look_like_probability_one() -> None:
    turn_without = experience([1], [2, 3, 4], logprobs=[-0.1, NAN, -0.2])
    none_at_all = experience([1], [2], logprobs=None)

    padded, packed = collate_both([turn_without, none_at_all], missing_logprobs="mask")

    assert padded.action_mask.int().tolist() == [[1, 0, 1], [0, 0, 0]]
    assert padded.logprobs_valid.int().tolist() == [[1, 0, 1], [0, 0, 0]]
    assert packed.action_mask.int().tolist() == [0, 1, 0, 1, 0, 0]
    assert not padded.logprobs.isnan().any()


def test_an_unknown_choice_for_missing_logprobs_is_refused() -> None:
    with pytest.raises(CollateError, match="'ignore'"):
        collate_packed([ONE_TURN], missing_logprobs="ignore")  # type: ignore[arg-type]


def test_without_an_action_mask_every_response_token_counts_as_sampled() -> None:
    padded, _ = collate_both([experience([1], [2, 3], action_mask=None), ONE_TURN])

    assert padded.action_mask.int().tolist() == [[1, 1], [1, 1]]


def test_a_missing_or_infinite_reward_is_refused_by_name() -> None:
    missing = [
        experience([1], [2], reward=reward, suffix=f"r{i}")
        for i, reward in enumerate([None, NAN, math.inf, 1e39])
    ]

    with pytest.raises(CollateError) as caught:
        collate_packed([ONE_TURN, *missing])

    assert all(f"b/t/0/0/r{i}" in str(caught.value) for i in range(4))
    assert "b/t/0/0/one" not in str(caught.value)


def test_rewards_are_none_where_one_is_missing_and_none_was_required() -> None:
    unrewarded = experience([1], [2], reward=None)

    for batch in collate_both([ONE_TURN, unrewarded], require_rewards=False):
        assert batch.rewards is None
    for batch in collate_both([ONE_TURN], require_rewards=False):
        assert batch.rewards is not None
        assert batch.rewards.tolist() == [-1.0]


def test_an_error_about_a_whole_batch_stays_short() -> None:
    with pytest.raises(CollateError, match=r"b/t/0/0/4 and 95 more; give"):
        collate_packed([experience([1], [2], reward=None, suffix=str(i)) for i in range(100)])


def test_token_level_rewards_are_zero_where_an_experience_has_none() -> None:
    rewarded = experience([1], [2, 3], token_level_reward=[0.25, 1.0])

    padded, packed = collate_both([rewarded, experience([1], [2, 3])])

    assert padded.token_level_rewards is not None
    assert padded.token_level_rewards.tolist() == [[0.25, 1.0], [0.0, 0.0]]
    assert packed.token_level_rewards is not None
    assert packed.token_level_rewards.tolist() == [0.0, 0.25, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["advantages", "returns", "teacher_logprobs"])
def test_what_the_trainer_computes_is_given_by_all_or_by_none(name: str) -> None:
    def having_values(values: list[float], **fields: Any) -> Experience:
        return experience([1], list(range(len(values))), **{name: values, **fields})

    having = having_values([2.0, NAN], action_mask=[True, False])
    also = having_values([3.0])
    lacking = experience([1], [2], suffix="lacking")

    padded, packed = collate_both([having, also])
    assert getattr(padded, name).tolist() == [[2.0, 0.0], [3.0, 0.0]]
    assert getattr(packed, name).tolist() == [0.0, 2.0, 0.0, 0.0, 3.0]
    assert getattr(collate_packed([lacking]), name) is None
    with pytest.raises(CollateError, match=f"{name}.*b/t/0/0/lacking"):
        collate_packed([having, lacking])
    with pytest.raises(CollateError, match=f"{name} is NaN.*b/t/0/0/unknown"):
        collate_packed([having_values([NAN], suffix="unknown")])


def test_routed_experts_stand_at_their_token_and_ids_over_255_are_kept() -> None:
    narrow = experience(
        [1, 2],
        [3],
        routed_experts=RoutedExperts(data=np.array([[[1, 2]], [[3, 4]]], np.uint8)),
    )
    # The engine gave rows 1 and 3 of the 4; what lies in row 2 is not its word.
    wide = experience(
        [5],
        [6, 7, 8, 9],
        routed_experts=RoutedExperts(
            data=np.array([[[300, 301]], [[9, 9]], [[511, 0]]], np.uint16),
            start=1,
            valid=((1, 2), (3, 4)),
        ),
    )
    dense = experience([5], [6])

    padded, packed = collate_both([narrow, wide, dense])

    assert padded.routed_experts is not None
    assert padded.routed_valid is not None
    assert padded.routed_experts.dtype == torch.int32
    assert padded.routed_experts.shape == (3, 5, 1, 2)
    assert padded.tokens.shape == (3, 6)
    assert padded.routed_experts[:, :, 0].tolist() == [
        [[1, 2], [3, 4], [0, 0], [0, 0], [0, 0]],
        [[0, 0], [0, 0], [300, 301], [0, 0], [511, 0]],
        [[0, 0]] * 5,
    ]
    assert padded.routed_valid.int().tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 0, 1], [0] * 5]

    assert packed.routed_experts is not None
    assert packed.routed_valid is not None
    assert packed.routed_experts.shape == (3 + 5 + 2, 1, 2)
    assert packed.routed_valid.int().tolist() == [1, 1, 0, 0, 1, 0, 1, 0, 0, 0]
    assert packed.routed_experts[4, 0].tolist() == [300, 301]


def test_routed_experts_of_few_experts_stay_bytes() -> None:
    routed = RoutedExperts(data=np.array([[[255]]], np.uint8))

    for batch in collate_both([experience([1], [2], routed_experts=routed)]):
        assert batch.routed_experts is not None
        assert batch.routed_experts.dtype == torch.uint8
        assert batch.routed_experts.max() == 255


def test_routed_experts_of_different_models_are_refused() -> None:
    one = RoutedExperts(data=np.zeros((1, 1, 2), np.uint8))
    other = RoutedExperts(data=np.zeros((1, 4, 2), np.uint8))

    with pytest.raises(CollateError, match=r"\[1, 2\] in b/t/0/0/p, \[4, 2\] in b/t/0/0/q"):
        collate_packed(
            [
                experience([1], [2], routed_experts=one, suffix="p"),
                experience([1], [2], routed_experts=other, suffix="q"),
            ]
        )


def test_nothing_to_collate_is_refused() -> None:
    with pytest.raises(CollateError, match="no experiences"):
        collate_packed([])
    with pytest.raises(CollateError, match="no experiences"):
        collate_padded([], pad_token_id=PAD)
    with pytest.raises(CollateError, match="without any token: b/t/0/0/empty"):
        collate_packed([ONE_TURN, experience([], [], suffix="empty")])


def test_experiences_without_prompt_or_without_response_are_batched() -> None:
    padded, packed = collate_both([experience([], [4, 5]), experience([6], [])])

    assert padded.tokens.tolist() == [[PAD, 4, 5], [6, PAD, PAD]]
    assert padded.action_mask.int().tolist() == [[1, 1], [0, 0]]
    assert packed.tokens.tolist() == [4, 5, 6]
    assert packed.action_mask.int().tolist() == [1, 1, 0]


def test_a_batch_moves_to_a_device_whole() -> None:
    routed = RoutedExperts(data=np.zeros((1, 1, 1), np.uint8))
    for batch in collate_both([experience([1], [2], routed_experts=routed)]):
        moved = batch.to("meta")

        assert type(moved) is type(batch)
        assert moved.eids == batch.eids
        tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
        assert len(tensors) == len([v for v in vars(batch).values() if isinstance(v, torch.Tensor)])
        assert {tensor.device.type for tensor in tensors} == {"meta"}
        assert batch.tokens.device.type == "cpu"


def test_the_experiences_are_left_as_they_are() -> None:
    source = experience([1], [2, 3], logprobs=[-0.1, NAN], action_mask=[True, False])
    before = copy.deepcopy(source)

    for batch in collate_both([source]):
        batch.tokens.fill_(0)
        batch.logprobs.fill_(0)
        batch.action_mask.fill_(False)

    assert source == before


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "recorder_core.collate")
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(ImportError, match=r"recorder-core\[torch\]"):
        importlib.import_module("recorder_core.collate")


def test_rows_are_collated_by_the_rules_that_made_them() -> None:
    low, high = (
        experience([1], [2, 3], action_mask=[True, False], reward=reward, suffix=str(reward))
        for reward in (0.0, 4.0)
    )
    cut = experience([1], [9], finish_reason="abort", suffix="cut", reward=4.0)
    made = export.rows([low, high, cut], export.Rules(reward="mean"))

    for batch in collate_both(made):
        assert [eid.suffix for eid in batch.eids] == ["0.0", "4.0"]
        assert batch.rewards is not None
        assert batch.rewards.tolist() == pytest.approx([8 / 3] * 2)
        assert batch.advantages is None


def test_the_advantages_of_a_group_stand_at_the_trained_tokens() -> None:
    def of_run(run: int, reward: float) -> Experience:
        given_eid = EID(batch="b", task="t", run=run)
        return experience([1], [2, 3], action_mask=[True, False], reward=reward).replace(
            eid=given_eid
        )

    made = export.group_advantages(export.rows([of_run(0, 0.0), of_run(1, 4.0)]), scale="none")

    padded, packed = collate_both(made)

    assert padded.advantages is not None
    assert padded.advantages.tolist() == [[-2, 0], [2, 0]]
    assert packed.advantages is not None
    assert packed.advantages.tolist() == [0, -2, 0, 0, 2, 0]


def test_an_infinite_logprob_counts_as_none() -> None:
    source = experience([1], [2, 3], logprobs=[-math.inf, -0.5])

    with pytest.raises(CollateError, match=r"b/t/0/0/x \(1 of 2\)"):
        collate_packed([source])
    for batch in collate_both([source], missing_logprobs="mask"):
        assert batch.logprobs.isfinite().all()
        assert batch.action_mask.sum() == batch.logprobs_valid.sum() == 1


def test_packs_keep_to_their_budget_and_positions_begin_anew() -> None:
    sources = [experience([1], list(range(n)), suffix=str(n)) for n in (5, 3, 2, 1)]

    ranks = collate_packs(sources, token_budget=8, ranks=2)

    assert [len(packs) for packs in ranks] == [1, 1]
    ((first,), (second,)) = ranks
    assert [eid.suffix for eid in first.eids] == ["5", "1"]
    assert [eid.suffix for eid in second.eids] == ["3", "2"]
    assert first.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert second.cu_seqlens.tolist() == [0, 4, 7]
    with pytest.raises(CollateError, match="token_budget of 5"):
        collate_packs(sources, token_budget=5)


finite = st.floats(-100, 0, width=32)


@st.composite
def experiences(draw: st.DrawFn) -> list[Experience]:
    made = []
    with_advantages = draw(st.booleans())
    for number in range(draw(st.integers(1, 5))):
        prompt, count = draw(st.integers(0, 5)), draw(st.integers(0, 6))
        length = max(prompt + count, 1)
        count = length - prompt
        column = st.lists(finite, min_size=count, max_size=count)
        cut = draw(st.integers(0, count))
        spans = [(0, cut, draw(st.sampled_from("ab"))), (cut, count, draw(st.sampled_from("bc")))]
        rows = draw(st.integers(0, length - 1))
        top, dtype = draw(st.sampled_from([(255, np.uint8), (65_535, np.uint16)]))
        ids = draw(st.lists(st.integers(0, top), min_size=rows * 2, max_size=rows * 2))
        routed = RoutedExperts(
            data=np.array(ids, dtype).reshape(rows, 1, 2),
            start=draw(st.integers(0, length - 1 - rows)),
        )
        made.append(
            experience(
                draw(st.lists(st.integers(0, 2**31 - 1), min_size=prompt, max_size=prompt)),
                draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count)),
                suffix=str(number),
                logprobs=draw(
                    st.none() | st.lists(finite | st.just(NAN), min_size=count, max_size=count)
                ),
                action_mask=draw(
                    st.none() | st.lists(st.booleans(), min_size=count, max_size=count)
                ),
                reward=draw(finite),
                token_level_reward=draw(st.none() | column),
                advantages=draw(column) if with_advantages else None,
                model_versions=tuple(VersionSpan(*span) for span in spans if span[0] < span[1]),
                routed_experts=draw(st.none() | st.just(routed)),
            )
        )
    return made


def unpadded(batch: PaddedBatch, number: int) -> dict[str, list[Any]]:
    prompt = int(batch.prompt_lengths[number])
    start = batch.prompt_length - prompt
    length = int(batch.attention_mask[number].sum())
    end = start + length
    found = _sequence(batch, number, slice(start, end), slice(0, length - prompt))
    if batch.routed_experts is not None and batch.routed_valid is not None:
        rows = slice(start, end - 1)
        found["routed"] = batch.routed_experts[number, rows].tolist()
        found["routed_valid"] = batch.routed_valid[number, rows].tolist()
    return found


def unpacked(batch: PackedBatch, number: int) -> dict[str, list[Any]]:
    start, end = (int(bound) for bound in batch.cu_seqlens[number : number + 2])
    response = slice(start + int(batch.prompt_lengths[number]), end)
    found = _sequence(batch, ..., slice(start, end), response)
    if batch.routed_experts is not None and batch.routed_valid is not None:
        assert not batch.routed_valid[end - 1]
        found["routed"] = batch.routed_experts[start : end - 1].tolist()
        found["routed_valid"] = batch.routed_valid[start : end - 1].tolist()
    return found


def _sequence(batch: Batch, row: Any, tokens: slice, response: slice) -> dict[str, list[Any]]:
    found = {
        "tokens": batch.tokens[row, tokens].tolist(),
        "position_ids": batch.position_ids[row, tokens].tolist(),
        "versions": [
            None if index < 0 else batch.versions[index]
            for index in batch.version_index[row, response].tolist()
        ],
    }
    for name in ("action_mask", "logprobs", "logprobs_valid", "token_level_rewards", "advantages"):
        values = getattr(batch, name)
        found[name] = [] if values is None else values[row, response].tolist()
    return found


@given(experiences())
def test_unpadding_and_unpacking_give_each_experience_back(batch: list[Experience]) -> None:
    padded, packed = collate_both(batch, missing_logprobs="mask")

    for number, source in enumerate(batch):
        got = unpadded(padded, number)
        assert got == unpacked(packed, number)
        assert got["tokens"] == source.tokens.tolist()
        assert got["position_ids"] == list(range(len(source.tokens)))
        valid = source.logprobs_valid
        wanted = source.action_mask if source.action_mask is not None else np.True_
        assert got["action_mask"] == (valid & wanted).tolist()
        assert got["logprobs_valid"] == valid.tolist()
        logprobs = source.logprobs if source.logprobs is not None else np.zeros(len(valid))
        assert got["logprobs"] == np.where(valid, logprobs, 0).tolist()
        versions: list[str | None] = [None] * len(valid)
        for start, end, label in source.model_versions:
            versions[start:end] = [label] * (end - start)
        assert got["versions"] == versions
        if source.token_level_reward is not None:
            assert got["token_level_rewards"] == source.token_level_reward.tolist()
        if source.advantages is not None:
            assert got["advantages"] == source.advantages.tolist()
        routed = source.routed_experts
        if routed is not None and len(routed.data):
            assert got["routed"][routed.start : routed.end] == routed.data.tolist()
            assert [i for i, ok in enumerate(got["routed_valid"]) if ok] == list(
                range(routed.start, routed.end)
            )


@given(experiences())
def test_padding_holds_nothing(batch: list[Experience]) -> None:
    padded = collate_padded(batch, pad_token_id=PAD, missing_logprobs="mask")

    outside = ~padded.attention_mask
    response_padding = outside[:, padded.prompt_length :]
    assert (padded.tokens[outside] == PAD).all()
    derived = (padded.attention_mask.cumsum(1) - 1) * padded.attention_mask
    assert torch.equal(padded.position_ids, derived)
    assert not padded.action_mask[response_padding].any()
    assert not padded.logprobs[response_padding].any()
    assert (padded.version_index[response_padding] == -1).all()
    assert not (padded.action_mask & ~padded.logprobs_valid).any()
