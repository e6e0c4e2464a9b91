"""The normal form: what is trained is exact, the rest is counted, what could be wrong refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recorder_core import FinishReason, MultiModalItem, RoutedExperts, Sampling, VersionSpan, export
from recorder_core.export import ExportError, Rules
from tests.core.export.experiences import experience, turn

NAN = math.nan


def test_a_row_holds_a_value_for_each_token_at_that_token() -> None:
    source = experience(
        [1, 2, 3],
        [10, 11, 20, 12],
        logprobs=[-0.25, -0.5, NAN, -1.0],
        action_mask=[True, True, False, True],
        model_versions=[VersionSpan(0, 2, "v9"), VersionSpan(3, 4, "10")],
        reward=0.5,
    )

    (row,) = export.rows([source])

    assert row.tokens.tolist() == [1, 2, 3, 10, 11, 20, 12]
    assert row.prompt_length == 3
    assert row.mask.tolist() == [False, False, False, True, True, False, True]
    assert row.logprobs.tolist() == [0, 0, 0, -0.25, -0.5, 0, -1.0]
    assert row.versions.tolist() == [-1, -1, -1, 9, 9, -1, 10]
    assert row.version_range() == (9, 10)
    assert (row.group, row.run, row.index) == ("b/t", "b/t/0", 0)
    assert (row.reward, row.advantage, row.status) == (0.5, None, "completed")
    dtypes = [each.dtype.name for each in (row.tokens, row.mask, row.logprobs, row.versions)]
    assert dtypes == ["int32", "bool", "float32", "int64"]


def test_without_an_action_mask_every_response_token_is_trained() -> None:
    (row,) = export.rows([experience([1], [2, 3])])

    assert row.mask.tolist() == [False, True, True]


def test_a_trained_token_without_a_finite_logprob_is_refused_by_name_or_masked() -> None:
    holes = experience([1], [2, 3, 4], logprobs=[-0.5, NAN, -math.inf], suffix="holes")

    with pytest.raises(ExportError, match=r"b/t/0/0/holes \(2 of 3\); missing_logprobs='mask'"):
        export.rows([holes, experience([1], [2])])
    batch = export.rows([holes], Rules(missing_logprobs="mask"))

    assert batch[0].mask.tolist() == [False, True, False, False]
    assert batch[0].logprobs.tolist() == [0, -0.5, 0, 0]
    assert batch.report.masked_tokens == {"missing_logprobs": 2}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7, "logprobs_mode": "raw_logprobs"},
        {"temperature": 0.7, "logprobs_mode": "original_logprobs"},
        {"temperature": 0.7},
        {"temperature": 0.0, "logprobs_mode": "processed_logprobs"},
        {"temperature": 1.0, "top_p": 0.9, "logprobs_mode": "processed_logprobs"},
        {"temperature": 1.0, "top_k": 20, "logprobs_mode": "raw_logprobs"},
        {"temperature": 1.0, "min_p": 0.1, "logprobs_mode": "temperature_logprobs"},
        {"temperature": 1.0, "logprobs_mode": "processed_logits"},
    ],
)
def test_logprobs_of_another_distribution_than_the_trainers_are_refused_or_masked(
    sampling: dict[str, Any],
) -> None:
    """M9."""
    source = experience([1], [2, 3, 9, 4], turns=[turn(0, 2, temperature=1.0), turn(3, 4)])
    odd = source.replace(turns=(source.turns[0], turn(3, 4, **sampling)))
    rules = {"mixed_temperatures": "keep"}

    with pytest.raises(ExportError, match="inexact_logprobs='mask'"):
        export.rows([odd], Rules(**rules))
    masked = export.rows([odd], Rules(inexact_logprobs="mask", **rules))
    kept = export.rows([odd], Rules(inexact_logprobs="keep", **rules))

    assert masked[0].mask.tolist() == [False, True, True, True, False]
    assert masked.report.masked_tokens == {"inexact_logprobs": 1}
    assert kept[0].mask.tolist() == [False, True, True, True, True]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0, "logprobs_mode": "raw_logprobs"},
        {"temperature": 1.0, "top_k": -1, "logprobs_mode": "raw_logprobs"},
        {"temperature": 0.7, "top_k": 1 << 30, "logprobs_mode": "temperature_logprobs"},
        {"temperature": 0.7, "top_p": 1.0, "logprobs_mode": "processed_logprobs"},
    ],
)
def test_logprobs_that_a_trainer_recomputes_pass(sampling: dict[str, Any]) -> None:
    batch = export.rows([experience([1], [2], turns=[turn(0, 1, **sampling)])])

    assert batch[0].trained_tokens == 1
    assert batch.temperature == sampling.get("temperature")


def test_the_sampling_of_an_experience_without_turns_is_looked_at_too() -> None:
    source = experience([1], [2], sampling=Sampling(temperature=0.5))

    with pytest.raises(ExportError, match=r"logprobs of an unknown mode, temperature 0\.5"):
        export.rows([source])


@pytest.mark.parametrize(
    ("flag", "rule", "default"),
    [
        ("logprobs_implausible", "implausible_logprobs", "error"),
        ("constrained", "constrained", "error"),
        ("biased", "biased", "error"),
        ("forced_tokens", "forced_tokens", "mask"),
    ],
)
def test_a_flagged_generation_follows_its_rule(flag: str, rule: str, default: str) -> None:
    source = experience([1], [2, 3], turns=[turn(0, 1, flag, "other"), turn(1, 2, "other")])

    def trained(policy: str) -> list[bool]:
        return export.rows([source], Rules(**{rule: policy}))[0].mask.tolist()

    assert getattr(Rules(), rule) == default
    assert trained("keep") == [False, True, True]
    assert trained("mask") == [False, False, True]
    with pytest.raises(ExportError, match=f"b/t/0/0/x; {rule}='mask'"):
        trained("error")


def test_a_flagged_generation_that_is_trained_elsewhere_is_no_matter() -> None:
    source = experience(
        [1], [2, 3], action_mask=[False, True], turns=[turn(0, 1, "constrained"), turn(1, 2)]
    )

    assert export.rows([source])[0].mask.tolist() == [False, False, True]


ABORTED = experience([1], [2, 3], finish_reason="abort", suffix="cut", run=1)
TRUNCATED = experience([1], [2, 3], finish_reason="length", suffix="long", run=2)
WHOLE = experience([1], [2, 3], suffix="whole", run=3)


@pytest.mark.parametrize(
    ("rule", "source", "default"),
    [
        ("aborted", ABORTED, "drop"),
        ("aborted", ABORTED.replace(finish_reason=FinishReason.ERROR), "drop"),
        ("truncated", TRUNCATED, "keep"),
        ("incomplete", experience([1], [2, 3], run=4), "drop"),
        ("empty", experience([1], [2, 3], action_mask=[False, False]), "drop"),
        ("missing_reward", experience([1], [2, 3], reward=NAN, run=5), "error"),
        ("missing_reward", experience([1], [2, 3], reward=1e39, run=5), "error"),
        ("multi_modal", experience([1, -1], [2, 3]), "error"),
        (
            "multi_modal",
            experience(
                [1],
                [2, 3],
                multi_modal_inputs=[
                    MultiModalItem(modality="image", offset=0, length=1, identity="cat")
                ],
            ),
            "error",
        ),
    ],
)
def test_a_whole_trajectory_follows_its_rule(rule: str, source: Any, default: str) -> None:
    def made(policy: str) -> export.Batch:
        return export.rows([source, WHOLE], Rules(**{rule: policy}), incomplete=["b/t/4"])

    sampled = 0 if rule == "empty" else 2
    assert getattr(Rules(), rule) == default
    assert [row.trained_tokens for row in made("keep")] == [sampled, 2]
    assert [row.trained_tokens for row in made("mask")] == [0, 2]
    dropped = made("drop")
    assert [row.run for row in dropped] == ["b/t/3"]
    assert dropped.report.dropped == {rule: 1}
    assert dropped.report.dropped_tokens == {rule: sampled}
    assert len(dropped.runs) == 2
    with pytest.raises(ExportError, match=f"{source.eid}"):
        made("error")


def test_the_trajectories_of_a_run_have_one_reward() -> None:
    low, high = experience([1], [2], reward=0.0), experience([1], [3], reward=3.0, suffix="y")
    late = experience([1], [4], reward=None, suffix="late")

    with pytest.raises(ExportError, match=r"b/t/0 \[0.0, 3.0\]; reward='mean', 'max' or 'last'"):
        export.rows([low, high])
    rewards = {
        how: [row.reward for row in export.rows([high, low, late], Rules(reward=how))]
        for how in ("mean", "max", "last")
    }

    assert rewards == {"mean": [1.5] * 3, "max": [3.0] * 3, "last": [0.0] * 3}
    assert [row.reward for row in export.rows([high, late])] == [3.0, 3.0]
    assert [row.index for row in export.rows([high, late])] == [0, 1]


def test_stale_tokens_are_counted_from_the_oldest_version() -> None:
    mixed = experience(
        [1], [2, 3, 4], model_versions=[VersionSpan(0, 1, "3"), VersionSpan(1, 3, "5")]
    )

    def made(**rules: Any) -> export.Batch:
        return export.rows([mixed], Rules(current=6, **rules))

    assert len(made(max_staleness=3)) == 1
    assert made(max_staleness=2).report.dropped == {"stale": 1}
    masked = made(max_staleness=2, stale="mask")
    assert masked[0].mask.tolist() == [False, False, True, True]
    assert masked.report.masked_tokens == {"stale": 1}


def test_labels_that_are_no_numbers_are_refused_only_where_numbers_are_needed() -> None:
    source = experience([1], [2], model_versions=[VersionSpan(0, 1, "step-8")])
    by_hand = Rules(version=lambda label: int(label.removeprefix("step-")))

    (row,) = export.rows([source])
    assert row.versions.tolist() == [-1, -1]
    with pytest.raises(ExportError, match="its labels are \\['step-8'\\]"):
        row.version_range()
    with pytest.raises(ExportError, match="version of trained tokens is not known"):
        export.rows([source], Rules(current=9, max_staleness=1))
    assert export.rows([source], by_hand)[0].versions.tolist() == [-1, 8]


def test_different_adapters_or_temperatures_in_one_batch_are_refused() -> None:
    plain, tuned = experience([1], [2]), experience([1], [2], adapter="a", suffix="y")
    warm = experience(
        [1],
        [2],
        suffix="z",
        turns=[turn(0, 1, temperature=0.5, logprobs_mode="processed_logprobs")],
    )

    with pytest.raises(ExportError, match="None in b/t/0/0/x, a in b/t/0/0/y"):
        export.rows([plain, tuned])
    assert len(export.rows([plain, tuned], Rules(mixed_adapters="keep"))) == 2
    with pytest.raises(ExportError, match="several temperatures"):
        export.rows([plain, warm])
    mixed = export.rows([plain, warm], Rules(mixed_temperatures="keep"))
    with pytest.raises(ExportError, match="several temperatures"):
        _ = mixed.temperature


def test_one_error_names_all_that_is_wrong_and_stays_short() -> None:
    sources = [experience([1], [2], logprobs=None, reward=None, run=run) for run in range(99)]

    with pytest.raises(ExportError) as caught:
        export.rows([*sources, experience([1], [2], logprobs=None, run=100)])

    assert "no trajectory of the run has a finite reward: b/t/0/0/x" in str(caught.value)
    assert "and 94 more; reward the runs" in str(caught.value)
    assert "b/t/100/0/x (1 of 1)" in str(caught.value)


def test_a_rule_that_is_not_known_is_refused() -> None:
    with pytest.raises(ExportError, match="aborted is 'ignore', it must be one of"):
        Rules(aborted="ignore")  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="current"):
        Rules(max_staleness=1)


def test_experts_come_in_as_many_rows_as_a_trainer_wants() -> None:
    routed = RoutedExperts(
        data=np.array([[[300]], [[9]], [[7]]], np.uint16), start=1, valid=((1, 2), (3, 4))
    )
    (row,) = export.rows([experience([1, 2], [3, 4, 5], routed_experts=routed)])

    found = row.routed(5)

    assert found is not None
    assert found[0][:, 0, 0].tolist() == [0, 300, 0, 7, 0]
    assert found[1].tolist() == [False, True, False, True, False]
    assert export.rows([WHOLE])[0].routed(3) is None


def test_the_experiences_are_left_as_they_are() -> None:
    source = experience([1], [2, 3], action_mask=[True, True], logprobs=[-0.5, NAN])
    before = copy.deepcopy(source)

    export.rows([source], Rules(missing_logprobs="mask"))

    assert source == before


@st.composite
def odd_experiences(draw: st.DrawFn) -> list[Any]:
    made = []
    for number in range(draw(st.integers(0, 8))):
        count = draw(st.integers(0, 5))
        cut = draw(st.integers(0, count))
        flags = st.lists(st.sampled_from(["constrained", "biased", "forced_tokens"]), max_size=2)
        spans = [(0, cut), (cut, count)]
        made.append(
            experience(
                [1],
                list(range(count)),
                task=draw(st.sampled_from("tu")),
                run=draw(st.integers(0, 2)),
                suffix=str(number),
                reward=draw(st.sampled_from([None, 0.0, 1.0, NAN])),
                logprobs=draw(st.none() | st.just([-0.5, NAN, -1, -math.inf, -2][:count])),
                action_mask=draw(
                    st.none() | st.lists(st.booleans(), min_size=count, max_size=count)
                ),
                finish_reason=draw(st.sampled_from(FinishReason)),
                model_versions=[
                    VersionSpan(a, b, draw(st.sampled_from("358"))) for a, b in spans if a < b
                ],
                turns=[turn(a, b, *draw(flags)) for a, b in spans if a < b],
            )
        )
    return made


@given(odd_experiences(), st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_report_adds_up_and_what_is_trained_is_sound(sources: list[Any], data: Any) -> None:
    policies = {
        rule: data.draw(st.sampled_from(["drop", "mask", "keep"]))
        for rule in ("aborted", "truncated", "incomplete", "empty", "missing_reward")
    } | {rule: data.draw(st.sampled_from(["mask", "keep"])) for rule in ("constrained", "biased")}
    rules = Rules(
        missing_logprobs="mask",
        reward="mean",
        current=8,
        max_staleness=data.draw(st.integers(0, 5)),
        stale=data.draw(st.sampled_from(["drop", "mask"])),
        **policies,
    )

    batch = export.rows(sources, rules, incomplete=["b/t/1"])

    report = batch.report
    assert report.experiences == len(sources)
    assert report.rows == len(batch) == report.experiences - sum(report.dropped.values())
    lost = sum(report.masked_tokens.values()) + sum(report.dropped_tokens.values())
    assert report.sampled_tokens == report.trained_tokens + lost
    for row in batch:
        assert np.isfinite(row.logprobs).all()
        assert not row.mask[: row.prompt_length].any()
        assert (row.logprobs[row.mask] < 0).all()
        assert (row.versions[row.mask] >= 0).all()
