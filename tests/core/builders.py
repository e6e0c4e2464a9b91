"""Records as an engine and the recorder would make them, and forests of them for property tests."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from recorder_core import (
    FinishReason,
    MultiModalItem,
    Record,
    RecordKey,
    RoutedExperts,
    SamplingMask,
    VersionSpan,
)
from recorder_core.paths import Paths

KEY = RecordKey.parse("batch/task/0")


def ids(values: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.asarray(values, dtype=np.int32)


def record(**fields: Any) -> Record:
    """A root record with whatever the test is about."""
    given = {
        "id": "a",
        "key": KEY,
        "prompt_ids": [1, 2],
        "response_ids": [3],
        "finish_reason": "stop",
    }
    return Record.of(**{**given, **fields})


class Recording:
    """One process that records the turns of one key, in the order in which they arrive."""

    def __init__(self, key: RecordKey = KEY, name: str = "") -> None:
        self.key = key
        self.name = name
        self.paths = Paths()
        self.records: list[Record] = []
        self.prefix_breaks = 0

    @property
    def superseded(self) -> list[str]:
        """What the recorder would count as such now, in the order of the records."""
        replaced, _ = self.paths.replaced()
        return [each.id for each in self.records if each.id in replaced]

    def turn(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        *,
        routed_experts: RoutedExperts | None = None,
        **fields: Any,
    ) -> Record:
        """Record a finished generation; turn n begins at n seconds and ends at n + 0.5."""
        number = len(self.records)
        times = {"created_at": number, "finished_at": number + 0.5}
        given = {"id": f"{self.name}{number}", "finish_reason": FinishReason.STOP, **times}
        given |= fields
        placement = self.paths.place(
            ids(prompt),
            ids(response),
            created_at=given["created_at"],
            adapter=fields.get("adapter"),
            multi_modal=fields.get("multi_modal", ()),
        )
        made = Record.of(
            **given,
            key=self.key,
            parent=placement.parent,
            base=placement.base,
            start=placement.start,
            prompt_ids=ids(prompt[placement.start :]),
            response_ids=ids(response),
            routed_experts=routed_experts.after(placement.routed_rows) if routed_experts else None,
        )
        self.paths.add(made, placement)
        self.records.append(made)
        self.prefix_breaks += placement.prefix_break
        return made


@dataclass(frozen=True)
class Generation:
    """What an engine did for one request: the whole prompt, and what it sampled."""

    id: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    fields: dict[str, Any]
    routed_dtype: str | None

    @property
    def path(self) -> tuple[int, ...]:
        return self.prompt + self.response

    @property
    def stream(self) -> tuple[Any, ...]:
        """What has to agree, beside the tokens, for one generation to continue another."""
        return self.fields["adapter"], self.fields["multi_modal"]

    def routed_experts(self) -> RoutedExperts | None:
        """Rows that depend on everything before them: [length - 1, 2 layers, 1 expert]."""
        if self.routed_dtype is None:
            return None
        data = np.zeros((len(self.path) - 1, 2, 1), dtype=self.routed_dtype)
        data[:, 0, 0] = [expert(self.path[: row + 1]) for row in range(len(data))]
        return RoutedExperts(data=data)


def expert(prefix: tuple[int, ...]) -> int:
    """The expert that routes the last token of a prefix; one of 251."""
    return zlib.crc32(bytes(prefix)) % 251


def record_all(generations: Iterable[Generation]) -> Recording:
    """Record generations in one process, in the order given."""
    recording = Recording()
    for each in generations:
        recording.turn(
            each.prompt,
            each.response,
            id=each.id,
            routed_experts=each.routed_experts(),
            **each.fields,
        )
    return recording


def masked(supports: Sequence[Sequence[int]]) -> SamplingMask:
    """A sampling mask from the ids of each token."""
    return SamplingMask([each for ids in supports for each in ids], list(map(len, supports)))


# Two or three tokens only: prompts that repeat others by chance, and identical twins, are common.
_tokens = st.integers(0, 2)
_images = st.sampled_from(["cat", "dog"])


def _image(offset: int, identity: str) -> MultiModalItem:
    return MultiModalItem(modality="image", offset=offset, length=1, identity=identity)


@st.composite
def forests(draw: st.DrawFn, max_size: int = 12) -> list[Generation]:
    """Generations under one key, as agents cause them: each continues some path, or begins one."""
    routed = draw(st.booleans())
    made: list[Generation] = []
    for number in range(draw(st.integers(1, max_size))):
        base = draw(st.sampled_from([None, *made])) if made else None
        new = draw(st.lists(_tokens, min_size=0 if base else 1, max_size=3))
        prompt = (base.path if base else ()) + tuple(new)
        images = base.fields["multi_modal"] if base else ()
        if new and draw(st.integers(0, 3)) == 0:
            images = (*images, _image(len(prompt) - 1, draw(_images)))
        response = tuple(draw(st.lists(_tokens, min_size=1, max_size=3)))
        boundary = draw(st.integers(0, len(response)))
        spans = (VersionSpan(0, boundary, "7"), VersionSpan(boundary, len(response), "step-8"))
        fields = {
            "adapter": draw(st.sampled_from([None, None, "lora"])),
            "multi_modal": images,
            "sample_index": draw(st.sampled_from([0, 0, 1])),
            "attempt": draw(st.sampled_from([0, 0, 0, 1, 2])),
            "finish_reason": draw(st.sampled_from(FinishReason)),
            "delivered": draw(st.sampled_from([None, True, True, False])),
            # In the order of their ends, as a recorder gets them; begun at any time before.
            "created_at": draw(st.integers(1, number + 1)),
            "finished_at": number + 1,
            "versions": tuple(span for span in spans if span.start < span.end),
            "logprobs": (
                np.array([-number - at / 8 for at in range(len(response))], dtype=np.float32)
                if draw(st.booleans())
                else None
            ),
            "sampling_mask": (
                masked([(token, number)[: draw(st.integers(0, 2))] for token in response])
                if draw(st.booleans())
                else None
            ),
            "reward": draw(st.sampled_from([None, 0.0, 1.0])),
        }
        dtype = draw(st.sampled_from(["uint8", "uint16"])) if routed else None
        made.append(Generation(f"g{number}", prompt, response, fields, dtype))
    return made
