"""The prefix rule, in one place: which record continues which, and what the trainer gets.

A record continues another when its prompt begins with every token of the other's path and both
ran under the same adapter (and the same images). Token ids decide; text never does. `ParentIndex`
applies the rule as generations finish; `assemble` applies it again to whatever set of records it
is given, so that records made by several servers, in any order, give the same trajectories as if
one server had recorded them all.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from recorder_core.arrays import AnyArray
from recorder_core.errors import MissingParentError
from recorder_core.experience import EID, Experience, ExperienceTurn
from recorder_core.keys import RecordKey
from recorder_core.prefixes import EMPTY, Prefix, Prefixes, PrefixTable
from recorder_core.records import (
    FinishReason,
    MultiModalItem,
    Record,
    RoutedExperts,
    VersionSpan,
)


@dataclass(slots=True, eq=False)
class _Node:
    """A record's place in the forest of its key."""

    id: str
    finish_reason: FinishReason
    sample_index: int
    attempt: int
    created_at: float
    finished_at: float
    routed_rows: int = 0
    """Leading routed-expert rows that the path holds."""
    continued: bool = False


class _Attempts:
    """The records that answer one prompt, and which of them are retries of which.

    A record is superseded when its answer was not delivered and the request was sent again: it
    was aborted or failed, and a record that began after its end answers the same prompt; or a
    later record says, by the client's own retry count, that it is a retry. Each retry supersedes
    one record, one that no later turn continues. Samples of one request (n > 1) only supersede
    the same sample.
    """

    __slots__ = ("_answered", "_broken_off", "_count")

    def __init__(self) -> None:
        # Both are kept in order and end in the node's number, so that nodes are not compared:
        # (sample, attempt, number, node), and by sample a heap of (finish, number, node).
        self._answered: list[tuple[int, int, int, _Node]] = []
        self._broken_off: dict[int, list[tuple[float, int, _Node]]] = {}
        self._count = 0

    def add(self, node: _Node) -> _Node | None:
        """Take the next record, in the order of arrival; returns the one that it supersedes."""
        replaced = self._first_broken_off(node)
        if replaced is None and node.attempt:
            replaced = self._last_answered(node)
        self._count += 1
        if node.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            heap = self._broken_off.setdefault(node.sample_index, [])
            heappush(heap, (node.finished_at, self._count, node))
        else:
            insort(self._answered, (node.sample_index, node.attempt, self._count, node))
        return replaced

    def _first_broken_off(self, retry: _Node) -> _Node | None:
        heap = self._broken_off.get(retry.sample_index)
        while heap:
            finished_at, _, node = heap[0]
            # Siblings that ran side by side are no retries of each other, unless the client says
            # so: its own clock is the only one that saw the request fail.
            if not node.continued and not retry.attempt and finished_at > retry.created_at:
                return None
            heappop(heap)
            if not node.continued:
                return node
        return None

    def _last_answered(self, retry: _Node) -> _Node | None:
        found = self._answered
        while end := bisect_left(found, (retry.sample_index, retry.attempt)):
            if found[end - 1][0] != retry.sample_index:
                return None
            node = found.pop(end - 1)[-1]
            if not node.continued:
                return node
        return None


class _Mark:
    """What is known of one prefix: the path that ends there, the answers to it as a prompt."""

    __slots__ = ("answers", "path")

    def __init__(self) -> None:
        self.path: _Node | None = None
        """Of equal paths the latest: a retry's client went on there."""
        self.answers: _Attempts | None = None

    def answer(self, node: _Node) -> _Node | None:
        """A record answers the prompt that ends here; returns the one that it supersedes."""
        if self.answers is None:
            self.answers = _Attempts()
        return self.answers.add(node)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a new record goes in the forest of its key."""

    parent: str | None
    """The record that it continues."""
    start: int
    """Tokens that the parent's path already holds; 0 for a root."""
    routed_rows: int
    """Leading routed-expert rows that the parent's path already holds."""
    prefix_break: bool
    """The prompt repeats an earlier record's prompt, but not the tokens sampled after it."""
    _parent_node: _Node | None = field(repr=False)
    _prefixes: Prefixes = field(repr=False)
    _prompt_length: int = field(repr=False)


class ParentIndex:
    """The paths recorded under one key, by the hashes of their prefixes; holds no tokens.

    Finding a parent takes time linear in the prompt, however many branches there are. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._tables: dict[str | None, PrefixTable[_Mark]] = {}

    def place(
        self,
        prompt_ids: AnyArray,
        response_ids: AnyArray,
        *,
        adapter: str | None = None,
        multi_modal: tuple[MultiModalItem, ...] = (),
    ) -> Placement:
        """Find the longest recorded path that a prompt begins with.

        Args:
            prompt_ids: The whole prompt: int32 [prompt length].
            response_ids: What was sampled after it: int32 [response length].
            adapter: The LoRA adapter, if any.
            multi_modal: The non-text inputs of the whole prompt.
        """
        prompt_length = len(prompt_ids)
        prefixes = _prefixes(np.concatenate([prompt_ids, response_ids]), multi_modal)
        parent, start, broken = None, 0, False
        table = self._tables.get(adapter)
        for length, mark in table.longest_first(prefixes, prompt_length) if table else ():
            broken |= mark.answers is not None and length < prompt_length
            parent = mark.path
            if parent:
                start = length
                break
        return Placement(
            parent=parent.id if parent else None,
            start=start,
            routed_rows=parent.routed_rows if parent else 0,
            prefix_break=broken,
            _parent_node=parent,
            _prefixes=prefixes,
            _prompt_length=prompt_length,
        )

    def add(self, record: Record, placement: Placement) -> str | None:
        """Take a record that was placed by this index and is now stored.

        Returns:
            The id of the earlier record that this one supersedes, if it is a retry.
        """
        if placement._parent_node is not None:
            placement._parent_node.continued = True
        node = _node(record, placement.routed_rows)
        table = self._tables.setdefault(record.adapter, PrefixTable())
        prompt = placement._prefixes.at(placement._prompt_length)
        # Siblings answer one prompt: it is marked once, however many they are.
        replaced = table.at(prompt, _Mark).answer(node)
        table.at(placement._prefixes.at(record.end), _Mark).path = node
        return replaced.id if replaced else None


def _prefixes(
    tokens: AnyArray, items: tuple[MultiModalItem, ...], base: Prefix = EMPTY
) -> Prefixes:
    """The prefixes of a path; an image counts from its first placeholder token on."""
    images = ((item.offset, (item.modality, item.length, item.identity)) for item in items)
    return Prefixes(tokens, base, images)


def _node(record: Record, routed_rows: int = 0) -> _Node:
    for begin, end in record.routed_experts.valid_ranges if record.routed_experts else ():
        if begin <= routed_rows:
            routed_rows = max(routed_rows, end)
    return _Node(
        id=record.id,
        finish_reason=record.finish_reason,
        sample_index=record.sample_index,
        attempt=record.attempt,
        created_at=record.created_at,
        finished_at=record.finished_at,
        routed_rows=routed_rows,
    )


def assemble(records: Iterable[Record], *, keep_superseded: bool = False) -> list[Experience]:
    """Turn records into whole trajectories: one experience per leaf of each key's forest.

    A sampled token is trained once: where trajectories share records, those tokens have
    `action_mask` True in the earliest trajectory (by the finish of its last generation) and
    False in the others. Retries whose answer was not delivered are left out.

    Args:
        records: Records of any keys, from any number of servers, in any order; a record given
            twice counts once.
        keep_superseded: Keep the trajectories that end in a superseded record.

    Returns:
        The experiences, keys in order, each key's trajectories by their finish.

    Raises:
        MissingParentError: A record's parent is not among the records.
    """
    return Forest(records).experiences(keep_superseded=keep_superseded)


@dataclass(slots=True, eq=False)
class _Tree(_Node):
    """A record in a forest that is being assembled."""

    record: Record = field(kw_only=True)
    linked: _Tree | None = None
    """The parent that the record names."""
    parent: _Tree | None = None
    """The parent by the rule, applied to all records at hand."""
    prefixes: Prefixes = field(kw_only=True)
    superseded: bool = False

    def order(self) -> tuple[float, str]:
        return (self.record.finished_at, self.id)

    def path(self) -> list[Record]:
        """The records from the root to this one."""
        path, node = [], self
        while True:
            path.append(node.record)
            if node.parent is None:
                return path[::-1]
            node = node.parent


class Forest:
    """The records of any number of keys, linked by the prefix rule.

    Args:
        records: As for `assemble`.

    Raises:
        MissingParentError: A record's parent is not among the records.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        by_key: dict[RecordKey, dict[str, Record]] = {}
        for record in records:
            by_key.setdefault(record.key, {}).setdefault(record.id, record)
        self._nodes = [node for key in sorted(by_key) for node in _link(by_key[key])]

    @property
    def superseded(self) -> list[Record]:
        """The records left out as retried: their answers were not delivered."""
        return [node.record for node in self._nodes if node.superseded]

    def experiences(self, *, keep_superseded: bool = False) -> list[Experience]:
        """One experience per leaf; see `assemble`."""
        trained: set[tuple[RecordKey, str]] = set()
        return [
            _experience(node.path(), trained)
            for node in self._nodes
            if not node.continued and (keep_superseded or not node.superseded)
        ]


def _link(records: dict[str, Record]) -> list[_Tree]:
    """The nodes of one key, by their finish, with parents and superseded records decided."""
    nodes: dict[str, _Tree] = {}
    for record in records.values():
        # A path may be thousands of records long: no recursion.
        chain = [record]
        while chain[-1].parent is not None and chain[-1].parent not in nodes:
            parent = records.get(chain[-1].parent)
            if parent is None or len(chain) > len(records):
                raise MissingParentError(
                    f"record {chain[-1].id} of {record.key} continues record {chain[-1].parent}, "
                    "which is not among the records given"
                )
            chain.append(parent)
        for each in reversed(chain):
            if each.id not in nodes:
                nodes[each.id] = _tree(each, nodes.get(each.parent) if each.parent else None)

    ordered = sorted(nodes.values(), key=_Tree.order)
    tables: dict[str | None, PrefixTable[_Mark]] = defaultdict(PrefixTable)
    for node in ordered:
        tables[node.record.adapter].at(node.prefixes.at(node.record.end), _Mark).path = node
    for node in ordered:
        node.parent = _longest(node, tables[node.record.adapter])
        if node.parent is not None:
            node.parent.continued = True
    for node in sorted(ordered, key=lambda node: (node.created_at, node.attempt, node.id)):
        prompt = node.prefixes.at(node.record.prompt_end)
        replaced = tables[node.record.adapter].at(prompt, _Mark).answer(node)
        if isinstance(replaced, _Tree):
            replaced.superseded = True
    return ordered


def _tree(record: Record, linked: _Tree | None) -> _Tree:
    base = linked.prefixes.at(linked.record.end) if linked else EMPTY
    if base.length != record.start:
        raise MissingParentError(
            f"record {record.id} of {record.key} starts at token {record.start}, its parent "
            f"{record.parent} ends at {base.length}"
        )
    return _Tree(
        id=record.id,
        finish_reason=record.finish_reason,
        sample_index=record.sample_index,
        attempt=record.attempt,
        created_at=record.created_at,
        finished_at=record.finished_at,
        record=record,
        linked=linked,
        prefixes=_prefixes(
            np.concatenate([record.prompt_ids, record.response_ids]), record.multi_modal, base
        ),
    )


def _longest(node: _Tree, table: PrefixTable[_Mark]) -> _Tree | None:
    # The linked parent is found again here, or an equal or longer path.
    for _, mark in table.longest_first(node.prefixes, node.record.prompt_end):
        if isinstance(mark.path, _Tree):
            return mark.path
    return node.linked


def _experience(path: Sequence[Record], trained: set[tuple[RecordKey, str]]) -> Experience:
    """The trajectory of a path; `trained` holds the records whose tokens are trained elsewhere."""
    root, leaf = path[0], path[-1]
    prompt_length, length = root.prompt_end, leaf.end
    count = length - prompt_length
    tokens = np.empty(length, dtype=np.int32)
    logprobs = np.full(count, np.nan, dtype=np.float32)
    action_mask = np.zeros(count, dtype=np.bool_)
    token_level_reward: AnyArray | None = None
    versions: list[VersionSpan] = []
    turns: list[ExperienceTurn] = []
    info: dict[str, Any] = {}
    reward: float | None = None
    position = 0
    for record in path:
        # A record from another server may hold its whole prompt: only what is new is taken.
        tokens[position : record.prompt_end] = record.prompt_ids[position - record.start :]
        tokens[record.prompt_end : record.end] = record.response_ids
        position = record.end
        start, end = record.prompt_end - prompt_length, record.end - prompt_length
        if record.logprobs is not None:
            logprobs[start:end] = record.logprobs
        if (record.key, record.id) not in trained:
            trained.add((record.key, record.id))
            action_mask[start:end] = True
        if record.token_level_reward is not None:
            if token_level_reward is None:
                token_level_reward = np.zeros(count, dtype=np.float32)
            token_level_reward[start:end] = record.token_level_reward
        versions += [VersionSpan(start + a, start + b, label) for a, b, label in record.versions]
        info.update(record.info)
        reward = reward if record.reward is None else record.reward
        turns.append(_turn(record, start, end))
    return Experience(
        eid=EID(
            batch=leaf.key.batch,
            task=leaf.key.task,
            run=leaf.key.run,
            step=len(path) - 1,
            suffix=leaf.id,
        ),
        tokens=tokens,
        prompt_length=prompt_length,
        logprobs=logprobs,
        action_mask=action_mask,
        reward=reward,
        token_level_reward=token_level_reward,
        info=info,
        prompt_text=root.prompt_text,
        response_text=leaf.response_text if leaf is root else None,
        truncate_status=(
            "response_truncated" if leaf.finish_reason is FinishReason.LENGTH else None
        ),
        finish_reason=leaf.finish_reason,
        routed_experts=_merge_routed(path),
        model_versions=tuple(versions),
        sampling=root.sampling,
        adapter=leaf.adapter,
        turns=tuple(turns),
        multi_modal_inputs=leaf.multi_modal,
    )


def _turn(record: Record, start: int, end: int) -> ExperienceTurn:
    return ExperienceTurn(
        record_id=record.id,
        request_id=record.request_id,
        sample_index=record.sample_index,
        start=start,
        end=end,
        finish_reason=record.finish_reason,
        stop_reason=record.stop_reason,
        response_text=record.response_text,
        reward=record.reward,
        attempt=record.attempt,
        cached_tokens=record.cached_tokens,
        created_at=record.created_at,
        finished_at=record.finished_at,
        sampling=record.sampling,
        flags=record.flags,
    )


def _merge_routed(path: Sequence[Record]) -> RoutedExperts | None:
    """One array over the rows of the whole path, from the pass that sampled each token."""
    parts = [record.routed_experts for record in path if record.routed_experts is not None]
    if not parts:
        return None
    rows = path[-1].end - 1
    shapes = {part.data.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise ValueError(
            f"the records of {path[-1].key} have routed experts of different [layers, top_k]: "
            f"{sorted(shapes)}"
        )
    dtype = np.result_type(*(part.data.dtype for part in parts))
    data = np.zeros((rows, *parts[0].data.shape[1:]), dtype=dtype)
    known = np.zeros(rows, dtype=np.bool_)
    for part in parts:
        for begin, end in part.valid_ranges:
            # A row that an earlier generation gave stays: it routed the tokens trained from it.
            missing = begin + np.flatnonzero(~known[begin:end])
            data[missing] = part.data[missing - part.start]
            known[begin:end] = True
    return RoutedExperts(data=data, valid=None if known.all() else _ranges(known))


def _ranges(known: AnyArray) -> tuple[tuple[int, int], ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(np.int8)))
    return tuple((int(begin), int(end)) for begin, end in edges.reshape(-1, 2))
