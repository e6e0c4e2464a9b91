"""The prefix rule, in one place: which record continues which, and which answers are superseded.

A record continues another when its prompt begins with every token of the other's path, both ran
under the same adapter (and the same images), and the other had ended when it began. Token ids
decide; text never does. The recorder applies the rule as generations finish, and `assemble` to
whatever set of records it is given: the rule looks at nothing but the records, so both agree.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from recorder_core.arrays import AnyArray
from recorder_core.errors import MissingParentError
from recorder_core.prefixes import EMPTY, Prefix, Prefixes, PrefixTable
from recorder_core.records import MultiModalItem, Record


def superseded(answers: Iterable[Record], continued: Collection[str]) -> tuple[set[str], set[str]]:
    """Which answers to one prompt did not reach their client and were asked for again.

    An answer is superseded if it broke off (see `Record.broken_off`), no later turn continues it,
    and the prompt was answered again later: by a request that began after its end, or that its
    client calls a retry. Each such answer supersedes one. Samples of one request (n > 1) only
    supersede the same sample.

    Args:
        answers: The records that answer one prompt.
        continued: The ids of records that another one continues.

    Returns:
        The ids of the superseded records, and of those that their client calls retries while what
        became of the earlier answers is not known: both are kept.
    """
    replaced: set[str] = set()
    unclear: set[str] = set()
    broken_off: dict[int, list[tuple[float, str]]] = {}
    unknown: set[int] = set()
    for each in sorted(answers, key=lambda record: (record.created_at, record.attempt, record.id)):
        waiting = broken_off.setdefault(each.sample_index, [])
        if waiting and (each.attempt or waiting[0][0] <= each.created_at):
            replaced.add(heappop(waiting)[1])
        elif each.attempt and each.sample_index in unknown:
            unclear.add(each.id)
        if each.broken_off:
            if each.id not in continued:
                heappush(waiting, (each.finished_at, each.id))
        elif each.delivered is None:
            unknown.add(each.sample_index)
    return replaced, unclear


class _Mark:
    """What is known of one prefix: the paths that end there, the answers to it as a prompt."""

    __slots__ = ("answers", "ends")

    def __init__(self) -> None:
        self.ends: list[tuple[float, str, Record]] = []
        """Equal paths, in the order in which they ended."""
        self.answers: list[Record] = []

    def ended_by(self, time: float) -> Record | None:
        """Of equal paths the one that had ended last by then; at time 0, unknown: last of all."""
        # No id is greater than this text: all that ended at that very time are counted in.
        at = bisect_right(self.ends, (time or math.inf, "\U0010ffff"))
        return self.ends[at - 1][2] if at else None


class _Known(NamedTuple):
    """What is kept of a record beside its marks."""

    prefixes: Prefixes | None
    prompt: Prefix
    end: Prefix
    routed_rows: int
    """Leading routed-expert rows that the path holds."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a new record goes in the forest of its run."""

    parent: str | None = None
    """The record that it continues."""
    base: str | None = None
    """A record whose prompt or path this prompt begins with, where that is more than the parent's:
    the tokens that they share are kept once."""
    start: int = 0
    """Tokens that the base or parent holds; 0 for a root that shares nothing."""
    routed_rows: int = 0
    """Leading routed-expert rows that the parent's path already holds."""
    prefix_break: bool = False
    """The prompt repeats an earlier record's prompt, but not the tokens sampled after it; or it
    goes on from a path under another adapter."""
    _prefixes: Prefixes | None = field(default=None, repr=False)


ROOT = Placement()
"""The place of a run's first record."""


class Paths:
    """The paths of one run, by the hashes of their prefixes.

    Finding a parent takes time linear in the prompt, however many branches there are. Not
    thread-safe.

    Args:
        records: Those that are there already, in any order.
        keep_prefixes: Whether `parent` will be asked for: takes 16 bytes a token.

    Raises:
        MissingParentError: A record's parent or base is not among the records.
    """

    def __init__(self, records: Iterable[Record] = (), *, keep_prefixes: bool = False) -> None:
        self.continued: set[str] = set()
        """The ids of records that another one names as its parent."""
        self._tables: dict[str | None, PrefixTable[_Mark]] = {}
        self._known: dict[str, _Known] = {}
        self._records: dict[str, Record] = {}
        self._keep_prefixes = keep_prefixes
        # Prompts with answers that broke off, or about whose delivery nothing is known yet.
        self._doubtful: dict[int, list[Record]] = {}
        self._add_all({record.id: record for record in records})

    def _add_all(self, records: dict[str, Record]) -> None:
        for record in records.values():
            # A path may be thousands of records long: no recursion.
            chain = [record]
            while (before := chain[-1].before) is not None:
                if before in self._known:
                    break
                found = records.get(before)
                if found is None or len(chain) > len(records):
                    raise MissingParentError(
                        f"record {chain[-1].id} of {record.key} continues record {before}, "
                        "which is not among the records given"
                    )
                chain.append(found)
            for each in reversed(chain):
                if each.id not in self._known:
                    self.add(each)

    def __len__(self) -> int:
        return len(self._records)

    def record(self, name: str) -> Record:
        """One of the records."""
        return self._records[name]

    def place(
        self,
        prompt_ids: AnyArray,
        response_ids: AnyArray,
        *,
        created_at: float = 0.0,
        adapter: str | None = None,
        multi_modal: tuple[MultiModalItem, ...] = (),
    ) -> Placement:
        """Find the longest recorded path that a prompt begins with.

        Args:
            prompt_ids: The whole prompt: int32 [prompt length].
            response_ids: What was sampled after it: int32 [response length].
            created_at: When the generation began, where that is known: no path that ended later is
                its parent.
            adapter: The LoRA adapter, if any.
            multi_modal: The non-text inputs of the whole prompt.
        """
        length = len(prompt_ids)
        prefixes = _prefixes(np.concatenate([prompt_ids, response_ids]), multi_modal)
        parent: Record | None = None
        base: Record | None = None
        start, broken = 0, False
        table = self._tables.get(adapter)
        for at, mark in table.longest_first(prefixes, length) if table else ():
            broken |= bool(mark.answers) and at < length
            parent = mark.ended_by(created_at)
            if base is None and at:
                base, start = parent or (mark.answers[0] if mark.answers else mark.ends[0][2]), at
            if parent is not None:
                break
        if parent is None and len(self._tables) > (table is not None):
            broken |= self._continues_another_adapter(adapter, prefixes, length)
        return Placement(
            parent=parent.id if parent else None,
            base=base.id if base is not None and base is not parent else None,
            start=start,
            routed_rows=self._known[parent.id].routed_rows if parent else 0,
            prefix_break=broken,
            _prefixes=prefixes,
        )

    def _continues_another_adapter(
        self, adapter: str | None, prefixes: Prefixes, length: int
    ) -> bool:
        return any(
            bool(mark.ends)
            for name, table in self._tables.items()
            if name != adapter
            for _, mark in table.longest_first(prefixes, length)
        )

    def add(self, record: Record, placement: Placement | None = None) -> None:
        """Take a record, after the one that it builds on.

        Args:
            record: The record.
            placement: What `place` said of it, where that was asked.

        Raises:
            MissingParentError: The record does not begin where its base or parent ends.
        """
        prefixes = placement._prefixes if placement else None
        if prefixes is None:
            prefixes = _prefixes(record.new_ids, record.multi_modal, self._start(record))
        prompt, end = prefixes.at(record.prompt_end), prefixes.at(record.end)
        rows = self._known[record.parent].routed_rows if record.parent in self._known else 0
        for begin, stop in record.routed_experts.valid_ranges if record.routed_experts else ():
            if begin <= rows:
                rows = max(rows, stop)
        kept = prefixes if self._keep_prefixes else None
        self._known[record.id] = _Known(kept, prompt, end, rows)
        self._records[record.id] = record
        table = self._tables.get(record.adapter)
        if table is None:
            table = self._tables[record.adapter] = PrefixTable()
        answers = table.at(prompt, _Mark).answers
        answers.append(record)
        if record.broken_off or record.delivered is None:
            self._doubtful[id(answers)] = answers
        insort(table.at(end, _Mark).ends, (record.finished_at, record.id, record))
        if record.parent is not None:
            self.continued.add(record.parent)

    def _start(self, record: Record) -> Prefix:
        """The prefix after which a record's own tokens begin."""
        before = record.before
        if before is None:
            return EMPTY
        known = self._known[before]
        for prefix in (known.end, known.prompt) if record.base else (known.end,):
            if prefix.length == record.start:
                return prefix
        raise MissingParentError(
            f"record {record.id} of {record.key} starts at token {record.start}, its parent "
            f"{before} ends at {known.end.length}"
        )

    def parent(self, record: Record) -> Record | None:
        """The record that one of these continues, by the rule; else the one that it names."""
        known = self._known[record.id]
        assert known.prefixes is not None, "made without keep_prefixes"
        table = self._tables[record.adapter]
        linked = self._records[record.parent] if record.parent else None
        lowest = self._known[linked.id].end.length if linked else 0
        at, up_to = record, known.prompt.length
        while True:
            prefixes = self._known[at.id].prefixes
            assert prefixes is not None
            for length, mark in table.longest_first(prefixes, up_to):
                found = mark.ended_by(record.created_at)
                if found is not None and found is not record and length >= lowest:
                    return found
            before = at.before
            if before is None or at.start <= lowest:
                return linked
            at, up_to = self._records[before], at.start

    def replaced(self, continued: Collection[str] | None = None) -> tuple[set[str], set[str]]:
        """As `superseded`, over all prompts of the run."""
        replaced: set[str] = set()
        unclear: set[str] = set()
        for name, answers in list(self._doubtful.items()):
            if len(answers) > 1:
                found = superseded(answers, self.continued if continued is None else continued)
                replaced |= found[0]
                unclear |= found[1]
            if not any(each.broken_off or each.delivered is None for each in answers):
                del self._doubtful[name]
        return replaced, unclear


def _prefixes(
    tokens: AnyArray, items: tuple[MultiModalItem, ...], base: Prefix = EMPTY
) -> Prefixes:
    """The prefixes of a path; an image counts from its first placeholder token on."""
    images = ((item.offset, (item.modality, item.length, item.identity)) for item in items)
    return Prefixes(tokens, base, images)
