"""Made-up generations as an engine hands them over: lists of ids, an array of logprobs, text."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Iterable, Iterator

import numpy as np

from recorder_core import (
    FinishReason,
    KeyPrefix,
    Record,
    Recorder,
    RecordKey,
    Run,
    Sampling,
    Turn,
)
from recorder_core.records import VersionSpan

CHARACTERS_PER_TOKEN = 4  # what English text comes to, with large vocabularies

_random = np.random.default_rng(0)
_number = itertools.count()


# One object, as the engines' hooks make one for all requests that are sampled alike.
_SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, logprobs_mode="raw_logprobs")


def ids(count: int) -> list[int]:
    """Random token ids of a large vocabulary."""
    return _random.integers(1000, 150_000, count).tolist()


def text(tokens: int) -> str:
    """A text of its own: equal ones would share memory."""
    letters = _random.integers(97, 123, CHARACTERS_PER_TOKEN * tokens, dtype=np.uint8)
    return letters.tobytes().decode()


def fresh_key() -> RecordKey:
    """A key that nothing else uses."""
    return RecordKey.parse(f"bench/task/{next(_number)}")


def generation(
    key: RecordKey, prompt: list[int], response: list[int], created_at: float | None = None
) -> Turn:
    """A finished turn, with everything that vLLM gives for a text model; it took a second."""
    created_at = time.time() if created_at is None else created_at
    logprobs = array("f")
    for value in _random.uniform(-3, 0, len(response)).tolist():
        logprobs.append(value)  # one by one, as they come: the array then has room to spare
    return Turn(
        key=key,
        prompt_ids=prompt,
        response_ids=response,
        finish_reason=FinishReason.STOP,
        logprobs=logprobs,
        versions=(VersionSpan(0, len(response), "7"),),
        prompt_text=text(len(prompt)),
        response_text=text(len(response)),
        sampling=_SAMPLING,
        request_id=f"chatcmpl-{next(_number):032x}",
        cached_tokens=0,
        created_at=created_at,
        finished_at=created_at + 1,
    )


def single(prompt: int, response: int) -> Turn:
    """A generation that continues nothing."""
    return generation(fresh_key(), ids(prompt), ids(response))


def conversation(turns: int, first: int, new: int, response: int) -> Iterator[Turn]:
    """The turns of one run, each continuing the last.

    Args:
        turns: How many.
        first: Tokens of the first prompt.
        new: Tokens that the environment adds before each further turn.
        response: Tokens sampled in each turn.
    """
    key, path, begin = fresh_key(), ids(first), time.time()
    for turn in range(turns):
        sampled = ids(response)
        yield generation(key, path, sampled, begin + turn)
        path = [*path, *sampled, *ids(new)]


def recorded(turns: Iterable[Turn]) -> list[Run]:
    """The runs of turns, as the recorder stores them."""
    recorder = Recorder()
    for turn in turns:
        recorder.submit(turn)
    recorder.close(timeout=600)
    return recorder.store.get(KeyPrefix())


def copies(record: Record, count: int) -> Iterator[Record]:
    """Records alike, each in memory of its own and under a key of its own."""
    for number in range(count):
        yield record.replace(
            id=f"copy-{number}",
            key=RecordKey.parse(f"copies/{number // 8}/{number}"),
            data=bytes(bytearray(record.data)),
        )


def record(key: RecordKey, prompt: int, response: int, parent: Record | None = None) -> Record:
    """A record of one generation, which may continue another."""
    return Record.of(
        key=key,
        prompt_ids=ids(prompt),
        response_ids=ids(response),
        logprobs=_random.uniform(-3, 0, response),
        finish_reason=FinishReason.STOP,
        parent=parent.id if parent else None,
        start=parent.end if parent else 0,
        versions=(VersionSpan(0, response, "7"),),
        sampling=_SAMPLING,
        created_at=parent.finished_at if parent else 1.0,
        finished_at=(parent.finished_at if parent else 1.0) + 1,
    )
