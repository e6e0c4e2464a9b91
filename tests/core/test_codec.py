"""Streams give back what was written, a frame at a time, and are never trusted."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder_core import (
    EID,
    Experience,
    FinishReason,
    MultiModalItem,
    Record,
    RecordKey,
    RoutedExperts,
    Run,
    Sampling,
    SamplingMask,
    VersionSpan,
    assemble,
    codec,
    decode_experiences,
    decode_runs,
    encode_experiences,
    encode_runs,
)
from recorder_core.codec import Head, StreamDecoder, as_json, encode_stream
from recorder_core.errors import CodecError
from tests.core.builders import KEY, Recording, forests, masked, record, record_all

# Written by the release before streams; see tests/core/data/README.md.
EARLIER = (Path(__file__).parent / "data" / "records-v1.safetensors").read_bytes()

texts = st.text(max_size=8)
floats = st.floats(allow_nan=False, allow_infinity=False)
numbers = st.none() | floats
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
notes = st.dictionaries(texts, json_values, max_size=3)
samplings = st.builds(Sampling, temperature=numbers, top_k=st.none() | st.integers(-1, 9))
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
def masks(draw: st.DrawFn, count: int) -> SamplingMask:
    token_ids = draw(int32(high=8))
    ends = st.integers(0, len(token_ids))
    cuts = sorted(draw(st.lists(ends, min_size=count - 1, max_size=count - 1)))
    return SamplingMask(token_ids, np.diff([0, *cuts, len(token_ids)]))


@st.composite
def records(draw: st.DrawFn, key: RecordKey, number: int) -> Record:
    prompt_ids, response_ids = draw(int32()), draw(int32(low=1))
    count = len(response_ids)
    optional = {
        "logprobs": draw(st.none() | float32(count)),
        "token_level_reward": draw(st.none() | float32(count)),
        "versions": ((0, count, draw(texts)),),
        "stop_reason": draw(st.none() | texts | st.integers(0, 9)),
        "prompt_text": draw(st.none() | texts),
        "response_text": draw(st.none() | texts),
        "routed_experts": draw(experts(len(prompt_ids) + count - 1)),
        "sampling_mask": draw(st.none() | masks(count)),
        "sampling": draw(samplings),
        "multi_modal": draw(images),
        "reward": draw(numbers),
        "info": draw(notes),
        "created_at": draw(floats),
        "delivered": draw(st.sampled_from([None, True, False])),
        "flags": tuple(draw(st.lists(texts, max_size=2))),
    }
    missing = draw(st.sets(st.sampled_from(sorted(optional))))
    return Record.of(
        id=f"{number}",
        key=key,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        finish_reason=draw(st.sampled_from(FinishReason)),
        **{name: value for name, value in optional.items() if name not in missing},
    )


@st.composite
def runs(draw: st.DrawFn) -> list[Run]:
    made = []
    for run in range(draw(st.integers(0, 3))):
        key = RecordKey("b", "t", run)
        made.append(
            Run(
                key,
                [draw(records(key, number)) for number in range(draw(st.integers(0, 4)))],
                reward=draw(numbers),
                info=draw(notes),
                dropped=draw(st.dictionaries(st.just("full"), st.integers(1, 9))),
                evicted=draw(st.integers(0, 2)),
                pending=draw(st.integers(0, 2)),
                closed=draw(st.booleans()),
            )
        )
    return made


def read(pieces: list[bytes]) -> StreamDecoder:
    decoder = StreamDecoder()
    for piece in pieces:
        decoder.feed(piece)
    return decoder


@given(runs(), st.integers(1, 2_000), st.integers(1, 200), st.integers(0, 9))
def test_runs_come_back_as_they_were_however_they_are_cut(
    given_runs: list[Run], frame: int, piece: int, pending: int
) -> None:
    head = Head(lease="a lease", pending=pending, more=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "FRAME_BYTES", frame)
        stream = b"".join(encode_stream(given_runs, head))
    decoder = read([stream[at : at + piece] for at in range(0, len(stream), piece)])
    assert decoder.close() == given_runs
    assert decoder.head == head
    assert decoder.records == sum(len(run.records) for run in given_runs)


@given(forests())
def test_experiences_come_back_as_they_were(generations: list[Any]) -> None:
    experiences = assemble(record_all(generations).records)
    experiences = [
        each.replace(
            advantages=np.full(each.response_length, 0.5), metrics={"a": 1.0}, messages=[{"b": 2}]
        )
        for each in experiences
    ]
    assert decode_experiences(encode_experiences(experiences)) == experiences


def a_run_of_three() -> Run:
    recording = Recording()
    recording.turn([1, 2], [3, 4], logprobs=[-0.5, -0.25], response_text="one")
    recording.turn([1, 2, 3, 4, 5], [6], logprobs=[-1.0], sampling_mask=masked([[6, 9]]))
    recording.turn([1, 2], [7], logprobs=[-2.0], routed_experts=RoutedExperts(data=[[[300]]] * 2))
    return Run(KEY, recording.records, reward=1.0, info={"a": [1, None, "x"]})


def test_a_stream_cut_off_anywhere_is_refused() -> None:
    stream = encode_runs([a_run_of_three()])
    for end in range(len(stream)):
        with pytest.raises(CodecError):
            decode_runs(stream[:end])


@pytest.mark.parametrize("stream", [encode_runs([a_run_of_three()]), EARLIER], ids=["now", "v1"])
@given(st.data())
def test_flipped_bytes_are_refused_or_harmless(stream: bytes, data: st.DataObject) -> None:
    flipped = bytearray(stream)
    for _ in range(data.draw(st.integers(1, 3))):
        flipped[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_runs(bytes(flipped))
    except CodecError:
        return
    # What is read can be written, and read again.
    again = decode_runs(encode_runs(found))
    assert [len(run.records) for run in again] == [len(run.records) for run in found]


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(junk: bytes) -> None:
    for begin in (b"", codec.MAGIC):
        with pytest.raises(CodecError):
            decode_runs(begin + junk)


def test_claimed_lengths_allocate_nothing() -> None:
    claim = codec.MAGIC + (2**30).to_bytes(4, "little") + b"x"
    tracemalloc.start()
    with pytest.raises(CodecError, match="cut off"):
        decode_runs(claim)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    with pytest.raises(CodecError, match="claims"):
        decode_runs(codec.MAGIC + b"\xff" * 4)


def test_frames_stay_small_however_much_there_is() -> None:
    tokens = list(range(1_000))
    many = [
        Run(key, [record(key=key, prompt_ids=tokens, response_ids=tokens)])
        for key in (RecordKey("b", "t", run) for run in range(500))
    ]
    stream = encode_stream(many)
    tracemalloc.start()
    sizes = [len(frame) for frame in stream]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(sizes) > 4_000_000
    assert max(sizes) < codec.FRAME_BYTES + 20_000
    assert peak < 4 * codec.FRAME_BYTES


def test_a_record_before_the_one_it_builds_on_is_refused() -> None:
    run = a_run_of_three()
    backwards = Run(KEY, reversed(run.records.values()))
    with pytest.raises(CodecError, match="comes before"):
        decode_runs(encode_runs([backwards]))


def test_a_record_of_another_run_is_refused() -> None:
    stray = Run(RecordKey("b", "t", 1), [record()])
    with pytest.raises(CodecError, match="holds record a of batch/task/0"):
        decode_runs(encode_runs([stray]))


def test_what_follows_the_end_is_refused() -> None:
    stream = encode_runs([a_run_of_three()])
    with pytest.raises(CodecError):
        decode_runs(stream + b"x")
    with pytest.raises(CodecError):
        decode_runs(stream + stream)


def test_a_field_of_a_later_release_is_passed_over() -> None:
    stream = encode_runs([Run(KEY, [record(model="later")])])
    renamed = stream.replace(b"\xa5model", b"\xa5modem")
    assert renamed != stream
    assert decode_runs(renamed)[0].records["a"] == record()


def test_lengths_inside_a_record_are_checked() -> None:
    good = record()
    for at in (0, 4, 8):  # ids and logprobs; a text may be empty
        data = bytearray(good.data)
        data[at] += 1
        with pytest.raises(ValueError, match=r"data|logprobs"):
            Record(id="a", key=KEY, data=bytes(data), finish_reason=FinishReason.STOP)


def test_blobs_of_earlier_releases_are_read() -> None:
    first, second = decode_runs(EARLIER)
    assert [run.key.text for run in (first, second)] == ["batch/task/0", "batch/task/1"]
    a, b = first.records.values()
    assert (a.prompt_ids.tolist(), a.response_ids.tolist()) == ([1, 2], [3, 4])
    assert a.logprobs is not None
    assert a.logprobs[0] == -0.5
    assert np.isnan(a.logprobs[1])
    assert a.versions == (VersionSpan(0, 1, "7"), VersionSpan(1, 2, "8"))
    assert (a.prompt_text, a.response_text, a.stop_reason) == ("ein Satz", "Größe", 4)
    assert a.sampling == Sampling(
        temperature=0.7, top_p=1.0, top_k=-1, min_p=0.0, seed=5, logprobs_mode="raw_logprobs"
    )
    assert (a.reward, a.info, a.created_at) == (0.5, {"solved": True}, 1.0)
    assert a.routed_experts == RoutedExperts(data=np.arange(12).reshape(3, 2, 2))
    assert (b.parent, b.start, b.finish_reason) == ("a", 4, FinishReason.LENGTH)
    assert b.token_level_reward is not None
    assert b.token_level_reward.tolist() == [0.25]
    (c,) = second.records.values()
    assert c.routed_experts == RoutedExperts(
        data=np.array([[[300]]], dtype=np.uint16), valid=((0, 1),)
    )
    assert c.multi_modal == (MultiModalItem("image", 0, 1, "cat"),)
    (experience, other) = assemble([first, second])
    assert experience.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert (experience.reward, other.reward) == (0.5, None)


def test_an_experience_for_people_has_no_packed_bytes_and_null_for_nan() -> None:
    experiences = assemble([a_run_of_three()])
    shown = json.loads(as_json(experiences))
    assert [each["tokens"] for each in shown] == [[1, 2, 3, 4, 5, 6], [1, 2, 7]]
    assert shown[0]["logprobs"] == [-0.5, -0.25, None, -1.0]
    assert shown[0]["reward"] == 1.0
    turn = shown[0]["turns"][0]
    assert (turn["response_text"], turn["finish_reason"]) == ("one", "stop")
    assert "data" not in turn
    assert shown[0]["sampling_mask"] == {"token_ids": [6, 9], "counts": [0, 0, 0, 2]}


def test_an_experience_made_by_hand_is_checked_when_it_is_read() -> None:
    made = Experience(eid=EID("b", "t", 0), tokens=[1, 2, 3], prompt_length=1, logprobs=[0.0, 0.0])
    blob = encode_experiences([made])
    assert decode_experiences(blob) == [made]
    with pytest.raises(CodecError):
        decode_experiences(blob.replace(b"prompt_length\x01", b"prompt_length\x00"))
    with pytest.raises(CodecError):
        decode_experiences(blob[:-1])
