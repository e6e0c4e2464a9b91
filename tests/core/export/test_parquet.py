"""Parquet gives back exactly what was written, a row group at a time."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from recorder_core import (
    FinishReason,
    MultiModalItem,
    RoutedExperts,
    Sampling,
    SamplingMask,
    VersionSpan,
    assemble,
)
from tests.core.builders import forests, record_all
from tests.core.export.experiences import experience, turn

pa = pytest.importorskip("pyarrow")

import pyarrow.parquet as pq  # noqa: E402

from recorder_core.export import ExportError, parquet  # noqa: E402

NAN = math.nan

FULL = experience(
    [1, 2],
    [3, 4, 5],
    logprobs=[-0.1, NAN, -math.inf],
    action_mask=[True, False, True],
    token_level_reward=[0, 0.5, 1],
    advantages=[1, NAN, 2],
    returns=[1, 2, 3],
    teacher_logprobs=[-1, NAN, -3],
    reward=0.1,
    info={"score": {"parts": [1, 2.5, None]}},
    metrics={"length": 3.0},
    prompt_text="é",
    response_text="\x00 alone",
    messages=[{"role": "user", "content": "é"}],
    tools=[{"type": "function"}],
    truncate_status="response_truncated",
    finish_reason=FinishReason.LENGTH,
    routed_experts=RoutedExperts(
        data=np.array([[[300, 1]], [[2, 3]], [[4, 5]]], np.uint16), start=1, valid=((1, 2), (3, 4))
    ),
    sampling_mask=SamplingMask([3, 9, 5], [2, 0, 1]),
    model_versions=(VersionSpan(0, 1, "step-7"), VersionSpan(2, 3, "8")),
    sampling=Sampling(temperature=0.7, top_k=20, logprobs_mode="processed_logprobs"),
    adapter="lora",
    turns=(turn(0, 1, "constrained", temperature=0.7), turn(2, 3)),
    multi_modal_inputs=(MultiModalItem(modality="image", offset=0, length=1, identity="cat"),),
)
BARE = experience([], [], logprobs=None, reward=None, finish_reason=None)


def test_everything_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"

    assert parquet.write(file, [FULL, BARE]) == 2

    assert list(parquet.read(file)) == [FULL, BARE]
    assert list(tmp_path.iterdir()) == [file]


@given(forests())
@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_whatever_was_recorded_comes_back(tmp_path: Path, forest: list[Any]) -> None:
    experiences = assemble(record_all(forest).records)

    parquet.write(tmp_path / "x.parquet", experiences, rows_per_group=2)

    assert list(parquet.read(tmp_path / "x.parquet")) == experiences


def test_other_tools_find_plain_columns_and_null_for_what_is_unknown(tmp_path: Path) -> None:
    parquet.write(tmp_path / "x.parquet", [FULL])

    (row,) = pq.read_table(tmp_path / "x.parquet").to_pylist()

    assert (row["batch"], row["task"], row["run"]) == ("b", "t", "0")
    assert row["tokens"] == [1, 2, 3, 4, 5]
    assert row["logprobs"] == [pytest.approx(-0.1), None, -math.inf]
    assert row["action_mask"] == [True, False, True]
    assert row["model_versions"][0] == {"start": 0, "end": 1, "version": "step-7"}
    assert row["routed_experts"]["dtype"] == "uint16"
    assert row["sampling_mask"] == [[3, 9], [], [5]]


def test_a_file_from_before_sampling_masks_is_read(tmp_path: Path) -> None:
    """M13."""
    bare = FULL.replace(sampling_mask=None)
    parquet.write(tmp_path / "now.parquet", [bare])
    pq.write_table(
        pq.read_table(tmp_path / "now.parquet").drop_columns("sampling_mask"),
        tmp_path / "before.parquet",
    )

    assert list(parquet.read(tmp_path / "before.parquet")) == [bare]


def test_nobody_ever_holds_more_than_a_row_group(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"

    def stream() -> Any:
        for number in range(25):
            yield experience([1], [2], run=number)

    parquet.write(file, stream(), rows_per_group=10)
    found = parquet.read(file)
    read = [next(found) for _ in range(3)]

    assert [each.eid.run for each in read] == [0, 1, 2]
    sizes = pq.ParquetFile(file).metadata
    assert [sizes.row_group(i).num_rows for i in range(sizes.num_row_groups)] == [10, 10, 5]


def test_several_readers_share_the_row_groups(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    parquet.write(file, [experience([1], [2], run=run) for run in range(9)], rows_per_group=2)

    parts = [[each.eid.run for each in parquet.read(file, part=part, parts=2)] for part in (0, 1)]

    assert parts == [[0, 1, 4, 5, 8], [2, 3, 6, 7]]
    with pytest.raises(ExportError, match="part is 2 of 2"):
        next(parquet.read(file, part=2, parts=2))


def test_several_drains_go_into_one_file(tmp_path: Path) -> None:
    with parquet.Writer(tmp_path / "x.parquet") as writer:
        writer.write([FULL])
        writer.write([])
        writer.write([BARE])

    assert writer.rows == 2
    assert list(parquet.read(tmp_path / "x.parquet")) == [FULL, BARE]


def test_a_file_of_no_experiences_is_a_file(tmp_path: Path) -> None:
    assert parquet.write(tmp_path / "x.parquet", []) == 0

    assert list(parquet.read(tmp_path / "x.parquet")) == []


def test_what_fails_leaves_neither_file_nor_half_a_file(tmp_path: Path) -> None:
    def broken() -> Any:
        yield FULL
        raise OSError("the drain failed")

    with pytest.raises(OSError, match="drain"):
        parquet.write(tmp_path / "x.parquet", broken(), rows_per_group=1)

    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "other.parquet")
    with pytest.raises(ExportError, match=r"holds no experiences; its columns are \['text'\]"):
        next(parquet.read(tmp_path / "other.parquet"))
    odd = BARE.replace(response_text="\ud800")
    with pytest.raises(ExportError, match="lone surrogate"):
        parquet.write(tmp_path / "x.parquet", [odd])
    with pytest.raises(ExportError, match="rows_per_group is 0"):
        parquet.write(tmp_path / "x.parquet", [BARE], rows_per_group=0)


def test_workers_of_a_data_loader_share_a_file(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    from recorder_core.export.datasets import ExperienceDataset

    file = tmp_path / "x.parquet"
    parquet.write(file, [experience([1], [2], run=run) for run in range(10)], rows_per_group=2)

    def read(workers: int, **shard: int) -> list[int]:
        loader = DataLoader(
            ExperienceDataset([file], **shard), batch_size=None, num_workers=workers
        )
        return sorted(each.eid.run for each in loader)

    assert read(0) == read(2) == list(range(10))
    shards = [read(2, rank=rank, ranks=2) for rank in range(2)]
    assert sorted(shards[0] + shards[1]) == list(range(10))
    assert all(shards)


def test_a_file_is_a_data_set_of_hugging_faces(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "x.parquet"
    parquet.write(file, [experience([1], [2, 3], run=run) for run in range(3)])

    loaded = datasets.load_dataset(
        "parquet", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache")
    )

    assert loaded["run"][:] == ["0", "1", "2"]
    assert loaded[0]["tokens"] == [1, 2, 3]


def test_without_pyarrow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "recorder_core.export.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(ImportError, match=r"recorder-core\[parquet\]"):
        importlib.import_module("recorder_core.export.parquet")
