"""Record keys are read strictly, and prefixes match component by component."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from recorder_core import EID, KeyPrefix, RecordKey
from recorder_core.errors import InvalidKeyError

visible = st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="/")
components = st.text(visible, min_size=1, max_size=6).filter(lambda text: text not in (".", ".."))
keys = st.builds(
    RecordKey,
    batch=st.lists(components, min_size=1, max_size=3).map("/".join),
    task=components,
    run=st.integers(0, 10**18 - 1) | components,
)


@pytest.mark.parametrize(
    ("text", "batch", "task", "run"),
    [
        ("12/math-7/3", "12", "math-7", 3),
        ("0/eval_short/1/0", "0/eval_short", "1", 0),
        ("a:b/c?d=e&f/%2e/10", "a:b/c?d=e&f", "%2e", 10),
        ("0/t/3f2a51c0-77aa-4b1e", "0", "t", "3f2a51c0-77aa-4b1e"),
    ],
)
def test_the_batch_may_hold_slashes(text: str, batch: str, task: str, run: int | str) -> None:  # K1
    key = RecordKey.parse(text)
    assert (key.batch, key.task, key.run) == (batch, task, run)
    assert key == RecordKey(batch, task, run)
    assert str(key) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "EMPTY",
        "sk-abc",
        "a/b",
        "../..",
        "../../0",
        "a/./0",
        "a//0",
        "/a/b/0",
        "a/b/0/",
        "a/b/..",
        "a/b/٣",
        "a/b/²",
        "a b/c/0",
        "a/b/0\n",
        "a/b\x00/0",
        "ключ/b/0",
        "a/\ud800/0",
        "a/b/" + "9" * 509,
        "x" * 300_000,
        "/" * 300_000,
        "a/" * 300 + "0",
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_what_is_no_key_is_refused_in_few_words(text: str) -> None:  # K3
    with pytest.raises(InvalidKeyError) as caught:
        RecordKey.parse(text)
    assert len(str(caught.value)) < 4000


@given(st.text() | st.text("ab/.01", max_size=12))
def test_any_text_is_a_key_or_refused(text: str) -> None:  # K3
    try:
        key = RecordKey.parse(text)
    except InvalidKeyError:
        return
    assert str(key) == text


@pytest.mark.parametrize(
    ("batch", "task", "run"),
    [
        *[("a", "b/c", 0), ("a/b", "", 0), ("", "b", 0), ("a/", "b", 0), ("a", "b", -1)],
        *[("a", "b", 10**18), ("a", "b", True), ("a", "b", 1.5), ("a", "b", "b/1"), ("a", "b", "")],
    ],
)
def test_parts_that_would_read_back_as_other_parts_are_refused(
    batch: str, task: str, run: Any
) -> None:
    with pytest.raises(InvalidKeyError):
        RecordKey(batch, task, run)


@pytest.mark.parametrize(
    ("written", "run"),
    [
        *[("0", 0), ("7", 7), ("9" * 18, 10**18 - 1)],
        *[("07", "07"), ("-1", "-1"), ("1.0", "1.0"), ("1_0", "1_0"), ("9" * 19, "9" * 19)],
        *[("x", "x"), ("3f2a51c0-77aa-4b1e-9c2d-0123456789ab",) * 2],
    ],
)
def test_a_run_is_a_number_where_it_is_one_and_else_a_name(written: str, run: int | str) -> None:
    """E6."""
    key = RecordKey.parse(f"b/t/{written}")
    assert key.run == run
    assert type(key.run) is type(run)
    assert RecordKey("b", "t", run) == RecordKey("b", "t", written) == key
    for each in (run, written):
        eid = EID(batch="b", task="t", run=each)
        assert eid == msgspec.json.decode(msgspec.json.encode(eid), type=EID)
        assert (eid.run, eid.key) == (run, key)


def test_an_experience_of_a_run_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="neither is below 0"):
        EID(batch="b", task="t", run=-1)


@given(keys)
def test_a_key_survives_its_text_pickle_and_json(key: RecordKey) -> None:
    class Body(BaseModel):
        key: RecordKey

    read = [
        RecordKey.parse(str(key)),
        pickle.loads(pickle.dumps(key)),
        Body.model_validate_json(Body(key=key).model_dump_json()).key,
    ]
    assert read == [key] * 3
    assert {*read, key} == {key}


def test_a_model_refuses_what_is_no_key() -> None:
    class Body(BaseModel):
        key: RecordKey

    with pytest.raises(ValidationError, match="at least three are needed"):
        Body(key="a/b")


def test_keys_sort_by_the_number_of_the_run_and_names_come_last() -> None:
    """E6."""
    texts = ["a/t/11", "b/t/9", "b/t/10", "b/t/07", "b/t/9a", "b/t/x", "c/t/0"]
    assert [str(key) for key in sorted(map(RecordKey.parse, reversed(texts)))] == texts


@pytest.mark.parametrize(
    ("prefix", "matching"),
    [
        ("", ["1/a/0", "1/b/0", "10/a/0", "1/a/7/1"]),
        ("1", ["1/a/0", "1/b/0", "1/a/7/1"]),
        ("1/", ["1/a/0", "1/b/0", "1/a/7/1"]),
        ("1/a", ["1/a/0", "1/a/7/1"]),
        ("1/a/0", ["1/a/0"]),
        ("1/a/0/0", []),
        ("10", ["10/a/0"]),
        ("0", []),
    ],
)
def test_a_prefix_matches_whole_components(prefix: str, matching: list[str]) -> None:  # K2
    present = ["1/a/0", "1/b/0", "10/a/0", "1/a/7/1"]
    found = [text for text in present if KeyPrefix(prefix).matches(RecordKey.parse(text))]
    assert found == matching


@given(keys, keys, st.integers(0, 5))
def test_a_prefix_matches_as_text_that_ends_in_a_slash(
    key: RecordKey, other: RecordKey, count: int
) -> None:
    prefix = KeyPrefix("/".join(other.parts[:count]))
    assert KeyPrefix("/".join(key.parts[:count])).matches(key)
    assert prefix.matches(key) == (
        not prefix.parts or f"{key}/".startswith("/".join(prefix.parts) + "/")
    )


@pytest.mark.parametrize("text", ["//", "/a", "a//b", "..", "a/../b", "a b", "ü", "x" * 600])
def test_what_is_no_prefix_is_refused(text: str) -> None:
    with pytest.raises(InvalidKeyError):
        KeyPrefix(text)
