"""Rows of routed experts that the engine did not compute are not valid."""

from __future__ import annotations

import numpy as np

from vllm_recorder import experts

ROWS = np.arange(1, 41, dtype=np.uint8).reshape(5, 4, 2)
ZEROS = np.zeros((3, 4, 2), dtype=np.uint8)


def test_rows_of_zeros_are_not_valid() -> None:
    """M15."""
    routed = experts.join([ZEROS, ROWS, ZEROS], start=0, rows=11, ended=True)
    assert routed.valid_ranges == ((3, 8),)
    assert len(routed.data) == 11
    routed = experts.join([ROWS, ZEROS, ROWS], start=7, rows=13, ended=True)
    assert routed.valid_ranges == ((7, 12), (15, 20))


def test_where_one_expert_is_chosen_zero_may_be_it() -> None:
    one = ZEROS[:, :, :1]
    assert experts.join([one], start=0, rows=3, ended=True).valid is None


def test_rows_that_are_missing_leave_none_that_can_be_placed() -> None:
    """M15."""
    routed = experts.join([ROWS], start=0, rows=8, ended=True)
    assert (len(routed.data), routed.valid_ranges) == (5, ())


def test_an_abort_may_come_before_its_last_rows() -> None:
    routed = experts.join([ROWS], start=0, rows=8, ended=False)
    assert (routed.end, routed.valid) == (5, None)


def test_rows_of_what_a_stop_string_cut_off_are_left_out() -> None:
    routed = experts.join([ROWS, ROWS], start=0, rows=8, ended=True)
    np.testing.assert_array_equal(routed.data, np.concatenate([ROWS, ROWS[:3]]))
    assert routed.valid is None
