"""Records: what the engine did in one finished generation, kept verbatim.

A `Record` whose prompt begins with everything that an earlier record of the same key ends with
names that record as its `parent` and keeps only the tokens after it. Concatenating a path from
a root to a leaf reproduces exactly the tokens that the engine saw and sampled.

Records are append-only and immutable but for what is learnt later: `reward`,
`token_level_reward`, `info`, `delivered`, and a flag that the answer may have been a retry's.
"""

from __future__ import annotations

import functools
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from recorder_core.arrays import (
    AnyArray,
    Float32Array,
    Int32Array,
    equal,
    expert_ids,
    float32,
    int32,
)
from recorder_core.exchange import Exchange
from recorder_core.keys import RecordKey
from recorder_core.nothing import NOTHING
from recorder_core.sampling_mask import SamplingMask


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


CONSTRAINED = "constrained"
"""A record's flag: a grammar, schema or choice masked the distribution before logprobs were taken,
or may have."""
BIASED = "biased"
"""A record's flag: penalties, biases or banned tokens shaped what was sampled."""
FORCED_TOKENS = "forced_tokens"
"""A record's flag: the engine may have put tokens in that the model did not choose."""
LOGPROBS_IMPLAUSIBLE = "logprobs_implausible"
"""A record's flag: logprobs that no distribution has: positive, infinite, or all zero at a
temperature above 0."""
RETRY_UNCLEAR = "retry_unclear"
"""A record's flag: its client had sent the request before, and whether an earlier answer to the
same prompt reached it is not known: both are kept."""

# Measured with tracemalloc on records as the recorder builds them, with ids and a share of the
# store's own dictionaries.
_OBJECT_BYTES = 540
# Requests that are sampled alike share one object; a seed is a request's own.
_SEEDED_SAMPLING_BYTES = 300
_VERSION_BYTES = 200
_ITEM_BYTES = 400

Field = TypeVar("Field")


class VersionSpan(NamedTuple):
    """The weights that sampled a run of tokens: `[start, end)` of a response."""

    start: int
    end: int
    version: str
    """A label as the engine gave it; never compared as a number."""


@functools.lru_cache(maxsize=4096)
def whole_span(end: int, version: str) -> tuple[VersionSpan, ...]:
    """One version from the first token to the last; records of one length share it."""
    return (VersionSpan(0, end, version),)


def check_spans(spans: Iterable[VersionSpan], count: int) -> None:
    """Check that version spans are in order and lie within `count` response tokens.

    Raises:
        ValueError: One does not.
    """
    position = 0
    for start, end, _ in spans:
        if not position <= start < end <= count:
            raise ValueError(
                f"version span [{start}, {end}) is out of order or outside the {count} "
                "response tokens"
            )
        position = end


class RoutedExperts(msgspec.Struct, frozen=True, eq=False, gc=False, omit_defaults=True):
    """The experts that routed each token of a mixture-of-experts model.

    Row `i` of the whole sequence is the routing of token `i`, when it predicted token `i + 1`: a
    sequence of `length` tokens has `length - 1` rows.

    Raises:
        ValueError: The ids have another shape or do not fit, or a range lies outside the rows.
    """

    data: np.ndarray[Any, Any]
    """Expert ids: uint8 or uint16 [rows, layers, top_k]."""
    start: int = 0
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

    def __post_init__(self) -> None:
        force_setattr(self, "data", expert_ids(self.data))
        if self.start < 0:
            raise ValueError(f"start is {self.start}, the first row is 0")
        position = self.start
        for begin, end in self.valid or ():
            if not position <= begin < end <= self.end:
                raise ValueError(
                    f"valid range [{begin}, {end}) is out of order or outside the rows "
                    f"[{self.start}, {self.end})"
                )
            position = end

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        same = (self.start, self.valid) == (other.start, other.valid)
        return same and equal(self.data, other.data)

    __hash__ = object.__hash__


class Sampling(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """How a response was sampled, as the engine understood the request."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    logprobs_mode: str | None = None
    """What the engine's logprobs are, in its own words, e.g. `raw_logprobs`."""

    # What else shapes the distribution; None, and not stored, where it is neutral.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    """Token id → what is added to its logit."""
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    min_tokens: int | None = None
    constraint: str | None = None
    """The kind of constraint on the output, e.g. `json`, `regex`, `grammar`, `structural_tag`."""
    thinking_token_budget: int | None = None

    @property
    def truncated(self) -> bool:
        """Whether top-p, top-k or min-p left some of the vocabulary out."""
        top_k = self.top_k is not None and self.top_k > 0
        return top_k or (self.top_p is not None and self.top_p < 1) or bool(self.min_p)

    @property
    def logprobs_of_policy(self) -> bool | None:
        """Whether the engine's logprobs are those of the policy at the recorded temperature.

        That is `log_softmax(logits / temperature)` over the whole vocabulary: vLLM's
        `raw_logprobs` and SGLang's `original_logprobs` are so at temperature 1, SGLang's
        `temperature_logprobs` always, vLLM's `processed_logprobs` where nothing is truncated.
        None where the engine does not say what its logprobs are.
        """
        if self.logprobs_mode is None:
            return None
        if self.logprobs_mode == "temperature_logprobs":
            return True
        if self.logprobs_mode == "processed_logprobs":
            return not self.truncated
        return self.temperature is None or self.temperature == 1.0


NEUTRAL = Sampling()
_OF_ANOTHER_DISTRIBUTION = frozenset({CONSTRAINED, BIASED, FORCED_TOKENS, LOGPROBS_IMPLAUSIBLE})


class MultiModalItem(msgspec.Struct, frozen=True, gc=False):
    """A non-text input and the prompt tokens that stand for it."""

    modality: str
    offset: int
    """Position of the first placeholder token in the whole prompt."""
    length: int
    """Number of placeholder tokens."""
    identity: str
    """The engine's hash of the content: equal ids with another image are another prompt."""


# What `Record.data` begins with: the numbers of prompt ids, response ids and logprobs, then the
# bytes of the two texts (-1: there is none) and of the request's id.
_HEAD = struct.Struct("<6i")
_lengths: Callable[[bytes], tuple[int, int, int, int, int, int]] = _HEAD.unpack_from
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class Record(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One finished generation; made by `Record.of`.

    Raises:
        ValueError: Lengths disagree.
    """

    id: str
    """Unique over all servers."""
    key: RecordKey
    """The run that the generation belongs to."""
    data: bytes
    """Ids, logprobs and texts, packed: see `Record.pack`. Read them by the properties."""
    finish_reason: FinishReason
    parent: str | None = None
    """The record that this one continues, or None for a root."""
    base: str | None = None
    """The record whose path holds the first `start` tokens of this one's; None: the parent."""
    start: int = 0
    """Tokens on the path that the base holds, and this record does not; 0 where there is none."""
    versions: tuple[VersionSpan, ...] = ()
    """The weights that sampled the tokens, in order; tokens outside every span are unknown."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that matched, as the engine names it."""
    routed_experts: RoutedExperts | None = None
    sampling_mask: SamplingMask | None = None
    """What truncation left of the vocabulary for each response token; None: not given."""
    sampling: Sampling = NEUTRAL
    adapter: str | None = None
    """The LoRA adapter; records of different adapters never share a path."""
    model: str | None = None
    """The model that the request named, where it came over HTTP."""
    delivered: bool | None = None
    """Whether the reply was sent to its end; None where nobody saw it."""
    multi_modal: tuple[MultiModalItem, ...] = ()
    sample_index: int = 0
    """Which of the request's `n` samples this is."""
    attempt: int = 0
    """How often the client had sent this request before, by its own count; tries that the server
    refused do not count."""
    cached_tokens: int | None = None
    """Prompt tokens that the engine took from its prefix cache."""
    created_at: float = 0.0
    """When the engine took the request: seconds since the epoch."""
    finished_at: float = 0.0
    """When the generation ended: seconds since the epoch."""
    flags: tuple[str, ...] = ()
    """What a trainer should know, e.g. `logprobs_length_mismatch`."""

    reward: float | None = None
    """Given to this generation by its id; the run has one of its own."""
    token_level_reward: np.ndarray[Any, Any] | None = None
    """float32 [response tokens]."""
    info: dict[str, Any] = NOTHING

    @classmethod
    def of(
        cls,
        *,
        prompt_ids: Any,
        response_ids: Any,
        logprobs: Any = None,
        prompt_text: str | None = None,
        response_text: str | None = None,
        request_id: str = "",
        **fields: Any,
    ) -> Record:
        """Make a record from arrays or lists and texts; the other fields are the record's own.

        Args:
            prompt_ids: The engine's prompt ids after `start`: int32 [new prompt tokens].
            response_ids: The sampled ids, the stop token included: int32 [response tokens].
            logprobs: Of each sampled token: float32 [response tokens]; None: the engine gave none.
            prompt_text: The new prompt tokens' text, where it is known.
            response_text: The sampled tokens' text.
            request_id: The engine's id of the request.
            **fields: As above; `id` is made where it is not given.

        Raises:
            ValueError: Lengths disagree, or a value does not fit its dtype.
        """
        fields.setdefault("id", new_id())
        reward = fields.get("token_level_reward")
        if reward is not None:
            fields["token_level_reward"] = float32(reward, "token_level_reward")
        fields["finish_reason"] = FinishReason(fields["finish_reason"])
        fields["versions"] = tuple(VersionSpan(*span) for span in fields.get("versions", ()))
        data = cls.pack(
            int32(prompt_ids, "prompt_ids"),
            int32(response_ids, "response_ids"),
            None if logprobs is None else float32(logprobs, "logprobs"),
            prompt_text,
            response_text,
            request_id,
        )
        return cls(data=data, **fields)

    @staticmethod
    def pack(
        prompt_ids: Int32Array,
        response_ids: Int32Array,
        logprobs: Float32Array | None,
        prompt_text: str | None,
        response_text: str | None,
        request_id: str,
    ) -> bytes:
        """One buffer: six int32 lengths, then the values end to end, little-endian.

        The lengths are those of the prompt ids, response ids, logprobs (0 where there are none),
        and in bytes of the two texts (-1 where there is none) and of the request's id.
        """
        texts = [
            None if text is None else text.encode("utf-8", "surrogatepass")
            for text in (prompt_text, response_text, request_id)
        ]
        count = 0 if logprobs is None else len(logprobs)
        lengths = [-1 if text is None else len(text) for text in texts]
        head = _HEAD.pack(len(prompt_ids), len(response_ids), count, *lengths)
        arrays = (prompt_ids, response_ids, logprobs)
        parts = [head, *(each.tobytes() for each in arrays if each is not None)]
        return b"".join([*parts, *(text for text in texts if text)])

    def __post_init__(self) -> None:
        if len(self.data) < _HEAD.size:
            raise ValueError(f"data has {len(self.data)} bytes, it begins with {_HEAD.size}")
        prompt, count, logprobs, before, after, request = _lengths(self.data)
        if count < 1:
            raise ValueError("response_ids is empty; a record is at least one sampled token")
        if logprobs not in (0, count):
            raise ValueError(f"logprobs has {logprobs} values for {count} response_ids")
        size = _HEAD.size + 4 * (prompt + count + logprobs) + max(before, 0) + max(after, 0)
        size += request
        if prompt < 0 or before < -1 or after < -1 or request < 0 or size != len(self.data):
            raise ValueError(f"data has {len(self.data)} bytes, its lengths add up to {size}")
        if self.start < 0 or (self.start and self.parent is None and self.base is None):
            raise ValueError(f"start is {self.start} without a parent; a root starts at 0")
        if self.versions:
            check_spans(self.versions, count)
        reward = self.token_level_reward
        if reward is not None and len(reward) != count:
            raise ValueError(
                f"token_level_reward has {len(reward)} values for {count} response_ids"
            )
        mask = self.sampling_mask
        if mask is not None and len(mask.counts) != count:
            raise ValueError(
                f"sampling_mask has {len(mask.counts)} counts for {count} response_ids"
            )
        routed = self.routed_experts
        if routed is not None and routed.end > self.start + prompt + count - 1:
            raise ValueError(
                f"routed_experts ends at row {routed.end}, a path of "
                f"{self.start + prompt + count} tokens has {self.start + prompt + count - 1} rows"
            )

    @property
    def prompt_ids(self) -> Int32Array:
        """The engine's prompt ids after `start`: int32 [new prompt tokens]."""
        return np.frombuffer(self.data, _INT32, self.prompt_count, _HEAD.size)

    @property
    def response_ids(self) -> Int32Array:
        """The sampled ids, the stop token included: int32 [response tokens]."""
        prompt, count = _lengths(self.data)[:2]
        return np.frombuffer(self.data, _INT32, count, _HEAD.size + 4 * prompt)

    @property
    def new_ids(self) -> Int32Array:
        """`prompt_ids` and `response_ids`, which lie side by side."""
        prompt, count = _lengths(self.data)[:2]
        return np.frombuffer(self.data, _INT32, prompt + count, _HEAD.size)

    @property
    def logprobs(self) -> Float32Array | None:
        """Logprob of each sampled token, parallel to `response_ids`; None: the engine gave none."""
        prompt, count, logprobs = _lengths(self.data)[:3]
        if not logprobs:
            return None
        return np.frombuffer(self.data, _FLOAT32, count, _HEAD.size + 4 * (prompt + count))

    @property
    def prompt_text(self) -> str | None:
        """The prompt's text, where the engine knows it and this record holds the whole prompt."""
        prompt, count, logprobs, length = _lengths(self.data)[:4]
        return self._text(_HEAD.size + 4 * (prompt + count + logprobs), length)

    @property
    def response_text(self) -> str | None:
        """The sampled tokens as the engine decoded them, before any tool or reasoning parser.

        A tool call is its markup. A matched stop string is left out; special tokens may be.
        """
        prompt, count, logprobs, before, length = _lengths(self.data)[:5]
        begin = _HEAD.size + 4 * (prompt + count + logprobs) + max(before, 0)
        return self._text(begin, length)

    @property
    def request_id(self) -> str:
        """The engine's id of the request; not unique (clients may choose it)."""
        length = _lengths(self.data)[5]
        return self.data[len(self.data) - length :].decode("utf-8", "replace")

    def _text(self, begin: int, length: int) -> str | None:
        if length < 0:
            return None
        return self.data[begin : begin + length].decode("utf-8", "replace")

    @property
    def prompt_count(self) -> int:
        """How many `prompt_ids` there are."""
        return _lengths(self.data)[0]

    @property
    def response_count(self) -> int:
        """How many `response_ids` there are."""
        return _lengths(self.data)[1]

    @property
    def prompt_end(self) -> int:
        """Tokens on the path before the response."""
        return self.start + self.prompt_count

    @property
    def end(self) -> int:
        """Tokens on the whole path, the response included."""
        prompt, count = _lengths(self.data)[:2]
        return self.start + prompt + count

    @property
    def before(self) -> str | None:
        """The record that holds the first `start` tokens of the path; None: there are none."""
        return self.parent if self.base is None else self.base

    @property
    def broken_off(self) -> bool:
        """Whether its client did not get the answer: it was aborted, failed, or was not sent."""
        ended = self.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        return ended or self.delivered is False

    @property
    def logprobs_of_policy(self) -> bool:
        """Whether its logprobs are those of the policy at the recorded temperature.

        They are not where there are none, where a flag says that something else shaped them, or
        where the sampling says so (see `Sampling.logprobs_of_policy`).
        """
        plain = _OF_ANOTHER_DISTRIBUTION.isdisjoint(self.flags)
        given = self.logprobs is not None
        return given and plain and self.sampling.logprobs_of_policy is not False

    @property
    def nbytes(self) -> int:
        """Memory that the record holds: arrays, texts and Python objects, in bytes."""
        total = _OBJECT_BYTES + len(self.data)
        if self.sampling.seed is not None:
            total += _SEEDED_SAMPLING_BYTES
        if self.token_level_reward is not None:
            total += self.token_level_reward.nbytes
        if self.routed_experts is not None:
            total += self.routed_experts.data.nbytes
        if self.sampling_mask is not None:
            total += self.sampling_mask.nbytes
        if self.multi_modal:
            total += _ITEM_BYTES * len(self.multi_modal)
        if len(self.versions) > 1:  # one span is shared by all records of its length
            total += _VERSION_BYTES * (len(self.versions) - 1)
        return total + info_bytes(self.info) if self.info else total

    def replace(self, **changes: Any) -> Record:
        """A copy with other values; `prompt_ids` and the like are given as to `Record.of`."""
        if not changes.keys().isdisjoint(_PACKED):
            values = {name: changes.pop(name, getattr(self, name)) for name in _PACKED}
            changes["data"] = Record.of(**values, key=self.key, finish_reason="stop").data
        return msgspec.structs.replace(self, **changes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return all(equal(getattr(self, name), getattr(other, name)) for name in _FIELDS)

    __hash__ = object.__hash__


_PACKED = (
    *("prompt_ids", "response_ids", "logprobs"),
    *("prompt_text", "response_text", "request_id"),
)
_FIELDS = tuple(each.name for each in msgspec.structs.fields(Record))


def new_id() -> str:
    """An id that no other record has: 96 random bits."""
    return secrets.token_urlsafe(12)


def info_bytes(info: dict[str, Any]) -> int:
    """Memory that notes hold: small objects take a few times the room of their notation."""
    return 256 + 4 * len(repr(info)) if info else 0


def made(field: Field | Callable[[], Field]) -> Field:
    """The value of a turn's field, which may be a function that makes it."""
    return field() if callable(field) else field


@dataclass(slots=True)
class Turn:
    """A finished generation as an engine's hook hands it over: plain fields, no work done yet.

    Whatever takes time (copying ids into arrays, looking logprobs up, joining chunks) happens on
    the recorder's thread: fields that may be functions are called there once.
    """

    key: RecordKey
    prompt_ids: Sequence[int] | AnyArray
    """The whole prompt, as the engine saw it."""
    response_ids: Sequence[int] | AnyArray
    finish_reason: FinishReason
    logprobs: Sequence[float] | AnyArray | Callable[[], Sequence[float]] | None = None
    versions: Sequence[VersionSpan] = ()
    stop_reason: int | str | None = None
    prompt_text: str | None = None
    response_text: str | None = None
    routed_experts: AnyArray | RoutedExperts | Callable[[], RoutedExperts | None] | None = None
    """[prompt + response - 1, layers, top_k], or a function that makes `RoutedExperts`."""
    sampling_mask: SamplingMask | Callable[[], SamplingMask | None] | None = None
    sampling: Sampling | Callable[[], Sampling] = NEUTRAL
    adapter: str | None = None
    multi_modal: tuple[MultiModalItem, ...] = ()
    request_id: str = ""
    sample_index: int = 0
    attempt: int = 0
    cached_tokens: int | None = None
    created_at: float = 0.0
    finished_at: float = 0.0
    flags: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()
    exchange: Exchange | None = None
    """The HTTP request that caused it, where there is one."""
    id: str = ""
    """The record's; empty: one is made."""
