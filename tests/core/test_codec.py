"""Blobs give back what was written, share memory with it, and are never trusted."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from recorder_core import (
    EID,
    Experience,
    ExperienceTurn,
    FinishReason,
    MultiModalItem,
    Record,
    RecordKey,
    RoutedExperts,
    Sampling,
    VersionSpan,
    assemble,
    decode_experiences,
    decode_records,
    encode_experiences,
    encode_records,
)
from recorder_core.errors import CodecError
from tests.core.builders import Recording, record

texts = st.text(max_size=8)
floats = st.floats(allow_nan=False, allow_infinity=False)
numbers = st.none() | floats
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
notes = st.dictionaries(texts, json_values, max_size=3)
samplings = st.builds(Sampling, temperature=numbers, top_k=st.none() | st.integers())
images = st.lists(
    st.builds(
        MultiModalItem,
        modality=texts,
        offset=st.integers(0, 9),
        length=st.integers(1, 9),
        identity=texts,
    ),
    max_size=2,
).map(tuple)


def float32(count: int) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """Any values, NaN and the infinities among them."""
    values = st.lists(st.floats(width=32), min_size=count, max_size=count)
    return values.map(lambda each: np.array(each, dtype=np.float32))


def int32(low: int = 0, high: int = 4) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    values = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=low, max_size=high)
    return values.map(lambda each: np.array(each, dtype=np.int32))


@st.composite
def unknown_arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(["bool", "i1", "u2", "i8", "f2", "f4", "f8"]))
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


# What a later version might add: values, arrays, models of its own.
unknown_values = json_values | unknown_arrays()
unknown_fields = st.dictionaries(
    st.sampled_from(["later", "later still", "zukünftig"]),
    unknown_values | st.dictionaries(st.sampled_from(["a", "b"]), unknown_values, max_size=2),
    max_size=2,
)


@st.composite
def experts(draw: st.DrawFn, rows: int) -> RoutedExperts | None:
    if draw(st.booleans()):
        return None
    start = draw(st.integers(0, rows))
    end = draw(st.integers(start, rows))
    shape = (end - start, draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    data = np.arange(np.prod(shape)).reshape(shape)
    dtype = draw(st.sampled_from(["uint8", "uint16"]))
    valid = draw(st.sampled_from([None, (), ((start, end),)])) if end > start else None
    return RoutedExperts(data=data.astype(dtype), start=start, valid=valid)


@st.composite
def records(draw: st.DrawFn) -> Record:
    parent = draw(st.none() | texts)
    start = draw(st.integers(0, 5)) if parent is not None else 0
    prompt_ids, response_ids = draw(int32()), draw(int32(low=1))
    count = len(response_ids)
    optional = {
        "parent": parent,
        "logprobs": draw(st.none() | float32(count)),
        "token_level_reward": draw(st.none() | float32(count)),
        "versions": ((0, count, draw(texts)),),
        "stop_reason": draw(st.none() | texts | st.integers()),
        "response_text": draw(st.none() | texts),
        "routed_experts": draw(experts(start + len(prompt_ids) + count - 1)),
        "sampling": draw(samplings),
        "multi_modal": draw(images),
        "reward": draw(numbers),
        "info": draw(notes),
        "created_at": draw(floats),
        "flags": tuple(draw(st.lists(texts, max_size=2))),
    }
    missing = draw(st.sets(st.sampled_from(sorted(optional.keys() - {"parent"}))))
    return Record(
        id=draw(texts),
        key=RecordKey("b", "t", draw(st.integers(0, 99))),
        start=start,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        finish_reason=draw(st.sampled_from(FinishReason)),
        **{name: value for name, value in optional.items() if name not in missing},
        **draw(unknown_fields),
    )


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    tokens = draw(int32())
    prompt_length = draw(st.integers(0, len(tokens)))
    count = len(tokens) - prompt_length
    optional: dict[str, Any] = {
        name: draw(st.none() | float32(count))
        for name in ("logprobs", "token_level_reward", "advantages", "returns", "teacher_logprobs")
    }
    optional |= {
        "action_mask": draw(st.none() | st.just(np.arange(count) % 2 == 0)),
        "reward": draw(numbers),
        "info": draw(notes),
        "metrics": draw(st.dictionaries(texts, floats, max_size=2)),
        "messages": draw(st.none() | st.lists(notes, max_size=2)),
        "finish_reason": draw(st.none() | st.sampled_from(FinishReason)),
        "routed_experts": draw(experts(max(len(tokens) - 1, 0))),
        "model_versions": (VersionSpan(0, count, draw(texts)),) if count else (),
        "turns": (
            ExperienceTurn(
                record_id=draw(texts),
                request_id=draw(texts),
                sample_index=0,
                start=0,
                end=count,
                finish_reason=FinishReason.STOP,
                sampling=draw(samplings),
            ),
        ),
        "multi_modal_inputs": draw(images),
    }
    missing = draw(st.sets(st.sampled_from(sorted(optional))))
    return Experience(
        eid=EID(batch="b", task="t", run=draw(st.integers(0, 9)), suffix=draw(texts)),
        tokens=tokens,
        prompt_length=prompt_length,
        **{name: value for name, value in optional.items() if name not in missing},
        **draw(unknown_fields),
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(records(), max_size=4))
def test_records_come_back_as_they_were(given_records: list[Record]) -> None:
    blob = encode_records(given_records)
    read = decode_records(blob)
    assert read == given_records
    assert decode_records(encode_records(read)) == given_records
    safetensors.numpy.load(blob)


@settings(max_examples=100, deadline=None)
@given(st.lists(experiences(), max_size=4))
def test_experiences_come_back_as_they_were(given_experiences: list[Experience]) -> None:
    blob = encode_experiences(given_experiences)
    read = decode_experiences(blob)
    assert read == given_experiences
    assert decode_experiences(encode_experiences(read)) == given_experiences
    safetensors.numpy.load(blob)


def two_records() -> list[Record]:
    """A small run with a bit of everything."""
    recording = Recording()
    recording.turn(
        [10, 11],
        [20],
        logprobs=[-0.5],
        versions=[(0, 1, "v1")],
        prompt_text="größer",
        routed_experts=RoutedExperts(data=np.full((2, 1, 1), 7, dtype=np.uint8)),
        later={"field": np.arange(3)},
    )
    recording.turn(
        [10, 11, 20, 30],
        [40, 41],
        reward=1.0,
        info={"a": [1, None]},
        routed_experts=RoutedExperts(data=np.full((5, 1, 1), 300, dtype=np.uint16)),
    )
    return recording.records


RECORDS = encode_records(two_records())
EXPERIENCES = encode_experiences(assemble(two_records()))
BLOBS = {"records": RECORDS, "experiences": EXPERIENCES}
kinds = st.sampled_from(sorted(BLOBS))


def test_loading_copies_no_array() -> None:
    blob = np.frombuffer(RECORDS, dtype=np.uint8)
    for each in decode_records(RECORDS):
        assert np.shares_memory(each.prompt_ids, blob)
        assert np.shares_memory(each.response_ids, blob)
        assert each.routed_experts is not None
        assert np.shares_memory(each.routed_experts.data, blob)
    [experience] = decode_experiences(EXPERIENCES)
    blob = np.frombuffer(EXPERIENCES, dtype=np.uint8)
    assert np.shares_memory(experience.tokens, blob)
    assert np.shares_memory(experience.action_mask, blob)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_read(kind: type) -> None:
    assert decode_records(kind(RECORDS)) == two_records()


def test_the_library_reads_the_blob_and_finds_the_packed_columns() -> None:
    tensors = safetensors.numpy.load(RECORDS)
    document = json.loads(tensors["json"].tobytes())
    assert document["kind"] == "records"
    column = document["columns"].index("response_ids")
    assert tensors[f"{column}.data"].tolist() == [20, 40, 41]
    assert tensors[f"{column}.offsets"].tolist() == [0, 1, 3]
    assert tensors[f"{column}.items"].tolist() == [0, 1]


def test_a_blob_of_the_other_kind_is_refused() -> None:
    with pytest.raises(CodecError, match="holds 'experiences', not records"):
        decode_records(EXPERIENCES)
    with pytest.raises(CodecError, match="holds 'records', not experiences"):
        decode_experiences(RECORDS)


def test_a_blob_cut_off_anywhere_is_refused() -> None:
    for length in range(len(RECORDS)):
        with pytest.raises(CodecError):
            decode_records(RECORDS[:length])
    with pytest.raises(CodecError):
        decode_records(RECORDS + b"\0")


def decode_or_refuse(kind: str, blob: bytes) -> None:
    """Whatever was done to a blob: it is refused, or gives models that can be written again."""
    try:
        if kind == "records":
            encode_records(decode_records(blob))
        else:
            encode_experiences(decode_experiences(blob))
    except CodecError:
        pass


@settings(max_examples=500, deadline=None)
@given(kinds, st.lists(st.tuples(st.integers(0), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_are_refused_or_harmless(kind: str, flips: list[tuple[int, int]]) -> None:
    blob = bytearray(BLOBS[kind])
    for position, value in flips:
        blob[position % len(blob)] = value
    decode_or_refuse(kind, bytes(blob))


def blob_of(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def parts(blob: bytes) -> tuple[Any, bytes]:
    size = int.from_bytes(blob[:8], "little")
    return json.loads(blob[8 : 8 + size]), blob[8 + size :]


lengths = st.sampled_from(
    [-1, 0, 1, 2, 3, 8, 2**31, 2**60, 2**62, 2**63, 2**64, 1.5, True, "1", None]
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["BOOL", "U8", "I32", "I64", "F32", "F64", "BF16", "x", 4, None]),
        "shape": st.lists(lengths, max_size=4) | lengths,
        "data_offsets": st.lists(lengths, min_size=2, max_size=2) | lengths,
    }
)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_edited_headers_are_refused_or_harmless(data: st.DataObject) -> None:
    kind = data.draw(kinds)
    header, body = parts(BLOBS[kind])
    name = data.draw(st.sampled_from(sorted(header)))
    edit = data.draw(st.sampled_from(["drop", "rename", "replace", "change", "swap"]))
    if edit == "drop":
        del header[name]
    elif edit == "rename":
        header[data.draw(st.sampled_from(["0.data", "99.items", "json", ""]))] = header.pop(name)
    elif edit == "replace":
        header[name] = data.draw(entries | json_values)
    elif edit == "change" and name != "__metadata__":
        header[name] |= data.draw(entries.map(lambda entry: dict([next(iter(entry.items()))])))
        header[name][data.draw(st.sampled_from(["shape", "data_offsets"]))] = data.draw(
            st.lists(lengths, min_size=1, max_size=3)
        )
    else:
        other = data.draw(st.sampled_from(sorted(header)))
        header[name], header[other] = header[other], header[name]
    decode_or_refuse(kind, blob_of(header, body))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_edited_json_is_refused_or_harmless(data: st.DataObject) -> None:
    kind = data.draw(kinds)
    tensors = safetensors.numpy.load(BLOBS[kind])
    document = json.loads(tensors["json"].tobytes())
    item = document["items"][0]
    holder = data.draw(st.sampled_from([document, item, *item.get("turns", ())]))
    field = data.draw(st.sampled_from(sorted(holder)))
    holder[field] = data.draw(json_values | st.just(float("nan")) | st.just("info.a"))
    if data.draw(st.booleans()) and isinstance(document["columns"], list) and document["columns"]:
        at = data.draw(st.integers(0, len(document["columns"]) - 1))
        document["columns"][at] = data.draw(
            st.sampled_from(["", ".", "eid.batch", "info.a", "info.a.b", "x.y", "turns.0.end", 7])
        )
    text = json.dumps(document).encode()
    tensors["json"] = np.frombuffer(text, dtype=np.uint8)
    decode_or_refuse(kind, safetensors.numpy.save(tensors))


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([2**60], [0, 2**60]),
        ([2**60], [0, 8]),
        ([2**32, 2**32], [0, 0]),
        ([0, 2**62, 2**62], [0, 0]),
        ([1] * 65, [0, 1]),
        ([-8, -1], [0, 8]),
        ([8], [8, 16]),
        ([8], [-8, 0]),
    ],
)
def test_claimed_lengths_allocate_nothing(shape: list[int], offsets: list[int]) -> None:
    blob = blob_of({"json": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}, bytes(8))
    tracemalloc.start()
    with pytest.raises(CodecError):
        decode_records(blob)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_a_header_longer_than_the_blob_is_refused() -> None:
    with pytest.raises(CodecError, match="claims 18446744073709551615 bytes, 2 follow"):
        decode_records(b"\xff" * 8 + b"{}")


def test_tensors_that_share_bytes_are_refused() -> None:
    header, body = parts(RECORDS)
    header["again"] = header["json"]
    with pytest.raises(CodecError, match=f"{len(body)} follow the header"):
        decode_records(blob_of(header, body))


def test_booleans_that_are_neither_are_refused() -> None:
    header, body = parts(EXPERIENCES)
    [begin] = [
        entry["data_offsets"][0] for entry in header.values() if entry.get("dtype") == "BOOL"
    ]
    with pytest.raises(CodecError, match="neither 0 nor 1"):
        decode_experiences(blob_of(header, body[:begin] + b"\2" + body[begin + 1 :]))


@pytest.mark.parametrize("depth", [40, 200, 900, 980, 990, 1000, 3000, 100_000])
@pytest.mark.parametrize(
    "text",
    [
        '{"kind": %s, "columns": [], "items": []}',
        '{"kind": "records", "columns": %s, "items": []}',
        '{"kind": "records", "columns": [], "items": %s}',
        '{"kind": "records", "columns": [], "items": [{"later": %s}]}',
    ],
)
def test_deep_nesting_is_refused(text: str, depth: int) -> None:
    body = (text % ("[" * depth + "]" * depth)).encode()
    entry = {"dtype": "U8", "shape": [len(body)], "data_offsets": [0, len(body)]}
    with pytest.raises(CodecError):
        decode_records(blob_of({"json": entry}, body))
    with pytest.raises(CodecError):
        decode_records(blob_of(body))


def test_what_is_no_record_is_refused() -> None:
    made = record().model_copy(update={"logprobs": np.zeros(7, dtype=np.float32)})
    with pytest.raises(CodecError, match="logprobs has 7 values for 1 response_ids"):
        decode_records(encode_records([made]))
