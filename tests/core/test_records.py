"""Records and experiences hold what the engine did, in the right types, or say what is wrong."""

from __future__ import annotations

import tracemalloc
from array import array
from typing import Any

import numpy as np
import pytest

from recorder_core import EID, Experience, RoutedExperts, SamplingMask
from tests.core.builders import masked, record

THREE_ROWS = RoutedExperts(data=[[[1]]] * 3)
EID_0 = EID(batch="b", task="t", run=0, suffix="a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_ids": [3, 4, 5], "logprobs": [-1.0] * 2}, "logprobs has 2 values for 3"),
        ({"response_ids": [3, 4], "token_level_reward": [1.0]}, "reward has 1 values for 2"),
        ({"response_ids": []}, "at least one sampled token"),
        ({"versions": [(0, 2, "v1")]}, r"\[0, 2\) is out of order or outside the 1 response"),
        ({"response_ids": [3, 4], "versions": [(1, 2, "b"), (0, 1, "a")]}, "out of order"),
        ({"start": 4}, "start is 4 without a parent"),
        (
            {"routed_experts": RoutedExperts(data=[[[1]]] * 3)},
            "ends at row 3, a path of 3 tokens has 2",
        ),
        ({"sampling_mask": masked([[3], [4]])}, "sampling_mask has 2 counts for 1 response_ids"),
    ],
)
def test_lengths_that_disagree_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": [0.0]}, "logprobs has 1 values for 2 response tokens"),
        ({"action_mask": [True] * 3}, "action_mask has 3 values for 2 response tokens"),
        ({"advantages": []}, "advantages has 0 values for 2 response tokens"),
        ({"prompt_length": 4}, "prompt_length is 4 for 3 tokens"),
        (
            {"routed_experts": RoutedExperts(data=[[[1]]] * 3)},
            "ends at row 3, 3 tokens have 2 rows",
        ),
        ({"sampling_mask": masked([[2]])}, "sampling_mask has 1 values for 2 response tokens"),
    ],
)
def test_lengths_of_an_experience_that_disagree_are_named(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Experience(**{"eid": EID_0, "tokens": [1, 2, 3], "prompt_length": 1, **fields})


@pytest.mark.parametrize(
    "tokens",
    [
        [151_645, 0],
        (151_645, 0),
        array("q", [151_645, 0]),
        np.array([151_645, 0]),
        np.array([151_645, 0], dtype=np.uint32),
        [np.int64(151_645), np.int32(0)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_token_ids_become_int32(tokens: Any) -> None:
    made = record(prompt_ids=tokens)
    assert made.prompt_ids.dtype == np.int32
    assert made.prompt_ids.tolist() == [151_645, 0]


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0, 2.5],
        [None],
        ["7"],
        "7",
        [[1, 2]],
        7,
        [2**31],
        [-(2**31) - 1],
        array("d", [1.0]),
        array("q", [2**31]),
        np.array([1.0]),
        np.array([2**31]),
        np.array([[1]], dtype=np.int32),
    ],
    ids=str,
)
def test_what_is_no_token_id_is_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="prompt_ids"):
        record(prompt_ids=tokens)


def test_a_record_owns_its_memory() -> None:
    """It keeps nothing of the buffer that its ids were cut from. S14."""
    buffer = np.arange(1_000_000, dtype=np.int32)
    made = record(prompt_ids=buffer[3:6], response_ids=buffer[6:8])
    buffer[:] = 0
    assert made.prompt_ids.tolist() == [3, 4, 5]
    assert made.response_ids.tolist() == [6, 7]
    assert len(made.data) < 100


@pytest.mark.parametrize("name", ["prompt_ids", "logprobs"])
def test_a_list_is_read_without_an_object_for_each_value(name: str) -> None:
    count = 500_000
    values = {"prompt_ids": [7] * count, "logprobs": [-0.5] * count}[name]
    response = np.zeros(count, dtype=np.int32)
    tracemalloc.start()
    made = record(response_ids=response, **{name: values})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(getattr(made, name)) == count
    # The array, its bytes, and the whole buffer, which holds the response too.
    assert 4 * count <= peak < 24 * count


def test_texts_are_kept_as_they_are() -> None:
    for text in ("", "plain", "é \N{GRINNING FACE}", "\x00"):
        made = record(prompt_text=text, response_text=text)
        assert (made.prompt_text, made.response_text) == (text, text)
    assert record().prompt_text is None
    assert record(response_text="only").prompt_text is None


@pytest.mark.parametrize(
    ("experts", "dtype"), [([0, 255], np.uint8), ([0, 256], np.uint16), ([300, 511], np.uint16)]
)
def test_expert_ids_take_the_narrowest_type_that_holds_them(
    experts: list[int], dtype: type
) -> None:  # R1
    for given in ([[experts]], np.array([[experts]]), np.array([[experts]], dtype=np.int16)):
        data = RoutedExperts(data=given).data
        assert data.dtype == dtype
        assert data[0, 0].tolist() == experts


def test_expert_ids_of_the_engines_own_type_are_kept_as_they_are() -> None:
    given = np.zeros((2, 3, 4), dtype=np.uint16)
    assert RoutedExperts(data=given).data is given


@pytest.mark.parametrize(
    "data", [[[[70_000]]], [[[-1]]], [[[0.5]]], [[1]], [], [[[1, 2]], [[3]]], [[["a"]]]], ids=str
)
def test_what_is_no_expert_id_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"dimension|integers|do not fit|inhomogeneous"):
        RoutedExperts(data=data)


@pytest.mark.parametrize(
    "valid", [[(0, 1)], [(2, 5)], [(3, 3)], [(3, 4), (2, 3)], [(2, 4), (3, 4)]], ids=str
)
def test_valid_rows_lie_in_order_inside_the_rows(valid: list[tuple[int, int]]) -> None:
    data = np.zeros((2, 1, 1), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"outside the rows \[2, 4\)"):
        RoutedExperts(data=data, start=2, valid=valid)


def test_each_token_has_its_own_ids_of_a_sampling_mask() -> None:
    """M13."""
    mask = SamplingMask([5, 6, 7], [1, 0, 2])
    assert (mask.token_ids.dtype, mask.counts.dtype) == (np.int32, np.int32)
    assert mask.tolist() == [[5], [], [6, 7]]
    assert [mask.of_token(index).tolist() for index in range(3)] == mask.tolist()
    assert mask.offsets.tolist() == [0, 1, 1, 3]
    assert mask.cut(1, 3) == masked([[], [6, 7]])
    assert mask.cut(1, 1) == masked([])


@pytest.mark.parametrize(
    ("token_ids", "counts", "message"),
    [
        ([1, 2], [1], "2 token ids, its counts add up to 1"),
        ([], [2**31 - 1] * 2, f"0 token ids, its counts add up to {2**32 - 2}"),
        ([1], [2, -1], "a count of -1, below 0"),
        ([2**31], [1], "sampling_mask.token_ids"),
        ([[1]], [1], "sampling_mask.token_ids"),
        ([1], [1.5], "sampling_mask.counts"),
    ],
)
def test_what_is_no_sampling_mask_is_refused(token_ids: Any, counts: Any, message: str) -> None:
    """M13."""
    with pytest.raises(ValueError, match=message):
        SamplingMask(token_ids, counts)


def test_models_are_equal_by_content() -> None:
    nan = float("nan")
    assert record(logprobs=[nan]) == record(logprobs=np.array([nan], dtype=np.float32))
    reward = np.zeros(1, dtype=np.float32)
    different = [
        record(),
        record(logprobs=[0.0]),
        record(logprobs=[nan]),
        record(response_ids=[4]),
        record(prompt_ids=[1, 2, 3]),
        record(response_text=""),
        record(token_level_reward=reward),
        record(routed_experts=RoutedExperts(data=[[[1]]])),
        record(routed_experts=RoutedExperts(data=[[[2]]])),
        record(sampling_mask=masked([[3]])),
        record(sampling_mask=masked([[3, 4]])),
    ]
    assert [[a == b for b in different] for a in different] == np.eye(len(different)).tolist()
