"""Prompts and responses in the SDK's own types become turns; no server is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from tinker import types

from recorder_core import Record, Recorder, RecordKey
from recorder_core.context import Identity
from recorder_core.records import FinishReason
from tinker_recorder.turns import Call, Weights, read_prompt

KEY = RecordKey.parse("0/images/1")
PNG = b"\x89PNG one"
TEXT = types.EncodedTextChunk(tokens=[1, 2, 3])


def sequence(tokens: list[int], logprobs: list[float] | None, stop: str = "stop") -> Any:
    """A sequence as the SDK makes it from the server's reply."""
    fields: dict[str, Any] = {
        "stop_reason": stop,
        "tokens_np": np.array(tokens, np.int32),
        "logprobs_np": None if logprobs is None else np.array(logprobs, np.float32),
    }
    if "sequence_id" in {each.name for each in dataclasses.fields(types.SampledSequence)}:
        fields["sequence_id"] = "sequence-7"
    return types.SampledSequence(**fields)


def recorded(prompt: types.ModelInput, *sequences: Any, asked: int | None = None) -> list[Record]:
    """What becomes of a sample."""
    recorder = Recorder()
    call = Call(
        recorder,
        Identity(KEY),
        len(sequences) if asked is None else asked,
        types.SamplingParams(max_tokens=8),
        raises=False,
    )
    call.prompt = read_prompt(prompt)
    told: list[Any] = []
    call.finish(types.SampleResponse(sequences=list(sequences)), Weights("v1"), told.append)
    recorder.flush()
    assert told == [None]
    stats = recorder.stats()
    assert stats.started == stats.recorded + sum(stats.dropped.values())
    recorder.close()
    return [record for run in recorder.store.get(KEY) for record in run.records.values()]


def test_several_chunks_of_text_are_one_prompt() -> None:
    prompt = types.ModelInput(chunks=[TEXT, types.EncodedTextChunk(tokens=[4, 5])])
    (record,) = recorded(prompt, sequence([6], [-0.5]))
    assert record.prompt_ids.tolist() == prompt.to_ints() == [1, 2, 3, 4, 5]
    assert record.flags == ()


def test_an_image_of_known_length_keeps_its_place() -> None:
    image = types.ImageChunk(data=PNG, format="png", expected_tokens=4)
    (record,) = recorded(types.ModelInput(chunks=[TEXT, image, TEXT]), sequence([6], [-0.5]))
    assert record.prompt_ids.tolist() == [1, 2, 3, -1, -1, -1, -1, 1, 2, 3]
    assert record.flags == ("prompt_placeholders",)
    (item,) = record.multi_modal
    assert (item.modality, item.offset, item.length) == ("image", 3, 4)


def test_an_image_of_unknown_length_is_recorded_and_flagged() -> None:
    image = types.ImageAssetPointerChunk(location="file:cat.png", format="png")
    prompt = types.ModelInput(chunks=[TEXT, image, TEXT])
    with pytest.raises(ValueError, match="expected_tokens"):
        _ = prompt.length
    (record,) = recorded(prompt, sequence([6], [-0.5]))
    assert record.prompt_ids.tolist() == [1, 2, 3, 1, 2, 3]
    assert record.flags == ("prompt_length_unknown",)
    (item,) = record.multi_modal
    assert (item.offset, item.length, item.identity) == (3, 0, "file:cat.png")


def test_equal_places_of_other_images_are_other_prompts() -> None:
    def chunks(data: bytes) -> list[Any]:
        return [TEXT, types.ImageChunk(data=data, format="png", expected_tokens=2), TEXT]

    one = read_prompt(types.ModelInput(chunks=chunks(PNG)))
    other = read_prompt(types.ModelInput(chunks=chunks(b"\x89PNG two")))
    assert one.ids.tolist() == other.ids.tolist()
    assert one.items[0].identity != other.items[0].identity


def test_what_the_caller_does_to_its_lists_later_is_not_in_the_record() -> None:
    tokens = [1, 2, 3]
    prompt = read_prompt(types.ModelInput(chunks=[types.EncodedTextChunk(tokens=tokens)]))
    tokens[0] = 99
    sampled = sequence([6, 7], [-0.5, -0.25])
    (record,) = recorded(types.ModelInput.from_ints([1]), sampled)
    sampled.tokens_np[0] = 99
    sampled.logprobs_np[0] = 99
    assert prompt.ids.tolist() == [1, 2, 3]
    assert record.response_ids.tolist() == [6, 7]
    assert record.logprobs is not None
    assert record.logprobs.tolist() == [-0.5, -0.25]


def test_a_sequence_without_logprobs_is_flagged() -> None:
    (record,) = recorded(types.ModelInput.from_ints([1]), sequence([6], None))
    assert record.logprobs is None
    assert record.flags == ("logprobs_missing",)


def test_an_unknown_stop_reason_is_flagged() -> None:
    (record,) = recorded(types.ModelInput.from_ints([1]), sequence([6], [-0.5], stop="tired"))
    assert record.finish_reason is FinishReason.ERROR
    assert record.flags == ("unknown_stop_reason",)


def test_an_empty_sequence_is_no_record() -> None:
    assert recorded(types.ModelInput.from_ints([1]), sequence([], [])) == []


@pytest.mark.parametrize("asked", [1, 3])
def test_more_or_fewer_sequences_than_asked_for_are_accounted_for(asked: int) -> None:
    both = [sequence([6], [-0.5]), sequence([7], [-0.5])]
    records = recorded(types.ModelInput.from_ints([1]), *both, asked=asked)
    assert [record.sample_index for record in records] == [0, 1]


def test_a_sample_of_nothing_is_complete_at_once() -> None:
    assert recorded(types.ModelInput.from_ints([1])) == []
