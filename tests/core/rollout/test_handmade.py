"""Experiences built by hand come back from the store as they were."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recorder_core import EID, Experience, RecordKey, RoutedExperts, VersionSpan, assemble
from recorder_core.rollout.handmade import records_of
from tests.core.builders import masked

KEY = RecordKey("0", "task", 3)
EID_ = EID(batch="0", task="task", run=3)


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    response=st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=12),
)
def test_what_is_trained_survives_the_way_through_records(
    prompt: list[int], response: list[tuple[int, bool]]
) -> None:
    response.append((5, True))
    mask = np.array([sampled for _, sampled in response])
    count = len(response)
    logprobs = np.where(mask, -np.arange(count, dtype=np.float32) / 8, np.nan)
    rewards = np.where(mask, np.arange(count, dtype=np.float32), 0)
    made = Experience(
        eid=EID_,
        tokens=[*prompt, *(token for token, _ in response)],
        prompt_length=len(prompt),
        logprobs=logprobs,
        action_mask=mask,
        token_level_reward=rewards,
        reward=0.5,
        info={"judge": "exact"},
        model_versions=(VersionSpan(0, count, "7"),),
    )
    (back,) = assemble(records_of([made], KEY))
    assert back.tokens.tolist() == made.tokens.tolist()
    # What precedes the first sampled token is the prompt.
    first = int(mask.argmax())
    assert back.prompt_length == len(prompt) + first
    np.testing.assert_array_equal(back.action_mask, mask[first:])
    np.testing.assert_array_equal(back.logprobs, logprobs[first:])
    np.testing.assert_array_equal(back.token_level_reward, rewards[first:])
    assert (back.reward, back.info, back.eid.key) == (0.5, {"judge": "exact"}, KEY)
    named = np.zeros(len(back.action_mask), dtype=bool)
    for start, end, version in back.model_versions:
        assert version == "7"
        named[start:end] = True
    np.testing.assert_array_equal(named, back.action_mask)


def test_samples_of_one_prompt_stay_apart() -> None:
    made = [Experience(eid=EID_, tokens=[1, 2, n], prompt_length=2, reward=n) for n in (3, 4, 3)]
    back = assemble(records_of(made, KEY))
    assert sorted((each.tokens.tolist(), each.reward) for each in back) == [
        ([1, 2, 3], 3.0),
        ([1, 2, 3], 3.0),
        ([1, 2, 4], 4.0),
    ]
    assert all(each.action_mask.all() for each in back)


def test_tokens_after_the_last_sampled_one_are_left_out_with_their_experts() -> None:
    rows = np.arange(5, dtype=np.uint8).reshape(5, 1, 1)
    made = Experience(
        eid=EID_,
        tokens=[1, 2, 3, 4, 5, 6],
        prompt_length=2,
        action_mask=[True, True, False, False],
        routed_experts=RoutedExperts(data=rows),
    )
    (back,) = assemble(records_of([made], KEY))
    assert back.tokens.tolist() == [1, 2, 3, 4]
    assert back.routed_experts.data.ravel().tolist() == [0, 1, 2]


def test_each_stretch_of_sampled_tokens_keeps_its_part_of_the_sampling_mask() -> None:
    """M13."""
    made = Experience(
        eid=EID_,
        tokens=[1, 2, 3, 4, 5, 6],
        prompt_length=2,
        action_mask=[True, False, True, False],
        sampling_mask=masked([[3, 9], [], [5], []]),
    )
    (back,) = assemble(records_of([made], KEY))
    assert back.sampling_mask == masked([[3, 9], [], [5]])


def test_what_no_record_can_hold_is_refused() -> None:
    fields = {"eid": EID_, "tokens": [1, 2], "prompt_length": 1}
    with pytest.raises(ValueError, match="no sampled token"):
        records_of([Experience(**fields, action_mask=[False])], KEY)
    with pytest.raises(ValueError, match="advantages; set them after the drain"):
        records_of([Experience(**fields, advantages=[1.0])], KEY)
