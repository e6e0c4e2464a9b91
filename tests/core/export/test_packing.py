"""Packs keep to their budget, hold everything once, and are even over the ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder_core.export import ExportError
from recorder_core.export.packing import pack


def test_short_sequences_fill_up_the_packs_of_long_ones() -> None:
    ((first, second),) = pack([7, 3, 6, 4], 10)

    assert sorted([first, second]) == [[0, 1], [2, 3]]


def test_every_rank_gets_as_many_packs_and_about_as_many_tokens() -> None:
    lengths = [9, 8, 7, 6, 5, 4, 3, 2]

    dealt = pack(lengths, 12, ranks=2)

    assert [len(packs) for packs in dealt] == [2, 2]
    loads = [sum(lengths[i] for each in packs for i in each) for packs in dealt]
    assert max(loads) - min(loads) <= 1


def test_more_packs_are_made_where_the_fewest_do_not_fit() -> None:
    assert pack([6, 6, 6], 10) == [[[0], [1], [2]]]


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ExportError, match=r"1 sequences are longer .* the longest has 11 tokens"):
        pack([3, 11], 10)
    with pytest.raises(ExportError, match=r"3 sequences do not fill packs .* that 2 ranks"):
        pack([9, 9, 9], 10, ranks=2)
    with pytest.raises(ExportError, match="0 sequences"):
        pack([], 10)
    with pytest.raises(ExportError, match="token_budget 0"):
        pack([1], 0)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.integers(50, 200),
    st.integers(1, 4),
)
def test_each_sequence_is_in_one_pack_within_the_budget(
    lengths: list[int], budget: int, ranks: int
) -> None:
    try:
        dealt = pack(lengths, budget, ranks=ranks)
    except ExportError:
        # Only where one sequence per pack would not come out even for the ranks.
        assert len(lengths) % ranks or len(lengths) < ranks
        return

    assert len(dealt) == ranks
    assert len({len(packs) for packs in dealt}) == 1
    packs = [each for packs in dealt for each in packs]
    assert sorted(index for each in packs for index in each) == list(range(len(lengths)))
    assert all(each and sum(lengths[index] for index in each) <= budget for each in packs)
