"""What is worked out from the engine's messages: labels over tokens, and rows of experts."""

from __future__ import annotations

import base64
from types import SimpleNamespace

import numpy as np
import pytest

from recorder_core import VersionSpan
from sglang_recorder import experts
from sglang_recorder.weights import APPROXIMATE, Label, LabelsInForce


def engine_spans(*spans: tuple[int, int, str]) -> list[SimpleNamespace]:
    return [SimpleNamespace(start=a, end=b, version=label) for a, b, label in spans]


def test_the_engines_own_spans_stand_as_they_are_and_end_where_the_reply_does() -> None:
    labels = LabelsInForce(Label("old"))
    labels.change(Label("new"), 23)  # seen a little later than it was
    found = labels.spans(engine_spans((0, 20, "old"), (20, 40, "new")), 30)
    assert found == ((VersionSpan(0, 20, "old"), VersionSpan(20, 30, "new")), ())


def test_a_change_that_the_engine_was_not_told_of_splits_its_span() -> None:
    """M10."""
    labels = LabelsInForce(Label("7"))
    labels.change(Label("7", 1), 10)
    found = labels.spans(engine_spans((0, 30, "7")), 30)
    assert found == ((VersionSpan(0, 10, "7"), VersionSpan(10, 30, "7+1")), (APPROXIMATE,))
    # The label that is told then counts from its own boundary on.
    labels.change(Label("8"), 22)
    spans, _ = labels.spans(engine_spans((0, 20, "7"), (20, 30, "8")), 30)
    assert [tuple(each) for each in spans] == [(0, 10, "7"), (10, 20, "7+1"), (20, 30, "8")]


def test_without_spans_of_the_engine_the_labels_seen_are_taken() -> None:
    labels = LabelsInForce(Label(""))
    labels.change(Label("1"), 4)
    labels.change(Label("1"), 6)
    labels.change(Label("1", 1), 8)
    assert labels.spans(None, 9) == (
        (VersionSpan(4, 8, "1"), VersionSpan(8, 9, "1+1")),
        (APPROXIMATE,),
    )
    assert labels.spans(None, 4) == ((), ())
    assert labels.spans((), 9)[0] == ()


def encoded(data: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> str:
    return base64.b64encode(data.tobytes()).decode()


def test_a_row_of_zeros_is_none_that_a_router_gave() -> None:
    """M15."""
    data = np.tile(np.array([3, 0], dtype=np.int32), (6, 4, 1))
    whole = experts.decode(encoded(data), 6, 2, start=1, computed_from=0)
    assert whole.valid_ranges == ((1, 7),)
    data[[0, 3]] = 0
    holes = experts.decode(encoded(data), 6, 2, start=1, computed_from=0)
    assert holes.valid_ranges == ((2, 4), (5, 7))
    later = experts.decode(encoded(data), 6, 2, start=1, computed_from=6)
    assert later.valid_ranges == ((6, 7),)
    nothing = experts.decode(encoded(0 * data), 6, 2, start=1, computed_from=0)
    assert nothing.valid_ranges == ()


@pytest.mark.parametrize("layers", [1, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_that_do_not_fit_the_tokens_are_told_before_they_are_decoded(
    rows: int, layers: int
) -> None:
    """M15."""
    text = encoded(np.ones((rows, layers, 2), dtype=np.int32))
    assert experts.fits(text, rows, 2)
    assert experts.decode(text, rows, 2, start=0, computed_from=0).data.shape == (rows, layers, 2)
    assert not experts.fits(text, 0, 2)
    assert not experts.fits(text, 7, 2)
    assert not experts.fits("", rows, 2)
