"""What the trainer gets: whole trajectories, assembled from the records of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from recorder_core.arrays import AnyArray
from recorder_core.experience import EID, Experience, ExperienceTurn
from recorder_core.paths import Paths
from recorder_core.records import FinishReason, Record, RoutedExperts, VersionSpan
from recorder_core.runs import Run, merged_by_key
from recorder_core.sampling_mask import SamplingMask

_FLOAT32, _BOOL = np.dtype(np.float32), np.dtype(np.bool_)

Keep = Callable[[Record], bool]
"""Whether a generation is to be trained: a title or a quota call under the same key is not."""


def assemble(
    runs: Iterable[Run | Record], *, keep: Keep | None = None, keep_superseded: bool = False
) -> list[Experience]:
    """Turn runs into whole trajectories: one experience per leaf of each run's forest.

    A sampled token is trained once: where trajectories share records, those tokens have
    `action_mask` True in the earliest trajectory (by the finish of its last generation) and
    False in the others. Retries whose answer was not delivered are left out.

    Args:
        runs: Runs, or bare records of any runs, from any number of servers, in any order; a record
            given twice counts once.
        keep: Leave out the generations that it is False for; where one that is kept continues such
            a one, its tokens are there and not trained.
        keep_superseded: Keep the trajectories that end in a superseded record.

    Returns:
        The experiences, keys in order, each run's trajectories by their finish.

    Raises:
        MissingParentError: A record's parent is not among the records.
    """
    return Forest(runs, keep).experiences(keep_superseded=keep_superseded)


class Forest:
    """The records of any number of runs, linked by the prefix rule.

    Args:
        runs: As for `assemble`.
        keep: As for `assemble`.

    Raises:
        MissingParentError: A record's parent is not among the records.
    """

    def __init__(self, runs: Iterable[Run | Record], keep: Keep | None = None) -> None:
        self._trees = [_Tree(run, keep) for run in merged_by_key(runs)]

    @property
    def superseded(self) -> list[Record]:
        """The records left out as retried: their answers were not delivered."""
        return [
            record
            for tree in self._trees
            for record in tree.records
            if record.id in tree.superseded
        ]

    def parents(self) -> dict[str, str | None]:
        """The id of the record that each record continues, by its own id."""
        return {
            record.id: parent.id if (parent := tree.parents.get(record.id)) else None
            for tree in self._trees
            for record in tree.records
        }

    def experiences(self, *, keep_superseded: bool = False) -> list[Experience]:
        """One experience per leaf; see `assemble`."""
        return [
            experience
            for tree in self._trees
            for experience in tree.experiences(keep_superseded=keep_superseded)
        ]


class _Tree:
    """The records of one run, by their finish, with parents and superseded records decided."""

    def __init__(self, run: Run, keep: Keep | None) -> None:
        self.run = run
        self._keep = keep
        self.records = list(run.records.values())
        self.parents: dict[str, Record] = {}
        self.superseded: set[str] = set()
        if len(self.records) == 1 and self.records[0].start == 0:
            return  # as most runs of one turn are: there is nothing to link
        self.records.sort(key=lambda record: (record.finished_at, record.id))
        paths = Paths(self.records, keep_prefixes=True)
        for record in self.records:
            parent = paths.parent(record)
            if parent is not None:
                self.parents[record.id] = parent
        continued = {parent.id for parent in self.parents.values()}
        self.superseded, _ = paths.replaced(continued)

    def experiences(self, *, keep_superseded: bool) -> list[Experience]:
        if len(self.records) == 1 and self._keep is None:
            return [self._experience(self.records, set())]
        left_out = (
            set()
            if self._keep is None
            else {record.id for record in self.records if not self._keep(record)}
        )
        trained = set(left_out)
        if not keep_superseded:
            left_out |= self.superseded
        inner: set[str] = set()
        for record in self.records:
            at = self.parents.get(record.id) if record.id not in left_out else None
            while at is not None and at.id not in inner:
                inner.add(at.id)
                at = self.parents.get(at.id)
        return [
            self._experience(self._path(leaf), trained)
            for leaf in self.records
            if leaf.id not in inner and leaf.id not in left_out
        ]

    def _path(self, leaf: Record) -> list[Record]:
        """The records from the root to this one."""
        path = [leaf]
        while (parent := self.parents.get(path[-1].id)) is not None:
            path.append(parent)
        return path[::-1]

    def _experience(self, path: Sequence[Record], trained: set[str]) -> Experience:
        """The trajectory of a path; `trained` holds the records trained elsewhere."""
        run, root, leaf = self.run, path[0], path[-1]
        tokens = run.token_ids(leaf)
        if leaf.start == 0:  # they lie in the record, which is not to be written to
            tokens = tokens.copy()
        prompt_length = root.prompt_end
        count = len(tokens) - prompt_length
        logprobs = np.empty(count, _FLOAT32)
        action_mask = np.empty(count, _BOOL)
        token_level_reward: AnyArray | None = None
        masks: list[tuple[int, SamplingMask]] = []
        versions: list[VersionSpan] = []
        turns: list[ExperienceTurn] = []
        info: dict[str, Any] = dict(run.info) if run.info else {}
        reward: float | None = None
        stop = 0
        for record in path:
            before, stop = stop, record.end - prompt_length
            start = stop - record.response_count
            if before < start:  # what nobody sampled
                logprobs[before:start] = np.nan
                action_mask[before:start] = False
            values = record.logprobs
            logprobs[start:stop] = np.nan if values is None else values
            action_mask[start:stop] = record.id not in trained
            trained.add(record.id)
            if record.sampling_mask is not None:
                masks.append((start, record.sampling_mask))
            if record.token_level_reward is not None:
                if token_level_reward is None:
                    token_level_reward = np.zeros(count, dtype=np.float32)
                token_level_reward[start:stop] = record.token_level_reward
            if start:
                versions += [VersionSpan(start + a, start + b, v) for a, b, v in record.versions]
            else:
                versions += record.versions
            if record.info:
                info.update(record.info)
            reward = reward if record.reward is None else record.reward
            turns.append(ExperienceTurn(start, stop, record))
        batch, task, name = run.key.text.rsplit("/", 2)
        return Experience(
            eid=EID(batch, task, name, len(path) - 1, leaf.id),
            tokens=tokens,
            prompt_length=prompt_length,
            logprobs=logprobs,
            action_mask=action_mask,
            reward=run.reward if reward is None else reward,
            token_level_reward=token_level_reward,
            info=info,
            prompt_text=self._prompt_text(root),
            response_text=leaf.response_text if leaf is root else None,
            truncate_status=(
                "response_truncated" if leaf.finish_reason is FinishReason.LENGTH else None
            ),
            finish_reason=leaf.finish_reason,
            routed_experts=_merge_routed(path),
            sampling_mask=SamplingMask.placed(masks, count) if masks else None,
            model_versions=tuple(versions),
            sampling=root.sampling,
            adapter=leaf.adapter,
            turns=tuple(turns),
            multi_modal_inputs=leaf.multi_modal,
        )

    def _prompt_text(self, root: Record) -> str | None:
        while root.base is not None:
            base = self.run.records[root.base]
            if root.prompt_count or base.prompt_end != root.start:
                break
            root = base
        return root.prompt_text


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
