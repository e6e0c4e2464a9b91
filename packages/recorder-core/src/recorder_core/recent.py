"""What happened lately, for people who look: finished generations in brief, and drained runs.

A trainer that drains takes its runs out of the store. Here the summaries of the last generations
stay, and, within a byte budget, references to the runs that were handed out: read-only, and no
part of what is drained, rewarded or evicted.
"""

from __future__ import annotations

import itertools
import math
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import numpy as np

from recorder_core.arrays import Float32Array
from recorder_core.keys import RecordKey
from recorder_core.keytree import KeyTree, Selection
from recorder_core.records import Record
from recorder_core.runs import Run

DEFAULT_RECENT_BYTES = 64 * 1024**2
MAX_GENERATIONS = 10_000
"""Finished generations whose summaries are kept, and changes of runs."""
TEXT_CHARACTERS = 200
"""Of a response's text, in a summary."""


class Generation(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A finished generation in brief."""

    seq: int
    key: str
    id: str
    """The record's."""
    parent: str | None
    prompt: int
    """Tokens on the path before the response."""
    response: int
    """Sampled tokens."""
    finish_reason: str
    created_at: float
    """Seconds since the epoch."""
    finished_at: float
    """Seconds since the epoch."""
    logprob_mean: float | None = None
    """Of the sampled tokens; None where the engine gave no logprobs."""
    logprob_min: float | None = None
    versions: tuple[str, ...] = ()
    """Labels of the weights that sampled it, in order."""
    flags: tuple[str, ...] = ()
    sample_index: int = 0
    attempt: int = 0
    model: str | None = None
    adapter: str | None = None
    text: str | None = None
    """How the response's text begins; None where there is none."""


class RunChange(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What became of a run."""

    seq: int
    key: str
    """Of what was removed, a prefix: the runs below it."""
    reward: float | None = None
    """The reward written last, to the run or to one of its generations; None: as it was."""
    drained: bool | None = None
    """Whether it was handed out to a trainer, or came back; None: as it was."""
    removed: bool = False
    """Whether it was deleted."""


_Entry = TypeVar("_Entry", bound=Generation | RunChange)


class News(msgspec.Struct, frozen=True):
    """What there is after a cursor, in order."""

    next: str
    """The cursor to ask with next."""
    missed: bool
    """Whether entries after the cursor asked with are no longer there."""
    generations: list[Generation]
    runs: list[RunChange]


class Recent:
    """Summaries of what finished lately, and the runs that were handed out. Thread-safe.

    Taking a generation or a run costs a few dictionary operations and no copy; its lock is taken
    last, and nobody is called back with it.

    Args:
        max_bytes: Memory for runs that were handed out, those of the oldest hand-outs given up
            first; 0 keeps none.
        max_generations: Summaries that are kept, and as many changes of runs.
    """

    def __init__(self, max_bytes: int = 0, *, max_generations: int = MAX_GENERATIONS) -> None:
        self._max_bytes = max_bytes
        self._instance = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._seq = itertools.count(1)
        self._last = 0
        self._dropped = 0  # the number of the last entry that is no longer there
        self._generations: deque[Generation] = deque(maxlen=max_generations)
        self._changes: deque[RunChange] = deque(maxlen=max_generations)
        self._waiting: dict[object, Callable[[], None]] = {}
        # By the identity of the object, which is held: a key may be handed out more than once.
        self._runs: OrderedDict[int, tuple[Run, int]] = OrderedDict()
        self._by_key: KeyTree[dict[int, Run]] = KeyTree()
        self._bytes = 0

    # Taking.

    def add(self, record: Record) -> None:
        """A generation has finished, and is stored."""
        mean, low = _mean_and_least(record.logprobs)
        text = record.response_text
        versions = tuple(dict.fromkeys(span.version for span in record.versions))
        with self._lock:
            self._put(
                self._generations,
                Generation(
                    seq=self._number(),
                    key=record.key.text,
                    id=record.id,
                    parent=record.parent,
                    prompt=record.prompt_end,
                    response=record.response_count,
                    finish_reason=record.finish_reason.value,
                    created_at=record.created_at,
                    finished_at=record.finished_at,
                    logprob_mean=mean,
                    logprob_min=low,
                    versions=versions,
                    flags=record.flags,
                    sample_index=record.sample_index,
                    attempt=record.attempt,
                    model=record.model,
                    adapter=record.adapter,
                    text=None if text is None else text[:TEXT_CHARACTERS],
                ),
            )
            told = self._told()
        _tell(told)

    def forward(self, news: News) -> None:
        """Take what another one tells, numbered anew."""
        entries: list[Generation | RunChange] = [*news.generations, *news.runs]
        entries.sort(key=lambda each: each.seq)
        with self._lock:
            for each in entries:
                numbered = msgspec.structs.replace(each, seq=self._number())
                if isinstance(numbered, Generation):
                    self._put(self._generations, numbered)
                else:
                    self._put(self._changes, numbered)
            told = self._told() if entries else []
        _tell(told)

    def rewarded(self, key: RecordKey, reward: float) -> None:
        """A reward was written to a run, or to a generation of it."""
        self._change(key, reward=reward)

    def handed_out(self, run: Run, size: int) -> None:
        """A run left the store by a drain; kept by reference, it must not change any more.

        Args:
            run: The run.
            size: Its bytes.
        """
        with self._lock:
            if size <= self._max_bytes:
                self._runs[id(run)] = run, size
                of_key = self._by_key.get(run.key) or {}
                of_key[id(run)] = run
                self._by_key.put(run.key, of_key)
                self._bytes += size
                while self._bytes > self._max_bytes:
                    self._forget(next(iter(self._runs.values()))[0])
        self._change(run.key, drained=True)

    def returned(self, run: Run) -> None:
        """A run that was handed out is back in the store."""
        with self._lock:
            self._forget(run)
        self._change(run.key, drained=False)

    def removed(self, where: Selection) -> None:
        """Runs were deleted: what was handed out of them is not shown any more either."""
        self.forget(where)
        self._change(where, removed=True)

    def forget(self, where: Selection) -> None:
        """Keep nothing of what was handed out."""
        with self._lock:
            gone = [run for runs in self._by_key.values(where) for run in runs.values()]
            for run in gone:
                self._forget(run)

    def _forget(self, run: Run) -> None:
        _, size = self._runs.pop(id(run), (run, 0))
        self._bytes -= size
        others = self._by_key.get(run.key)
        if others and others.pop(id(run), None) is not None and not others:
            self._by_key.pop(run.key)

    def _change(
        self,
        where: Selection,
        *,
        reward: float | None = None,
        drained: bool | None = None,
        removed: bool = False,
    ) -> None:
        with self._lock:
            change = RunChange(self._number(), str(where), reward, drained, removed)
            self._put(self._changes, change)
            told = self._told()
        _tell(told)

    def _number(self) -> int:
        self._last = next(self._seq)
        return self._last

    def _put(self, ring: deque[_Entry], entry: _Entry) -> None:
        if len(ring) == ring.maxlen:
            self._dropped = max(self._dropped, ring[0].seq)
        ring.append(entry)

    def _told(self) -> list[Callable[[], None]]:
        told = list(self._waiting.values())
        self._waiting.clear()
        return told

    # Reading.

    @property
    def bytes(self) -> int:
        """Memory of the runs that are kept."""
        return self._bytes

    def drained(self, where: Selection) -> list[Run]:
        """Copies of the runs that were handed out and are still kept, those of a key in order."""
        with self._lock:
            found = [list(runs.values()) for runs in self._by_key.values(where)]
        return [Run(run.key).merge(run) for runs in found for run in runs]

    def since(self, cursor: str, limit: int) -> News:
        """What came after a cursor, oldest first, at most so many entries.

        Args:
            cursor: The `next` of an earlier answer; empty, or another process's: from the oldest.
            limit: Of generations and changes together.
        """
        instance, _, number = cursor.partition(".")
        known = instance == self._instance and number.isascii() and number.isdigit()
        with self._lock:
            after = min(int(number[:18]), self._last) if known else 0
            missed = self._dropped > after
            generations = _after(self._generations, after)
            changes = _after(self._changes, after)
            last = self._last
        if len(generations) + len(changes) > limit:
            numbers = [each.seq for each in generations] + [each.seq for each in changes]
            last = sorted(numbers)[limit - 1]
            generations = [each for each in generations if each.seq <= last]
            changes = [each for each in changes if each.seq <= last]
        return News(f"{self._instance}.{last}", missed, generations, changes)

    def when_news(self, cursor: str, tell: Callable[[], None]) -> Callable[[], None] | None:
        """Have `tell` called once something comes after a cursor; None if something is there.

        It is called on the thread that brings it, which it must not hold up.

        Returns:
            What calls it off.
        """
        name = object()
        with self._lock:
            if cursor != f"{self._instance}.{self._last}":
                return None
            self._waiting[name] = tell

        def cancel() -> None:
            with self._lock:
                self._waiting.pop(name, None)

        return cancel


def _after(ring: deque[_Entry], number: int) -> list[_Entry]:
    newer: Iterator[_Entry] = itertools.takewhile(lambda each: each.seq > number, reversed(ring))
    return list(newer)[::-1]


def _mean_and_least(logprobs: Float32Array | None) -> tuple[float | None, float | None]:
    """Of the values that are there; None where none is."""
    if logprobs is None:
        return None, None
    least = float(np.minimum.reduce(logprobs))  # as the methods do, in a third of their time
    if math.isnan(least):  # some are not there
        logprobs = logprobs[~np.isnan(logprobs)]
        if not logprobs.size:
            return None, None
        least = float(np.minimum.reduce(logprobs))
    return float(np.add.reduce(logprobs, dtype=np.float64)) / len(logprobs), least


def _tell(told: list[Callable[[], None]]) -> None:
    for tell in told:
        tell()
