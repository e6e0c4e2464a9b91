"""From the SDK's prompts and responses to the recorder's turns; nothing here waits."""

from __future__ import annotations

import functools
import hashlib
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from recorder_core.arrays import AnyArray
from recorder_core.context import Identity
from recorder_core.drops import DropReason
from recorder_core.errors import NotRecordedError
from recorder_core.intake import Outcome, Pending
from recorder_core.recorder import Recorder
from recorder_core.records import FinishReason, MultiModalItem, Sampling, Turn, VersionSpan

Complete = Callable[[NotRecordedError | None], None]
"""Told once when a call's samples are stored, or why one is not."""

PLACEHOLDER = -1
"""Stands in a prompt for a token of an image: the SDK does not know its id."""

_FAILURES = frozenset(
    {
        DropReason.CLOSED,
        DropReason.ERROR,
        DropReason.FULL,
        DropReason.NO_PARENT,
        DropReason.QUEUE_FULL,
    }
)
"""Reasons for which a turn is dropped that are nobody's wish."""


class Prompt(NamedTuple):
    """A prompt as far as it is known."""

    ids: AnyArray
    """int32 [prompt tokens]."""
    items: tuple[MultiModalItem, ...] = ()
    flags: tuple[str, ...] = ()


class Weights(NamedTuple):
    """Which weights a sampling client samples from."""

    label: str | None
    """A sampler path, else the base model's name; None: not known."""
    flags: tuple[str, ...] = ()


def read_prompt(prompt: Any) -> Prompt:
    """The token ids of a `ModelInput`.

    Each token of an image is `PLACEHOLDER`, so that what follows stands at its position; an image
    whose number of tokens the caller did not say takes none, and the prompt is flagged.
    """
    parts: list[AnyArray] = []
    items: list[MultiModalItem] = []
    flags: list[str] = []
    end = 0
    for chunk in prompt.chunks:
        tokens = getattr(chunk, "tokens", None)
        if tokens is None:
            length = _length(chunk)
            modality, identity = _content(chunk)
            items.append(
                MultiModalItem(modality=modality, offset=end, length=length or 0, identity=identity)
            )
            flags.append("prompt_placeholders" if length else "prompt_length_unknown")
            part = np.full(length or 0, PLACEHOLDER, dtype=np.int32)
        else:
            part = _copied(tokens)
        parts.append(part)
        end += len(part)
    ids = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int32), *parts])
    return Prompt(ids, tuple(items), tuple(dict.fromkeys(flags)))


def _copied(tokens: Sequence[int]) -> AnyArray:
    """Ids in memory of their own: what the caller does with its list later is not in the record."""
    ids = np.empty(len(tokens), dtype=np.int32)
    # In half the time that numpy takes to read a list; what does not fit raises as there.
    struct.pack_into(f"{len(ids)}i", ids.data, 0, *tokens)
    return ids


def _length(chunk: Any) -> int | None:
    try:
        return int(chunk.length)
    except (AttributeError, TypeError, ValueError):
        return None


def _content(chunk: Any) -> tuple[str, str]:
    """What kind of input a chunk is, and a name for its content."""
    kind = str(getattr(chunk, "type", type(chunk).__name__))
    if (location := getattr(chunk, "location", None)) is not None:
        return "image", str(location)
    data = getattr(chunk, "data", None) or getattr(chunk, "dmel", None) or b""
    modality = "image" if kind == "image" else kind
    return modality, hashlib.sha256(data).hexdigest()


def read_tokens(sequence: Any) -> AnyArray:
    """A sequence's sampled ids, int32 [tokens], in memory of their own."""
    tokens = getattr(sequence, "tokens_np", None)
    return np.array(sequence.tokens if tokens is None else tokens, dtype=np.int32)


def read_logprobs(sequence: Any) -> AnyArray | None:
    """A sequence's logprobs, float32 [tokens], in memory of their own; None if it has none."""
    logprobs = getattr(sequence, "logprobs_np", None)
    if logprobs is None:
        logprobs = sequence.logprobs
    return None if logprobs is None else np.array(logprobs, dtype=np.float32)


def _finish_reason(stop_reason: Any) -> tuple[FinishReason, tuple[str, ...]]:
    try:
        return FinishReason(stop_reason), ()
    except ValueError:
        return FinishReason.ERROR, ("unknown_stop_reason",)


@functools.lru_cache(maxsize=1024)
def _sampling(temperature: float, top_p: float, top_k: int, seed: int | None) -> Sampling:
    # Calls sample alike: their records share one object, which is immutable.
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)


class Call:
    """One call of `sample` that is recorded: in flight from here on, until it ends one way.

    Args:
        recorder: Where its turns go.
        identity: Whom it is recorded for.
        num_samples: How many sequences are asked for.
        params: The SDK's sampling parameters.
        raises: Whether whoever waits is told that a sample could not be recorded.
    """

    __slots__ = ("_arrived", "_identity", "_params", "_pending", "_raises", "_recorder", "prompt")

    prompt: Prompt

    def __init__(
        self, recorder: Recorder, identity: Identity, num_samples: int, params: Any, *, raises: bool
    ) -> None:
        assert identity.key is not None
        self._recorder = recorder
        self._identity = identity
        self._params = params
        self._raises = raises
        self._arrived = time.time()
        self._pending = [recorder.start(identity.key) for _ in range(num_samples)]

    def drop(self, reason: DropReason) -> None:
        """Nothing was sampled, or nothing is to be kept."""
        for pending in self._pending:
            pending.drop(reason)

    def finish(
        self,
        response: Any,
        weights: Weights,
        complete: Complete,
        details: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """The samples are there: they are handed to the recorder.

        Args:
            response: The SDK's `SampleResponse`.
            weights: What sampled it.
            complete: Told when all of them are stored or dropped; a fault here counts as dropped.
            details: More fields of each sequence's turn.
        """
        try:
            turns = self._turns(response, weights, details)
        except Exception as error:  # noqa: BLE001 - the sample comes first: counted and logged
            self._recorder.count_error("samples of %s were not recorded", self._identity.key)
            self.drop(DropReason.ERROR)
            complete(self._failure(Outcome(DropReason.ERROR, error)))
            return
        wait = _Countdown(len(turns), lambda outcome: complete(self._failure(outcome)))
        pending = self._pending + [self._start() for _ in turns[len(self._pending) :]]
        for each, turn in zip(pending, turns, strict=False):
            each.finish(turn, wait.settled)
        for each in pending[len(turns) :]:
            each.drop(DropReason.NOT_RETURNED)

    def _start(self) -> Pending:
        assert self._identity.key is not None
        return self._recorder.start(self._identity.key)

    def _failure(self, outcome: Outcome | None) -> NotRecordedError | None:
        if not self._raises or outcome is None or outcome.dropped not in _FAILURES:
            return None
        failure = NotRecordedError(
            f"a sample of {self._identity.key} was not recorded: {outcome.dropped.value}"
            + (f" ({outcome.error!r})" if outcome.error else "")
        )
        failure.__cause__ = outcome.error
        return failure

    def _turns(
        self, response: Any, weights: Weights, details: Sequence[Mapping[str, Any]]
    ) -> list[Turn]:
        assert self._identity.key is not None
        now = time.time()
        params = self._params
        sampling = _sampling(params.temperature, params.top_p, params.top_k, params.seed)
        turns = []
        for index, sequence in enumerate(response.sequences):
            tokens = read_tokens(sequence)
            finish_reason, flags = _finish_reason(sequence.stop_reason)
            label = weights.label
            turns.append(
                Turn(
                    key=self._identity.key,
                    prompt_ids=self.prompt.ids,
                    response_ids=tokens,
                    finish_reason=finish_reason,
                    logprobs=read_logprobs(sequence),
                    versions=[VersionSpan(0, len(tokens), label)] if label and len(tokens) else [],
                    sampling=sampling,
                    multi_modal=self.prompt.items,
                    request_id=getattr(sequence, "sequence_id", None) or "",
                    sample_index=index,
                    attempt=self._identity.attempt,
                    exchange=self._identity.exchange,
                    created_at=self._arrived,
                    finished_at=now,
                    flags=(*self.prompt.flags, *weights.flags, *flags),
                    **(details[index] if details else {}),
                )
            )
        return turns


class _Countdown:
    """Waits for so many turns to be settled, then tells of the first that failed, if one did."""

    def __init__(self, count: int, done: Callable[[Outcome | None], None]) -> None:
        self._left = count
        self._done = done
        self._failed: Outcome | None = None
        self._lock = threading.Lock()  # a refused turn is settled on the thread that hands it over
        if not count:
            done(None)

    def settled(self, outcome: Outcome) -> None:
        """One of them is stored or dropped."""
        with self._lock:
            if outcome.dropped in _FAILURES and self._failed is None:
                self._failed = outcome
            self._left -= 1
            last = not self._left
        if last:
            self._done(self._failed)
