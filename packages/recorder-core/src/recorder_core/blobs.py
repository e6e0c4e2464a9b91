"""Reads the blobs that releases before the stream format wrote: safetensors, one column a field.

All values of one array field, over all records, lie end to end in one column (`<n>.data`), with
the offsets between them (`<n>.offsets`, int64) and the numbers of the records that have the field
(`<n>.items`, int64). Everything that is not an array is JSON, in the uint8 column `json`:
`{"kind": "records", "columns": [field, ...], "items": [{...}, ...]}`. There, a reward given by key
was written to each record.

Nothing in a blob is trusted; every length is checked against the bytes that are there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from recorder_core.arrays import AnyArray
from recorder_core.errors import CodecError, InvalidKeyError
from recorder_core.keys import RecordKey
from recorder_core.records import Record, RoutedExperts
from recorder_core.runs import Run, merged_by_key

_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
}
_HEADER_LIMIT = 100_000_000  # the safetensors format's own


_FIELDS = {each.name: each for each in msgspec.structs.fields(Record)}
_PACKED = ("prompt_ids", "response_ids", "logprobs", "prompt_text", "response_text")


def decode(blob: bytes) -> list[Run]:
    """Read the runs of a blob.

    Raises:
        CodecError: The blob is truncated, corrupt, or holds something else.
    """
    tensors = _read(blob)
    try:
        document = json.loads(tensors["json"].tobytes().decode("utf-8", "surrogatepass"))
        found, columns, items = document["kind"], document["columns"], document["items"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"the blob's json column cannot be read: {error!r}") from None
    if found != "records":
        raise CodecError(f"the blob holds {str(found)[:40]!r}, not records")
    if not isinstance(columns, list) or not isinstance(items, list):
        raise CodecError("the blob's json column has no lists of columns and items")
    for index, path in enumerate(columns):
        for number, array in _column(tensors, index):
            if not (isinstance(path, str) and 0 <= number < len(items)):
                raise CodecError(f"column {index} names item {number} of {len(items)}")
            _put(items[number], path, array)
    try:
        return merged_by_key(_record(item) for item in items)
    except (
        *(msgspec.MsgspecError, InvalidKeyError, AttributeError),
        *(KeyError, TypeError, ValueError, RecursionError),
    ) as error:
        raise CodecError(f"the blob holds no valid records: {error}") from None


def _record(item: dict[str, Any]) -> Record:
    given = {name: item[name] for name in _PACKED if item.get(name) is not None}
    for name, value in item.items():
        if name == "key":
            given[name] = RecordKey.parse(value)
        elif name == "token_level_reward":
            given[name] = value
        elif name == "routed_experts":
            given[name] = RoutedExperts(**{**value, "valid": _tuples(value.get("valid"))})
        elif name in _FIELDS:
            given[name] = msgspec.convert(value, _FIELDS[name].type)
    return Record.of(**given)


def _tuples(ranges: Any) -> Any:
    return ranges and tuple((begin, end) for begin, end in ranges)


def _put(item: Any, path: str, array: AnyArray) -> None:
    *parents, name = path.split(".")
    if len(parents) > 1:
        raise CodecError(f"the blob gives {path[:80]!r}, which no record has")
    for parent in parents:
        item = item.setdefault(parent, {}) if isinstance(item, dict) else None
    if not isinstance(item, dict) or name in item:
        raise CodecError(f"the blob gives {path!r} twice, or to what is no object")
    item[name] = array


def _column(tensors: dict[str, AnyArray], index: int) -> Iterable[tuple[int, AnyArray]]:
    try:
        data = tensors[f"{index}.data"]
        offsets, numbers = tensors[f"{index}.offsets"], tensors[f"{index}.items"]
    except KeyError as error:
        raise CodecError(f"the blob has no column {error}") from None
    if (
        data.ndim < 1
        or offsets.dtype != np.int64
        or numbers.dtype != np.int64
        or numbers.ndim != 1
        or offsets.shape != (len(numbers) + 1,)
        or offsets[0] != 0
        or offsets[-1] != len(data)
        or (np.diff(offsets) < 0).any()
    ):
        raise CodecError(f"the offsets of column {index} do not cut {data.shape} rows in order")
    ends = offsets.tolist()
    for number, begin, end in zip(numbers.tolist(), ends, ends[1:], strict=False):
        yield number, data[begin:end]


def _read(blob: bytes | bytearray | memoryview) -> dict[str, AnyArray]:
    """The tensors of a safetensors blob, as views of it.

    The format: https://github.com/huggingface/safetensors#format. The library's own loader copies
    every tensor; its writer is used for writing.
    """
    view = memoryview(blob).cast("B")
    if len(view) < 8:
        raise CodecError(f"the blob has {len(view)} bytes, a safetensors blob has at least 8")
    size = int.from_bytes(view[:8], "little")
    if size > min(len(view) - 8, _HEADER_LIMIT):
        raise CodecError(f"the blob's header claims {size} bytes, {len(view) - 8} follow")
    try:
        header = json.loads(bytes(view[8 : 8 + size]))
    except (ValueError, RecursionError) as error:
        raise CodecError(f"the blob's header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise CodecError("the blob's header is no JSON object")
    body = view[8 + size :]
    header.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, body) for name, entry in header.items()}
    # Tensors that overlap would turn a small blob into a great many copies of its bytes.
    covered = sum(tensor.nbytes for tensor in tensors.values())
    if covered != len(body):
        raise CodecError(f"the blob's tensors have {covered} bytes, {len(body)} follow the header")
    return tensors


def _tensor(name: str, entry: Any, body: memoryview) -> AnyArray:
    try:
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CodecError(f"tensor {name!r} is not described as safetensors are") from None
    if not _are_lengths([begin, end]) or not isinstance(shape, list) or not _are_lengths(shape):
        raise CodecError(f"tensor {name!r} has a shape or offsets that are no lengths")
    # Python integers: the product cannot overflow, and is compared before anything is made.
    if len(shape) > 32 or end - begin != math.prod(shape) * dtype.itemsize:
        raise CodecError(f"tensor {name!r} has {end - begin} bytes, its shape {shape} needs others")
    if not begin <= end <= len(body):
        raise CodecError(f"tensor {name!r} ends at byte {end} of {len(body)}")
    flat = np.frombuffer(body[begin:end], dtype=dtype.newbyteorder("<"))
    if dtype == np.bool_ and (flat.view(np.uint8) > 1).any():
        raise CodecError(f"tensor {name!r} has booleans that are neither 0 nor 1")
    try:
        return flat.reshape(shape)
    except ValueError:  # no elements, and other dimensions beyond what numpy counts to
        raise CodecError(f"tensor {name!r} has the impossible shape {shape}") from None


def _are_lengths(values: Sequence[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**63 for value in values)
