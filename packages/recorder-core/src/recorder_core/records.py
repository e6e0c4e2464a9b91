"""Records: what the engine did in one finished generation, kept verbatim.

A `Record` whose prompt begins with everything that an earlier record of the same key ends with
names that record as its `parent` and keeps only the tokens after it. Concatenating a path from
a root to a leaf reproduces exactly the tokens that the engine saw and sampled.

Records are append-only and immutable but for `reward`, `token_level_reward` and `info`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field, FiniteFloat, JsonValue, model_validator
from typing_extensions import Self

from recorder_core.arrays import ArrayModel, ExpertIds, Float32Array, Int32Array
from recorder_core.keys import RecordKey


class FinishReason(str, Enum):
    """Why a generation ended."""

    STOP = "stop"
    """The model sampled a stop token, or a stop string matched."""
    LENGTH = "length"
    """The token limit was reached."""
    ABORT = "abort"
    """The client went away, or the engine was told to abort; the tokens so far are kept."""
    ERROR = "error"
    """The engine failed in the middle of the generation."""


MAX_JSON_DEPTH = 32
"""How deep workflow notes may nest: what is taken in can always be written out again."""


def nests_within(value: Any, limit: int) -> bool:
    """Whether a JSON value nests at most `limit` lists and objects deep."""
    if isinstance(value, dict):
        return limit > 0 and all(nests_within(each, limit - 1) for each in value.values())
    if isinstance(value, list):
        return limit > 0 and all(nests_within(each, limit - 1) for each in value)
    return True


def _writable(info: dict[str, Any]) -> dict[str, Any]:
    if not nests_within(info, MAX_JSON_DEPTH):
        raise ValueError(f"info nests deeper than {MAX_JSON_DEPTH} levels")
    # NaN, lone surrogates and integers of thousands of digits could never be read back.
    json.dumps(info, ensure_ascii=False, allow_nan=False).encode()
    return info


Info = Annotated[dict[str, JsonValue], AfterValidator(_writable)]
"""A workflow's own notes: what JSON holds, of limited depth."""

# Measured with tracemalloc on records as the recorder builds them, three arrays, ids and a share
# of the store's own dictionaries included.
_OBJECT_BYTES = 3_650
# Requests that are sampled alike share one object; a seed is a request's own.
_SEEDED_SAMPLING_BYTES = 1_100
_VERSION_BYTES = 300
_ITEM_BYTES = 800


class VersionSpan(NamedTuple):
    """The weights that sampled a run of tokens: `[start, end)` of a response."""

    start: int
    end: int
    version: str
    """A label as the engine gave it; never compared as a number."""


def check_spans(spans: Sequence[VersionSpan], count: int) -> None:
    """Check that version spans are in order and lie within `count` response tokens.

    Raises:
        ValueError: One does not.
    """
    position = 0
    for span in spans:
        if not position <= span.start < span.end <= count:
            raise ValueError(
                f"version span [{span.start}, {span.end}) is out of order or outside the {count} "
                "response tokens"
            )
        position = span.end


class RoutedExperts(ArrayModel):
    """The experts that routed each token of a mixture-of-experts model.

    Row `i` of the whole sequence is the routing of token `i`, when it predicted token `i + 1`: a
    sequence of `length` tokens has `length - 1` rows.
    """

    data: ExpertIds
    """Expert ids: uint8 or uint16 [rows, layers, top_k]."""
    start: int = Field(default=0, ge=0)
    """The row of the whole sequence that `data[0]` is."""
    valid: tuple[tuple[int, int], ...] | None = None
    """The rows that the engine computed, as `[start, end)` of the whole sequence; None: all."""

    @property
    def end(self) -> int:
        """One past the last row, counted in the whole sequence."""
        return self.start + len(self.data)

    @property
    def valid_ranges(self) -> tuple[tuple[int, int], ...]:
        """`valid`, spelled out."""
        if self.valid is None:
            return ((self.start, self.end),) if len(self.data) else ()
        return self.valid

    def after(self, row: int) -> RoutedExperts:
        """Only the rows from `row` of the whole sequence on, in memory of their own."""
        cut = min(max(row - self.start, 0), len(self.data))
        if not cut:
            return self
        start = self.start + cut
        valid = self.valid and tuple((max(a, start), b) for a, b in self.valid if b > start)
        return RoutedExperts(data=self.data[cut:].copy(), start=start, valid=valid)

    @model_validator(mode="after")
    def _ranges_fit(self) -> Self:
        position = self.start
        for begin, end in self.valid or ():
            if not position <= begin < end <= self.end:
                raise ValueError(
                    f"valid range [{begin}, {end}) is out of order or outside the rows "
                    f"[{self.start}, {self.end})"
                )
            position = end
        return self


class Sampling(ArrayModel):
    """How a response was sampled, as the engine understood the request."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    logprobs_mode: str | None = None
    """What the engine's logprobs are, in its own words, e.g. `raw_logprobs`."""


class MultiModalItem(ArrayModel):
    """A non-text input and the prompt tokens that stand for it."""

    modality: str
    offset: int
    """Position of the first placeholder token in the whole prompt."""
    length: int
    """Number of placeholder tokens."""
    identity: str
    """The engine's hash of the content: equal ids with another image are another prompt."""


class Record(ArrayModel):
    """One finished generation.

    Raises:
        pydantic.ValidationError: Lengths disagree, or a value does not fit its dtype.
    """

    id: str
    """Unique over all servers."""
    key: RecordKey
    """The run that the generation belongs to."""
    parent: str | None = None
    """The record that this one continues, or None for a root."""
    start: int = Field(default=0, ge=0)
    """Tokens on the path up to and including the parent; 0 for a root."""
    prompt_ids: Int32Array
    """The engine's prompt ids after `start`: int32 [new prompt tokens]."""
    response_ids: Int32Array
    """The sampled ids, the stop token included: int32 [response tokens]."""
    logprobs: Float32Array | None = None
    """Logprob of each sampled token, parallel to `response_ids`; None: the engine gave none."""
    versions: tuple[VersionSpan, ...] = ()
    """The weights that sampled the tokens, in order; tokens outside every span are unknown."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token id or stop string that matched, as the engine names it."""
    prompt_text: str | None = None
    response_text: str | None = None
    """The text as the client saw it (a matched stop string left out)."""
    routed_experts: RoutedExperts | None = None
    sampling: Sampling = Sampling()
    adapter: str | None = None
    """The LoRA adapter; records of different adapters never share a path."""
    multi_modal: tuple[MultiModalItem, ...] = ()
    request_id: str = ""
    """The engine's id of the request; not unique (clients may choose it)."""
    sample_index: int = 0
    """Which of the request's `n` samples this is."""
    attempt: int = 0
    """How often the client had sent this request before, by its own count."""
    cached_tokens: int | None = None
    """Prompt tokens that the engine took from its prefix cache."""
    created_at: FiniteFloat = 0.0
    """When the engine took the request: seconds since the epoch."""
    finished_at: FiniteFloat = 0.0
    """When the generation ended: seconds since the epoch."""
    flags: tuple[str, ...] = ()
    """What a trainer should know, e.g. `logprobs_length_mismatch`."""

    reward: FiniteFloat | None = None
    token_level_reward: Float32Array | None = None
    """float32 [response tokens]."""
    info: Info = {}

    @property
    def prompt_end(self) -> int:
        """Tokens on the path before the response."""
        return self.start + len(self.prompt_ids)

    @property
    def end(self) -> int:
        """Tokens on the whole path, the response included."""
        return self.prompt_end + len(self.response_ids)

    @property
    def nbytes(self) -> int:
        """Memory that the record holds: arrays, texts and Python objects, in bytes."""
        total = _OBJECT_BYTES + self.prompt_ids.nbytes + self.response_ids.nbytes
        total += 0 if self.sampling.seed is None else _SEEDED_SAMPLING_BYTES
        for array in (self.logprobs, self.token_level_reward):
            total += 0 if array is None else array.nbytes
        if self.routed_experts is not None:
            total += self.routed_experts.data.nbytes
        for text in (self.prompt_text, self.response_text, self.request_id):
            # len() counts characters; those outside Latin-1 take two to four bytes each.
            total += 0 if text is None else len(text) * (1 if text.isascii() else 4)
        total += _VERSION_BYTES * len(self.versions) + _ITEM_BYTES * len(self.multi_modal)
        for extra in (self.info, *(self.__pydantic_extra__ or {}).values()):
            if isinstance(extra, np.ndarray):
                total += extra.nbytes
            elif extra:
                # Small objects take a few times the room of their notation.
                total += 256 + 4 * len(repr(extra))
        return total

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        count = len(self.response_ids)
        if not count:
            raise ValueError("response_ids is empty; a record is at least one sampled token")
        for name in ("logprobs", "token_level_reward"):
            array = getattr(self, name)
            if array is not None and len(array) != count:
                raise ValueError(f"{name} has {len(array)} values for {count} response_ids")
        check_spans(self.versions, count)
        if self.parent is None and self.start:
            raise ValueError(f"start is {self.start} without a parent; a root starts at 0")
        routed = self.routed_experts
        if routed is not None and routed.end > max(self.end - 1, 0):
            raise ValueError(
                f"routed_experts ends at row {routed.end}, a path of {self.end} tokens has "
                f"{self.end - 1} rows"
            )
        return self


@dataclass(slots=True)
class Turn:
    """A finished generation as an engine's hook hands it over: plain fields, no work done yet.

    Whatever takes time (copying ids into arrays, looking logprobs up, joining chunks) happens on
    the recorder's thread: `logprobs` and `routed_experts` may be functions, called there once.
    """

    key: RecordKey
    prompt_ids: Sequence[int]
    """The whole prompt, as the engine saw it."""
    response_ids: Sequence[int]
    finish_reason: FinishReason
    logprobs: Sequence[float] | Callable[[], Sequence[float]] | None = None
    versions: Sequence[VersionSpan] = ()
    stop_reason: int | str | None = None
    prompt_text: str | None = None
    response_text: str | None = None
    routed_experts: np.ndarray[Any, Any] | Callable[[], RoutedExperts | None] | None = None
    """[prompt + response - 1, layers, top_k], or a function that makes `RoutedExperts`."""
    sampling: Sampling = field(default_factory=Sampling)
    adapter: str | None = None
    multi_modal: tuple[MultiModalItem, ...] = ()
    request_id: str = ""
    sample_index: int = 0
    attempt: int = 0
    cached_tokens: int | None = None
    created_at: float = 0.0
    finished_at: float = 0.0
    flags: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: secrets.token_hex(16))
