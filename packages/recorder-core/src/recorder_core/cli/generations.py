"""One run as it is shown: its generations, how they continue one another, and its trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from recorder_core.arrays import Float32Array
from recorder_core.experience import Experience
from recorder_core.records import Record, VersionSpan
from recorder_core.runs import Run
from recorder_core.trajectories import Forest

_MAX_LINES = 60
"""Characters of branches before a generation: an agent may branch off a branch very often."""


@dataclass(frozen=True)
class Node:
    """One generation in the forest of its run."""

    number: int
    """In the order in which they ended, from 1."""
    record: Record
    parent: int | None
    """The number of the generation that it continues."""
    leaf: int | None
    """Which trajectory ends here, from 1."""
    trained: int
    """Tokens that are trained, in one of the trajectories."""
    superseded: bool
    """Whether it was asked for again, its answer not delivered."""
    branches: str
    """What stands before it where the forest is drawn."""


class Generations:
    """A run, assembled.

    Args:
        run: The run.

    Raises:
        MissingParentError: A record's parent is not among its records.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        forest = Forest([run])
        self.trajectories: list[Experience] = forest.experiences()
        """One for each leaf, by their finish."""
        self._superseded = {each.id for each in forest.superseded}
        self._parents = forest.parents()

    def nodes(self) -> Iterator[Node]:
        """The generations, each after the one that it continues, branch by branch."""
        records = sorted(
            self.run.records.values(), key=lambda record: (record.finished_at, record.id)
        )
        numbers = {record.id: number for number, record in enumerate(records, 1)}
        below: dict[str | None, list[Record]] = {}
        for each in records:
            below.setdefault(self._parents[each.id], []).append(each)
        leaves = {each.turns[-1].record_id: n for n, each in enumerate(self.trajectories, 1)}
        trained = self._trained()
        # A path may be thousands of generations long: no recursion.
        waiting = [(each, "", "") for each in reversed(below.get(None, []))]
        while waiting:
            record, here, after = waiting.pop()
            parent = self._parents[record.id]
            yield Node(
                number=numbers[record.id],
                record=record,
                parent=None if parent is None else numbers[parent],
                leaf=leaves.get(record.id),
                trained=trained[record.id],
                superseded=record.id in self._superseded,
                branches=here[-_MAX_LINES:],
            )
            next_ones = below.get(record.id, [])
            if len(next_ones) == 1:
                waiting.append((next_ones[0], after, after))
                continue
            for last, each in enumerate(reversed(next_ones)):
                fork, line = ("├─", "│ ") if last else ("└─", "  ")
                waiting.append((each, after + fork, after + line))

    def _trained(self) -> Counter[str]:
        """Trained tokens by record: each is trained in one trajectory at most."""
        counts: Counter[str] = Counter()
        for trajectory in self.trajectories:
            for turn in trajectory.turns:
                counts[turn.record_id] += trained(trajectory, turn.start, turn.end)
        return counts


def trained(trajectory: Experience, start: int = 0, end: int | None = None) -> int:
    """How many tokens of a part of the response region are trained."""
    mask = trajectory.action_mask
    return 0 if mask is None else int(np.count_nonzero(mask[start:end]))


def known_logprobs(record: Record) -> Float32Array:
    """The logprobs that the engine gave: float32 [at most the response tokens]."""
    values = record.logprobs
    return np.empty(0, np.float32) if values is None else values[~np.isnan(values)]


def labels(spans: Iterable[VersionSpan]) -> str:
    """The weights that sampled something, in order: `41→42`."""
    return "→".join(dict.fromkeys(span.version for span in spans))
