"""What a drain gives, from an engine in this process or from one or many servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from recorder_core.codec import Head
from recorder_core.experience import Experience
from recorder_core.keys import RecordKey
from recorder_core.records import Record
from recorder_core.runs import Run, merged_by_key
from recorder_core.trajectories import Forest, Keep


class ServerLease(NamedTuple):
    """One server's promise to keep what it handed out."""

    url: str
    """Empty for a recorder in this process."""
    id: str


class Page(NamedTuple):
    """What one store handed out at once."""

    url: str
    """Empty for a recorder in this process."""
    head: Head
    runs: list[Run]


def page_name(lease: str, number: int) -> str:
    """The name of a lease's page, the first of which is 0."""
    return f"{lease}.{number}" if number else lease


@dataclass(frozen=True, eq=False)
class Drained:
    """Runs taken from one or many stores."""

    runs: list[Run] = field(repr=False)
    """Keys in order; what several servers have of one run is together."""
    pending: int
    """Generations there that were not finished: they are not among the records."""
    leases: tuple[ServerLease, ...]
    """What is to be acknowledged: several of one store, where it handed out many runs."""
    more: bool = False
    """Whether there is more than `max_bytes` had room for: drain again for the next page."""
    keep: Keep | None = None
    """Which generations `experiences` are made of; None: all."""
    flushed: bool = True
    """Whether everything that had finished when it was asked for is there: a recorder with a long
    backlog hands out what it has."""

    @classmethod
    def of(cls, pages: Sequence[Page], keep: Keep | None = None) -> Drained:
        """Pages of one or many stores as one; those of a store in the order of their names."""
        last = {page.url: page.head for page in pages}
        stores: dict[str, dict[RecordKey, Run]] = {}
        for page in pages:
            known = stores.setdefault(page.url, {})
            for run in page.runs:
                known[run.key] = _gone_on(known[run.key], run) if run.key in known else run
        return cls(
            runs=merged_by_key(run for store in stores.values() for run in store.values()),
            # A last page leaves nothing behind that had finished by then.
            pending=sum(head.pending for head in last.values()),
            leases=tuple(ServerLease(page.url, page.head.lease) for page in pages),
            more=any(head.more for head in last.values()),
            keep=keep,
            flushed=all(page.head.flushed for page in pages),
        )

    @property
    def incomplete(self) -> dict[RecordKey, dict[str, int]]:
        """The runs that lack generations: how many, by reason; see `Run.missing`."""
        return {run.key: run.missing for run in self.runs if run.missing}

    @property
    def records(self) -> list[Record]:
        """The records of all runs, parents before the records that continue them."""
        return [record for run in self.runs for record in run.records.values()]

    @cached_property
    def _forest(self) -> Forest:
        return Forest(self.runs, self.keep)

    @cached_property
    def experiences(self) -> list[Experience]:
        """The runs assembled, on first use; see `assemble`."""
        return self._forest.experiences()

    @cached_property
    def superseded(self) -> list[Record]:
        """The records that `experiences` leaves out: retried, their answers not delivered."""
        return self._forest.superseded


def _gone_on(run: Run, later: Run) -> Run:
    """A run that was drained, and gone on with before the last page was."""
    whole = run.merge(later)
    whole.pending, whole.closed = later.pending, later.closed
    return whole
