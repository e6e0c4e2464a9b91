"""Runs: what an engine has recorded under one key, and what is known of it as a whole."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from recorder_core.arrays import Int32Array
from recorder_core.drops import cutting
from recorder_core.keys import RecordKey
from recorder_core.nothing import NOTHING
from recorder_core.records import Record, info_bytes

EVICTED = "evicted"
"""Beside the reasons of `DropReason`: what `Run.missing` counts as deleted for room or age."""

SampleId = str | tuple[str, int]
"""Names generations of a run: a record's id, or the id of an API's reply, with the index of one of
its choices where only that is meant."""

# Engines send the prompts of a batch as requests of their own, numbered behind the API's id.
_NUMBERED = re.compile(r"[-_](\d{1,9})")

RUN_BYTES = 400
"""What a run holds beside its records and notes: the object, its dictionaries, its places in the
store's. Measured with tracemalloc."""


class Run:
    """The generations of one key, in the order in which they came, and the run's own values.

    Args:
        key: The run.
        records: Its generations, parents before the records that continue them.
        reward: The run's reward, which generations that end later have too.
        info: The workflow's notes on the run.
        dropped: Generations that are not recorded, by reason.
        evicted: Generations that were deleted for room or age.
        pending: Generations in flight when the run was looked at.
        closed: Whether later generations are refused.
    """

    __slots__ = (
        "_held",
        "closed",
        "dropped",
        "evicted",
        "info",
        "key",
        "pending",
        "reward",
    )

    # Most runs have one record, or one so far: it needs no dictionary.
    _held: Record | dict[str, Record] | None

    def __init__(
        self,
        key: RecordKey,
        records: Iterable[Record] = (),
        *,
        reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        dropped: Mapping[str, int] | None = None,
        evicted: int = 0,
        pending: int = 0,
        closed: bool = False,
    ) -> None:
        self.key = key
        self._held = None
        for record in records:
            self.put(record)
        self.reward = reward
        self.info: Mapping[str, Any] = info or NOTHING
        self.dropped: Mapping[str, int] = dropped or NOTHING
        self.evicted = evicted
        self.pending = pending
        self.closed = closed

    @property
    def records(self) -> Mapping[str, Record]:
        """The generations by id, in the order in which they came; written to by `put`."""
        held = self._held
        if isinstance(held, dict):
            return held
        return {} if held is None else {held.id: held}

    def put(self, record: Record) -> None:
        """Take a generation, or replace the one of its id."""
        held = self._held
        if isinstance(held, dict):
            held[record.id] = record
        elif held is None or held.id == record.id:
            self._held = record
        else:
            self._held = {held.id: held, record.id: record}

    def prompt_ids(self, record: Record) -> Int32Array:
        """The whole prompt of one of the run's generations: int32 [record.prompt_end].

        `Record.prompt_ids` has only the part that no record before it holds.
        """
        return self.token_ids(record)[: record.prompt_end]

    def token_ids(self, record: Record, begin: int = 0) -> Int32Array:
        """The tokens of a generation's path from `begin` on, prompt and response.

        Args:
            record: One of the run's.
            begin: Where to begin, in tokens of the path.

        Returns:
            int32 [record.end - begin]; read-only where one record holds them all.
        """
        if begin >= record.start:
            return record.new_ids[begin - record.start :]
        ids = np.empty(record.end - begin, np.int32)
        # A record from another server may hold its whole prompt, and one that shares its prompt
        # with another only the end of it.
        end = record.end
        while True:
            cut = max(begin, record.start)
            ids[cut - begin : end - begin] = record.new_ids[cut - record.start : end - record.start]
            if cut == begin or record.before is None:
                return ids
            record, end = self.records[record.before], cut

    @property
    def missing(self) -> dict[str, int]:
        """Generations that the run had and that are not here, by reason.

        Empty for a whole run. What was never a turn of the conversation is not counted: a request
        that was refused, or ended before its first token.
        """
        found = cutting(self.dropped)
        if self.evicted:
            found[EVICTED] = self.evicted
        return found

    def select(self, name: SampleId) -> list[Record]:
        """The generations that a name stands for; none if it stands for none.

        Args:
            name: A record's id, or the `id` of an API's reply: all samples of that request, or of
                `(id, index)` the one whose choice has that index.
        """
        text, index = (name, None) if isinstance(name, str) else name
        if index is None and text in self.records:
            return [self.records[text]]
        records = self.records.values()
        # Clients may choose ids: of `step`, where it is there, `step-1` is no part.
        parts = [(0, each) for each in records if each.request_id == text] or [
            (int(numbered[1]), each)
            for each in records
            if each.request_id.startswith(text)
            and (numbered := _NUMBERED.fullmatch(each.request_id, len(text)))
        ]
        if index is None:
            return [each for _, each in parts]
        # One request may have several prompts, of n samples each: a choice counts through both.
        n = max((each.sample_index for _, each in parts), default=0) + 1
        return [each for part, each in parts if part * n + each.sample_index == index]

    @property
    def rewarded(self) -> int:
        """Generations that have a reward, their own or the run's."""
        if self.reward is not None:
            return len(self.records)
        return sum(record.reward is not None for record in self.records.values())

    @property
    def nbytes(self) -> int:
        """Memory that the run holds, in bytes."""
        return self.own_bytes + sum(record.nbytes for record in self.records.values())

    @property
    def own_bytes(self) -> int:
        """The part of `nbytes` that is not its records'."""
        return RUN_BYTES + (info_bytes(dict(self.info)) if self.info else 0)

    def merge(self, other: Run) -> Run:
        """The run as this part and one that was recorded later, or elsewhere, make it together."""
        return Run(
            self.key,
            {**self.records, **other.records}.values(),
            reward=self.reward if other.reward is None else other.reward,
            info={**self.info, **other.info},
            dropped=Counter(self.dropped) + Counter(other.dropped),
            evicted=self.evicted + other.evicted,
            pending=self.pending + other.pending,
            closed=self.closed or other.closed,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Run):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _VALUES)

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        values = {name: getattr(self, name) for name in _VALUES if name not in ("key", "records")}
        values |= {"info": dict(self.info), "dropped": dict(self.dropped)}
        return functools.partial(Run, self.key, list(self.records.values()), **values), ()

    def __repr__(self) -> str:
        missing = f", missing={self.missing}" if self.missing else ""
        return f"Run({self.key.text!r}, {len(self.records)} records, reward={self.reward}{missing})"


_VALUES = ("key", "records", "reward", "info", "dropped", "evicted", "pending", "closed")


def fits(record: Record, known: Mapping[str, Record]) -> bool:
    """Whether what a record builds on is known, and ends where the record starts."""
    parent = known.get(record.parent) if record.parent is not None else None
    if record.parent is not None and (parent is None or parent.end > record.start):
        return False
    if record.base is None:
        return parent is None or parent.end == record.start
    base = known.get(record.base)
    return base is not None and record.start in (base.prompt_end, base.end)


def merged_by_key(items: Iterable[Run | Record]) -> list[Run]:
    """One run for each key, keys in order; bare records make runs that nothing else is known of."""
    runs: dict[RecordKey, Run] = {}
    bare: dict[RecordKey, dict[str, Record]] = {}
    for item in items:
        if isinstance(item, Run):
            known = runs.setdefault(item.key, item)
            if known is not item:
                runs[item.key] = known.merge(item)
        else:
            bare.setdefault(item.key, {}).setdefault(item.id, item)
    for key, records in bare.items():
        alone = Run(key, records.values())
        runs[key] = runs[key].merge(alone) if key in runs else alone
    return sorted(runs.values(), key=lambda run: run.key.order)
