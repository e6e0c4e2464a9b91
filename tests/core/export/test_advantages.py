"""Each run counts once in its group's baseline, whatever becomes of its trajectories."""

from __future__ import annotations

import pytest

from recorder_core import export
from recorder_core.export import ExportError, Rules
from tests.core.export.experiences import experience

GROUP = [experience([1], [2], run=run, reward=reward) for run, reward in enumerate([0.0, 1.0, 2.0])]


def by_run(batch: export.Batch) -> dict[str, list[float | None]]:
    return {run: [row.advantage for row in rows] for run, rows in batch.by_run.items()}


def test_the_advantage_is_the_reward_less_the_groups_mean_over_its_deviation() -> None:
    other = [experience([1], [2], task="u", run=run, reward=10 * run) for run in range(2)]
    batch = export.rows([*GROUP, *other])

    plain = by_run(export.group_advantages(batch, scale="none"))
    scaled = by_run(export.group_advantages(batch))

    assert plain == {"b/t/0": [-1], "b/t/1": [0], "b/t/2": [1], "b/u/0": [-5], "b/u/1": [5]}
    assert scaled["b/t/2"] == [pytest.approx(1 / 1.0001)]
    assert scaled["b/u/1"] == [pytest.approx(5 / (50**0.5 + 1e-4))]
    assert batch[0].advantage is None


def test_one_deviation_can_scale_the_whole_batch() -> None:
    batch = export.group_advantages(export.rows(GROUP), scale="batch")

    assert by_run(batch)["b/t/2"] == [pytest.approx(1 / 1.0001)]


def test_a_branch_changes_no_ones_advantage() -> None:
    branch = [experience([1], [2, 3], run=2, reward=2.0, suffix=s) for s in "yz"]

    alone = by_run(export.group_advantages(export.rows(GROUP)))
    branched = by_run(export.group_advantages(export.rows([*GROUP, *branch])))

    assert branched == {**alone, "b/t/2": alone["b/t/2"] * 3}


@pytest.mark.parametrize("policy", ["drop", "mask"])
def test_an_abort_changes_no_ones_advantage(policy: str) -> None:
    cut = GROUP[0].replace(finish_reason="abort")

    alone = by_run(export.group_advantages(export.rows(GROUP)))
    batch = export.rows([cut, *GROUP[1:]], Rules(aborted=policy))
    found = by_run(export.group_advantages(batch))

    assert {run: found[run] for run in ("b/t/1", "b/t/2")} == {
        run: alone[run] for run in ("b/t/1", "b/t/2")
    }
    assert ("b/t/0" in found) == (policy == "mask")


def test_a_run_without_reward_is_in_no_baseline() -> None:
    unrewarded = experience([1], [2], run=3, reward=None)
    batch = export.rows([*GROUP, unrewarded], Rules(missing_reward="keep"))

    found = by_run(export.group_advantages(batch, scale="none"))

    assert found == {"b/t/0": [-1], "b/t/1": [0], "b/t/2": [1], "b/t/3": [0]}


def test_a_groups_only_run_has_nothing_to_be_compared_with() -> None:
    assert by_run(export.group_advantages(export.rows(GROUP[2:]))) == {"b/t/2": [0]}


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(ExportError, match="'sigma'"):
        export.group_advantages(export.rows(GROUP), scale="sigma")  # type: ignore[arg-type]
