"""A run's forest in brief: what continues what, what is trained where, and by which weights.

Made from what `assemble` makes, so that the page shows what a trainer gets.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from recorder_core.arrays import AnyArray
from recorder_core.errors import NothingRecordedError
from recorder_core.experience import Experience
from recorder_core.paths import Paths
from recorder_core.records import MultiModalItem, Record, Sampling, VersionSpan
from recorder_core.runs import Run
from recorder_core.trajectories import Forest


class RecordView(msgspec.Struct, omit_defaults=True):
    """One generation."""

    id: str
    parent: str | None
    """The record that it continues."""
    start: int
    """Tokens of its path that its parent, or the record that it shares a prompt with, holds."""
    prompt_end: int
    """Tokens on the path before the response."""
    end: int
    """Tokens on the whole path."""
    finish_reason: str
    created_at: float
    """Seconds since the epoch."""
    finished_at: float
    """Seconds since the epoch."""
    superseded: bool = False
    """Retried, its answer not delivered: it is not trained."""
    prefix_break: bool = False
    """Its prompt repeats an earlier prompt, but not the tokens sampled after it."""
    trained_in: str | None = None
    """The leaf of the trajectory in which its tokens are trained."""
    stop_reason: int | str | None = None
    versions: tuple[VersionSpan, ...] = ()
    """Spans over its response."""
    flags: tuple[str, ...] = ()
    delivered: bool | None = None
    reward: float | None = None
    info: dict[str, Any] = {}
    sampling: Sampling = Sampling()
    logprobs_of_policy: bool = False
    adapter: str | None = None
    model: str | None = None
    request_id: str = ""
    sample_index: int = 0
    attempt: int = 0
    cached_tokens: int | None = None
    prompt_text: str | None = None
    response_text: str | None = None


class TurnView(msgspec.Struct):
    """Where a generation's sampled tokens lie on a trajectory: `[start, end)` of its tokens."""

    start: int
    end: int
    id: str
    """The record's."""


class LeafView(msgspec.Struct, omit_defaults=True):
    """One trajectory: a path from a root to a leaf."""

    id: str
    """The last record's."""
    length: int
    """Tokens."""
    trained: int
    """Tokens of the mask."""
    mask: list[tuple[int, int]]
    """The tokens that are trained here, as ranges `[start, end)` of the trajectory's tokens."""
    versions: list[VersionSpan]
    """Spans over the trajectory's tokens."""
    turns: list[TurnView]
    reward: float | None = None
    superseded: bool = False
    images: tuple[MultiModalItem, ...] = ()


class ForestView(msgspec.Struct, omit_defaults=True):
    """A run: its generations and its trajectories."""

    key: str
    records: list[RecordView]
    """By their finish."""
    leaves: list[LeafView]
    """By their finish."""
    reward: float | None = None
    """The run's own."""
    info: dict[str, Any] = {}
    missing: dict[str, int] = {}
    """Generations that the run had and that are not here, by reason."""
    pending: int = 0
    """Generations in flight."""
    closed: bool = False
    drained: bool = False
    """Whether some of it was handed out to a trainer."""


def forest_of(run: Run, *, texts: bool = False) -> ForestView:
    """The forest of a run.

    Args:
        run: The run.
        texts: Whether the records' texts are wanted.

    Raises:
        MissingParentError: A record's parent is not among the records.
    """
    forest = Forest([run])
    leaves = _leaves(forest)
    trained_in = {
        turn.id: leaf.id
        for leaf in leaves
        for turn in leaf.turns
        if any(start <= turn.start < end for start, end in leaf.mask)
    }
    parents = forest.parents()
    superseded = {record.id for record in forest.superseded}
    broken = _prefix_breaks(run, len(leaves))
    by_finish = sorted(run.records.values(), key=lambda record: (record.finished_at, record.id))
    return ForestView(
        key=run.key.text,
        records=[
            RecordView(
                id=record.id,
                parent=parents[record.id],
                start=record.start,
                prompt_end=record.prompt_end,
                end=record.end,
                finish_reason=record.finish_reason.value,
                created_at=record.created_at,
                finished_at=record.finished_at,
                superseded=record.id in superseded,
                prefix_break=record.id in broken,
                trained_in=trained_in.get(record.id),
                stop_reason=record.stop_reason,
                versions=record.versions,
                flags=record.flags,
                delivered=record.delivered,
                reward=record.reward,
                info=record.info,
                sampling=record.sampling,
                logprobs_of_policy=record.logprobs_of_policy,
                adapter=record.adapter,
                model=record.model,
                request_id=record.request_id,
                sample_index=record.sample_index,
                attempt=record.attempt,
                cached_tokens=record.cached_tokens,
                prompt_text=record.prompt_text if texts else None,
                response_text=record.response_text if texts else None,
            )
            for record in by_finish
        ],
        leaves=leaves,
        reward=run.reward,
        info=dict(run.info),
        missing=run.missing,
        pending=run.pending,
        closed=run.closed,
    )


def leaf_arrays(run: Run, leaf: str) -> bytes:
    """The tokens of a trajectory as a browser reads them, little-endian, end to end.

    First the ids, int32 [length]; then the logprobs, float32 [length], NaN where nothing was
    sampled or the engine gave none.

    Args:
        run: The run.
        leaf: The id of the trajectory's last record.

    Raises:
        NothingRecordedError: No trajectory of the run ends there.
    """
    forest = Forest([run])
    for experience in forest.experiences() + forest.experiences(keep_superseded=True):
        if experience.eid.suffix == leaf:
            return _arrays(experience)
    raise NothingRecordedError(
        f"no trajectory of {run.key} ends in the record {leaf!r}: it may have gone on"
    )


def all_arrays(run: Run) -> dict[str, bytes]:
    """`leaf_arrays` of every trajectory of a run, by the id of its last record."""
    forest = Forest([run])
    every = forest.experiences(keep_superseded=True) + forest.experiences()
    return {each.eid.suffix: _arrays(each) for each in every}


def _arrays(experience: Experience) -> bytes:
    logprobs = np.full(len(experience.tokens), np.nan, dtype="<f4")
    if experience.logprobs is not None:
        logprobs[experience.prompt_length :] = experience.logprobs
    return experience.tokens.astype("<i4").tobytes() + logprobs.tobytes()


def _leaves(forest: Forest) -> list[LeafView]:
    """What is trained, and beside it the trajectories that end in superseded records."""
    left_out = {record.id for record in forest.superseded}
    trained = [_leaf(each, superseded=False) for each in forest.experiences()]
    if not left_out:
        return trained
    return trained + [
        _leaf(each, superseded=True)
        for each in forest.experiences(keep_superseded=True)
        if each.eid.suffix in left_out
    ]


def _leaf(experience: Experience, *, superseded: bool) -> LeafView:
    begin = experience.prompt_length
    mask = [] if superseded else _ranges(experience.action_mask, begin)
    return LeafView(
        id=experience.eid.suffix,
        length=len(experience.tokens),
        trained=sum(end - start for start, end in mask),
        mask=mask,
        versions=[VersionSpan(begin + a, begin + b, v) for a, b, v in experience.model_versions],
        turns=[TurnView(begin + t.start, begin + t.end, t.record.id) for t in experience.turns],
        reward=experience.reward,
        superseded=superseded,
        images=experience.multi_modal_inputs,
    )


def _ranges(mask: AnyArray | None, begin: int) -> list[tuple[int, int]]:
    """Where a mask is True, as ranges moved by `begin`."""
    if mask is None:
        return []
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)) + begin
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _prefix_breaks(run: Run, leaves: int) -> set[str]:
    """The records that the rule calls breaks: placed once more, after what came before them."""
    broken: set[str] = set()
    if leaves < 2:
        return broken  # on one path each continues the one before
    paths = Paths()
    for record in run.records.values():
        placement = paths.place(
            _whole_prompt(run, record),
            record.response_ids,
            created_at=record.created_at,
            adapter=record.adapter,
            multi_modal=record.multi_modal,
        )
        if placement.prefix_break:
            broken.add(record.id)
        paths.add(record)
    return broken


def _whole_prompt(run: Run, record: Record) -> AnyArray:
    """The ids of a record's prompt from its first token on."""
    parts: list[AnyArray] = [record.prompt_ids]
    at, begin = record, record.start
    while begin:
        before = run.records[at.before or ""]
        parts.append(before.new_ids[: max(begin - before.start, 0)])
        at, begin = before, min(begin, before.start)
    return np.concatenate(parts[::-1])
