"""Experiences as Parquet files, both ways and without loss.

One row per trajectory. What a program wants to select by or compute with is a column of its own;
all the rest (turns, sampling, info, metrics, messages …) is JSON in the column `rest`. Unknown
numbers are null, never NaN. Files are written and read a row group at a time, so that neither side
ever holds more than that.

Needs pyarrow: `pip install recorder-core[parquet]`.

| column | type |
| --- | --- |
| `batch`, `task`, `run`, `suffix` / `step` | string / int64: the parts of the `eid` |
| `tokens` / `prompt_length` | list<int32> / int32 |
| `logprobs`, `token_level_reward`, `advantages`, `returns`, `teacher_logprobs` | list<float32> |
| `action_mask` | list<bool> |
| `reward` | float64 |
| `model_versions` | list<struct<start: int32, end: int32, version: string>> |
| `finish_reason`, `adapter`, `prompt_text`, `response_text` | string |
| `routed_experts` | struct<data: large_binary, dtype, shape, start, valid> |
| `sampling_mask` | list<large_list<int32>>: the ids of each response token |
| `rest` | string, JSON |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from typing_extensions import Self

from recorder_core.arrays import AnyArray
from recorder_core.codec import decode_hook, encode_hook
from recorder_core.errors import ExportError, InvalidKeyError
from recorder_core.experience import EID, Experience, ExperienceTurn
from recorder_core.records import (
    NEUTRAL,
    FinishReason,
    MultiModalItem,
    RoutedExperts,
    Sampling,
    VersionSpan,
)
from recorder_core.sampling_mask import SamplingMask

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ModuleNotFoundError as error:
    raise ImportError(
        "recorder_core.export.parquet needs pyarrow, which is not installed: "
        'pip install "recorder-core[parquet]"'
    ) from error

ROWS_PER_GROUP = 256

_IDENTITY = ("batch", "task", "run", "step", "suffix")
_TEXTS = ("finish_reason", "adapter", "prompt_text", "response_text")
_LISTS = {
    "tokens": pa.int32(),
    "logprobs": pa.float32(),
    "action_mask": pa.bool_(),
    "token_level_reward": pa.float32(),
    "advantages": pa.float32(),
    "returns": pa.float32(),
    "teacher_logprobs": pa.float32(),
}
_SPANS = pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", pa.string())]))
_EXPERTS = pa.struct(
    [
        ("data", pa.large_binary()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int32())),
        ("start", pa.int32()),
        ("valid", pa.list_(pa.list_(pa.int32()))),
    ]
)
_MASK = pa.list_(pa.large_list(pa.int32()))
SCHEMA = pa.schema(
    [
        *[(name, pa.int64() if name == "step" else pa.string()) for name in _IDENTITY],
        ("prompt_length", pa.int32()),
        *[(name, pa.list_(type_)) for name, type_ in _LISTS.items()],
        ("reward", pa.float64()),
        ("model_versions", _SPANS),
        *[(name, pa.string()) for name in _TEXTS],
        ("routed_experts", _EXPERTS),
        ("sampling_mask", _MASK),
        ("rest", pa.string()),
    ],
    metadata={"recorder": "experiences"},
)
"""The columns of a file."""


class _Rest(msgspec.Struct, omit_defaults=True):
    """What has no column of its own."""

    info: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    truncate_status: str | None = None
    sampling: Sampling = NEUTRAL
    turns: tuple[ExperienceTurn, ...] = ()
    multi_modal_inputs: tuple[MultiModalItem, ...] = ()


_REST = _Rest.__struct_fields__
_decoder = msgspec.json.Decoder(_Rest, dec_hook=decode_hook)


class Writer:
    """Writes experiences to one file as they come, for example from one drain after another.

    The file is there, whole, when the block ends well; until then it is `<path>.partial`.

    Args:
        path: Of the file.
        rows_per_group: Trajectories that are held in memory and written together.

    Example:
        >>> with export.parquet.Writer("batch-12.parquet") as writer:
        ...     for prefix in prefixes:
        ...         with records.drain(prefix) as drained:
        ...             writer.write(drained.experiences)
    """

    def __init__(self, path: str | Path, *, rows_per_group: int = ROWS_PER_GROUP) -> None:
        if rows_per_group < 1:
            raise ExportError(f"rows_per_group is {rows_per_group}, it must be 1 or more")
        self._path = Path(path)
        self._partial = self._path.with_name(self._path.name + ".partial")
        self._rows_per_group = rows_per_group
        self._waiting: list[Experience] = []
        self._file: Any = None
        self.rows = 0
        """Trajectories given so far."""

    def __enter__(self) -> Self:
        self._file = pq.ParquetWriter(self._partial, SCHEMA, compression="zstd")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._waiting:
                self._write_group(self._waiting)
        finally:
            self._file.close()
        if kind is None:
            self._partial.replace(self._path)
        else:
            self._partial.unlink()

    def write(self, experiences: Iterable[Experience]) -> None:
        """Write experiences, which may be an iterator that makes them one by one.

        Raises:
            ExportError: One has an array that this version does not know.
        """
        for each in experiences:
            self._waiting.append(each)
            self.rows += 1
            if len(self._waiting) == self._rows_per_group:
                self._write_group(self._waiting)
                self._waiting = []

    def _write_group(self, experiences: list[Experience]) -> None:
        self._file.write_table(_table(experiences), row_group_size=len(experiences))


def write(
    path: str | Path, experiences: Iterable[Experience], *, rows_per_group: int = ROWS_PER_GROUP
) -> int:
    """Write experiences to one file; returns how many. See `Writer`."""
    with Writer(path, rows_per_group=rows_per_group) as writer:
        writer.write(experiences)
    return writer.rows


def read(path: str | Path, *, part: int = 0, parts: int = 1) -> Iterator[Experience]:
    """Read experiences back, a row group at a time.

    Args:
        path: Of a file that `write` or `Writer` wrote.
        part: Which part of the file to read.
        parts: How many readers share the file; each gets every so many row groups.

    Yields:
        The experiences, in the order of the file.

    Raises:
        ExportError: It is no such file.
    """
    if not 0 <= part < parts:
        raise ExportError(f"part is {part} of {parts} parts; parts are counted from 0")
    with pq.ParquetFile(path) as file:
        if (file.schema_arrow.metadata or {}).get(b"recorder") != b"experiences":
            raise ExportError(f"{path} holds no experiences; its columns are {file.schema.names}")
        for group in islice(range(file.num_row_groups), part, None, parts):
            yield from _experiences(file.read_row_group(group))


def _table(experiences: list[Experience]) -> Any:
    columns: dict[str, Any] = {
        name: [getattr(each.eid, name) for each in experiences] for name in _IDENTITY
    }
    columns["run"] = list(map(str, columns["run"]))  # a number or a name
    columns["prompt_length"] = [each.prompt_length for each in experiences]
    columns["reward"] = [each.reward for each in experiences]
    for name, type_ in _LISTS.items():
        columns[name] = _list_column([getattr(each, name) for each in experiences], type_)
    columns["model_versions"] = [
        [span._asdict() for span in each.model_versions] for each in experiences
    ]
    columns["routed_experts"] = [_packed(each.routed_experts) for each in experiences]
    columns["sampling_mask"] = _mask_column([each.sampling_mask for each in experiences])
    texts = [_texts(each) for each in experiences]
    for name in _TEXTS:
        columns[name] = [each.get(name) for each in texts]
    columns["rest"] = [_rest(each) for each in experiences]
    return pa.table(
        [
            pa.array(columns[field.name], field.type)
            if isinstance(columns[field.name], list)
            else columns[field.name]
            for field in SCHEMA
        ],
        schema=SCHEMA,
    )


def _list_column(parts: list[AnyArray | None], type_: Any) -> Any:
    """One column of lists, straight from the arrays; NaN becomes null."""
    given = [part for part in parts if part is not None]
    lengths = [0 if part is None else len(part) for part in parts]
    values: AnyArray = np.concatenate(given) if given else np.empty(0, np.int32)
    unknown = np.isnan(values) if values.dtype.kind == "f" else None
    return pa.ListArray.from_arrays(
        pa.array(_offsets(lengths), pa.int32()),
        pa.array(values, type_, mask=unknown),
        mask=pa.array([part is None for part in parts]),
    )


def _mask_column(masks: list[SamplingMask | None]) -> Any:
    """One column of lists of lists, straight from the arrays."""
    given = [mask for mask in masks if mask is not None]
    ids = [np.empty(0, np.int32), *(mask.token_ids for mask in given)]
    counts = [np.empty(0, np.int32), *(mask.counts for mask in given)]
    tokens = pa.LargeListArray.from_arrays(
        pa.array(_offsets(np.concatenate(counts)), pa.int64()), pa.array(np.concatenate(ids))
    )
    lengths = [0 if mask is None else len(mask.counts) for mask in masks]
    return pa.ListArray.from_arrays(
        pa.array(_offsets(lengths), pa.int32()),
        tokens,
        mask=pa.array([mask is None for mask in masks]),
    )


def _offsets(lengths: Any) -> AnyArray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _packed(routed: RoutedExperts | None) -> dict[str, Any] | None:
    if routed is None:
        return None
    return {
        "data": routed.data.astype(routed.data.dtype.newbyteorder("<"), copy=False).tobytes(),
        "dtype": routed.data.dtype.name,
        "shape": list(routed.data.shape),
        "start": routed.start,
        "valid": None if routed.valid is None else [list(each) for each in routed.valid],
    }


def _unpacked(value: dict[str, Any]) -> RoutedExperts:
    dtype = np.dtype(value["dtype"]).newbyteorder("<")
    data = np.frombuffer(value["data"], dtype).reshape(value["shape"])
    valid = value["valid"] and tuple((begin, end) for begin, end in value["valid"])
    return RoutedExperts(data=data, start=value["start"], valid=valid)


def _texts(experience: Experience) -> dict[str, str]:
    """The text columns.

    Raises:
        ExportError: A text that UTF-8 cannot hold.
    """
    found = {}
    for name in _TEXTS:
        value = getattr(experience, name)
        if value is not None:
            found[name] = text = str(getattr(value, "value", value))
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ExportError(
                    f"{name} of {experience.eid} holds a lone surrogate, which no file of texts "
                    "can; write the text with errors='backslashreplace'"
                )
    return found


def _rest(experience: Experience) -> str:
    rest = _Rest(*(getattr(experience, name) for name in _REST))
    try:
        return msgspec.json.encode(rest, enc_hook=encode_hook).decode()
    except (TypeError, ValueError) as error:
        raise ExportError(f"{experience.eid} cannot be written: {error}") from None


def _experiences(table: Any) -> Iterator[Experience]:
    columns: dict[str, Callable[[int], Any]] = {
        name: _list_reader(table.column(name)) for name in _LISTS
    }
    if "sampling_mask" in table.column_names:  # files of earlier releases have none
        columns["sampling_mask"] = _mask_reader(table.column("sampling_mask"))
    for name in table.column_names:
        if name not in columns:
            columns[name] = table.column(name).to_pylist().__getitem__
    for number in range(table.num_rows):
        given = {name: column(number) for name, column in columns.items()}
        rest, eid = given.pop("rest"), EID(*(given.pop(name) for name in _IDENTITY))
        spans, routed = given.pop("model_versions"), given.pop("routed_experts")
        fields = {name: value for name, value in given.items() if value is not None}
        if spans:
            fields["model_versions"] = tuple(VersionSpan(**span) for span in spans)
        if routed is not None:
            fields["routed_experts"] = _unpacked(routed)
        try:
            known = msgspec.structs.asdict(_decoder.decode(rest))
            if "finish_reason" in fields:
                fields["finish_reason"] = FinishReason(fields["finish_reason"])
            yield Experience(eid=eid, **fields, **known)
        except (msgspec.MsgspecError, InvalidKeyError, TypeError, ValueError) as error:
            raise ExportError(f"row {number} of a row group is no experience: {error}") from None


def _list_reader(column: Any) -> Callable[[int], AnyArray | None]:
    """Reads one row of a column of lists; null becomes NaN."""
    lists = _one_chunk(column)
    offsets = lists.offsets.to_numpy()
    values = lists.values.to_numpy(zero_copy_only=False)
    present = lists.is_valid().to_numpy(zero_copy_only=False)

    def row(number: int) -> AnyArray | None:
        if not present[number]:
            return None
        part: AnyArray = values[offsets[number] : offsets[number + 1]]
        return part

    return row


def _mask_reader(column: Any) -> Callable[[int], SamplingMask | None]:
    """Reads one row of the column of sampling masks."""
    lists = _one_chunk(column)
    offsets = lists.offsets.to_numpy()
    ends, ids = lists.values.offsets.to_numpy(), lists.values.values.to_numpy()
    present = lists.is_valid().to_numpy(zero_copy_only=False)

    def row(number: int) -> SamplingMask | None:
        if not present[number]:
            return None
        places = ends[offsets[number] : offsets[number + 1] + 1]
        return SamplingMask(ids[slice(*places[[0, -1]])], np.diff(places))

    return row


def _one_chunk(column: Any) -> Any:
    whole = column.combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
