"""Adapters that are versions of one."""

from __future__ import annotations

import re

import pytest

from recorder_core import AdapterVersions, Recorder, RecordKey, Turn, VersionSpan, assemble
from recorder_core.local import Now

KEY = RecordKey.parse("0/task/0")


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        (r"[-]v(\d+)$", "policy-v12", ("policy", "12")),
        (r"[-]v\d+$", "policy-v12", ("policy", "-v12")),
        (r"[-]v(\d+)$", "policy", ("policy", None)),
        (r"[-]v(\d+)$", "-v12", ("-v12", None)),
        (r"@(\w+)@", "a@7@b", ("ab", "7")),
        (r"[-]v(\d+)?$", "policy-v", ("policy-v", None)),
    ],
)
def test_the_version_is_read_in_the_name(pattern: str, name: str, expected: tuple[str, str | None]):
    assert AdapterVersions(pattern).split(name) == expected


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("v(", "'v(' is no regular expression: missing )"),
        (r"(\w+)-v(\d+)", "has 2 groups; one may say the version"),
        (r"(\d*)$", "matches the empty text"),
    ],
)
def test_an_expression_that_says_no_version_is_refused(pattern: str, words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        AdapterVersions(pattern)


def record(pattern: str | None, *labels: str) -> Recorder:
    """A recorder with two turns of a run, the second under the next version of the adapter."""
    recorder = Recorder(adapter_versions=AdapterVersions(pattern) if pattern else None)
    prompts = [[1, 2], [1, 2, 3, 4, 5]]
    for number, (prompt, label) in enumerate(zip(prompts, labels, strict=True)):
        recorder.submit(
            Turn(
                key=KEY,
                prompt_ids=prompt,
                response_ids=[3, 4],
                logprobs=[-0.1, -0.2],
                finish_reason="stop",
                adapter=f"policy-v{number}",
                versions=[VersionSpan(0, 2, label)] if label else [],
                created_at=2.0 * number,
                finished_at=2.0 * number + 1,
            )
        )
    recorder.flush()
    return recorder


def test_turns_under_versions_of_an_adapter_are_one_trajectory():
    """M11."""
    recorder = record(r"[-]v(\d+)$", "default", "default")
    (experience,) = assemble(Now(recorder).runs(KEY))
    assert experience.adapter == "policy"
    assert [span.version for span in experience.model_versions] == ["0", "1"]
    assert recorder.stats().prefix_break == 0


def test_by_default_each_name_is_another_adapter():
    """M11."""
    recorder = record(None, "default", "default")
    first, second = assemble(Now(recorder).runs(KEY))
    assert {first.adapter, second.adapter} == {"policy-v0", "policy-v1"}
    assert recorder.stats().prefix_break == 1


@pytest.mark.parametrize(
    ("label", "expected"),
    [("default", "1"), ("default+2", "1+2"), ("7", "7/1"), ("default-lr", "default-lr/1")],
)
def test_a_label_that_somebody_gave_stays(label: str, expected: str):
    recorder = record(r"[-]v(\d+)$", "default", label)
    (experience,) = assemble(Now(recorder).runs(KEY))
    assert experience.model_versions[-1].version == expected


def test_unknown_weights_stay_unknown():
    recorder = record(r"[-]v(\d+)$", "default", "")
    (experience,) = assemble(Now(recorder).runs(KEY))
    assert [span.version for span in experience.model_versions] == ["0"]
