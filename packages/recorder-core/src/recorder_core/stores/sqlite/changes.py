"""What of a store is not on its disk yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from recorder_core.keys import RecordKey
from recorder_core.keytree import Selection
from recorder_core.records import Record
from recorder_core.runs import Run
from recorder_core.stores.held import Held, Journal, Leased

Key = TypeVar("Key")
Value = TypeVar("Value")

# What is to be written of something, and the round in which it last changed.
_Due = dict[Key, tuple[int, Value]]
# By run and record id.
_DueRecords = dict[int, _Due[str, Record]]


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run's own values, as they are to be written."""

    number: int
    key: str
    lease: str | None
    reward: float | None
    info: dict[str, object]
    dropped: dict[str, int]
    evicted: int
    written: float
    """When a record was last added, by the store's clock."""


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A lease, as it is to be written."""

    name: str
    where: Selection
    lease_s: float
    expires_at: float
    """By the store's clock."""
    more: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """What one transaction writes, in this order."""

    round: int
    accepted: int
    """Records that the store had been given by then, since it was opened."""
    joined: list[tuple[int, int]]
    """Runs that are part of another one now."""
    deleted: list[int]
    runs: list[RunRow]
    added: list[tuple[int, Record]]
    """Runs and records that they have more."""
    learnt: list[tuple[int, Record]]
    """Runs and records that are on the disk, of which more is known."""
    leases: list[LeaseRow]
    leases_over: list[str]
    acknowledged: list[str]
    blocked: list[Selection]
    gone: list[tuple[RecordKey, Run | None]]


class Changes(Journal):
    """What is to be written: the state, and not the way to it.

    What came and went in the meantime is never written. What is being written stays due until it
    is on the disk. Guarded by the store's lock.

    Args:
        wake: Called at the first change after `take`.
        count: Called with the number of records given, whenever it rises.
    """

    __slots__ = (
        "_accepted",
        "_acknowledged",
        "_added",
        "_blocked",
        "_count",
        "_deleted",
        "_gone",
        "_joined",
        "_learnt",
        "_leases",
        "_round",
        "_runs",
        "_wake",
        "_woken",
        "unsaved",
        "unsaved_bytes",
    )

    def __init__(self, wake: Callable[[], None], count: Callable[[int], None]) -> None:
        self.unsaved = 0
        """Records that are not on the disk."""
        self.unsaved_bytes = 0
        """The memory that they take."""
        self._wake = wake
        self._count = count
        self._woken = False
        self._round = 1
        self._accepted = 0
        self._runs: _Due[int, Held] = {}
        self._added: _DueRecords = {}
        self._learnt: _DueRecords = {}
        self._deleted: _Due[int, None] = {}
        self._joined: list[tuple[int, int, int]] = []
        self._leases: _Due[str, Leased | None] = {}
        self._acknowledged: _Due[str, None] = {}
        self._blocked: _Due[Selection, None] = {}
        self._gone: _Due[RecordKey, Run | None] = {}

    # From the store.

    def run(self, run: Held) -> None:
        """See `Journal.run`."""
        self._runs[run.epoch] = (self._now(), run)

    def added(self, run: Held, record: Record) -> None:
        """See `Journal.added`."""
        self._added.setdefault(run.epoch, {})[record.id] = (self._now(), record)
        self.unsaved += 1
        self.unsaved_bytes += record.nbytes
        self._accepted += 1
        self._count(self._accepted)

    def learnt(self, run: Held, record: Record) -> None:
        """See `Journal.learnt`."""
        self._learnt.setdefault(run.epoch, {})[record.id] = (self._now(), record)

    def deleted(self, run: Held) -> None:
        """See `Journal.deleted`."""
        self._runs.pop(run.epoch, None)
        self._learnt.pop(run.epoch, None)
        for _, record in self._added.pop(run.epoch, {}).values():
            self._no_more_unsaved(record)
        self._deleted[run.epoch] = (self._now(), None)

    def joined(self, parts: Sequence[Held], whole: Held) -> None:
        """See `Journal.joined`."""
        now = self._now()
        for number, part in enumerate(parts):
            later = [name for each in parts[number + 1 :] for name in each.records]
            self._runs.pop(part.epoch, None)
            self._joined.append((now, part.epoch, whole.epoch))
            for name, due in self._added.pop(part.epoch, {}).items():
                if name in later:
                    self._no_more_unsaved(due[1])
                else:
                    self._added.setdefault(whole.epoch, {})[name] = due
            for name, due in self._learnt.pop(part.epoch, {}).items():
                if name not in later:
                    self._learnt.setdefault(whole.epoch, {})[name] = due
        self.run(whole)

    def lease(self, name: str, leased: Leased | None) -> None:
        """See `Journal.lease`."""
        self._leases[name] = (self._now(), leased)

    def acknowledged(self, lease: str) -> None:
        """See `Journal.acknowledged`."""
        self._acknowledged[lease] = (self._now(), None)

    def blocked(self, where: Selection) -> None:
        """See `Journal.blocked`."""
        self._blocked.pop(where, None)  # the one blocked last comes last
        self._blocked[where] = (self._now(), None)

    def gone(self, key: RecordKey, run: Run | None) -> None:
        """See `Journal.gone`."""
        self._gone.pop(key, None)
        self._gone[key] = (self._now(), run)

    def _now(self) -> int:
        if not self._woken:
            self._woken = True
            self._wake()
        return self._round

    def _no_more_unsaved(self, record: Record) -> None:
        self.unsaved -= 1
        self.unsaved_bytes -= record.nbytes

    # To the disk.

    @property
    def clean(self) -> bool:
        """Whether everything is on the disk."""
        return not (
            self._runs
            or self._added
            or self._learnt
            or self._deleted
            or self._joined
            or self._leases
            or self._acknowledged
            or self._blocked
            or self._gone
        )

    def take(self) -> Batch:
        """What is due; changes from now on are those of the next round."""
        round_, self._round, self._woken = self._round, self._round + 1, False
        added = [
            # As it is known by now, where it is written for the first time.
            (run, self._learnt.get(run, {}).get(record.id, (0, record))[1])
            for run, record in _each(self._added)
        ]
        learnt = [
            (run, record)
            for run, record in _each(self._learnt)
            if record.id not in self._added.get(run, ())
        ]
        leases = [(name, leased) for name, (_, leased) in self._leases.items()]
        return Batch(
            round=round_,
            accepted=self._accepted,
            joined=[(part, whole) for _, part, whole in self._joined],
            deleted=list(self._deleted),
            runs=[_run_row(run) for _, run in self._runs.values()],
            added=added,
            learnt=learnt,
            leases=[_lease_row(name, each) for name, each in leases if each is not None],
            leases_over=[name for name, each in leases if each is None],
            acknowledged=list(self._acknowledged),
            blocked=list(self._blocked),
            gone=[(key, run) for key, (_, run) in self._gone.items()],
        )

    def saved(self, batch: Batch, *, records: bool) -> None:
        """A batch is on the disk, but for the records that were added, where those are not."""
        last = batch.round
        if records:
            for run, due in list(self._added.items()):
                for name, (changed, record) in list(due.items()):
                    if changed <= last:
                        self._no_more_unsaved(record)
                        del due[name]
                if not due:
                    del self._added[run]
        for run, due in list(self._learnt.items()):
            added = self._added.get(run, {})
            kept = {name: each for name, each in due.items() if each[0] > last or name in added}
            if kept:
                self._learnt[run] = kept
            else:
                del self._learnt[run]
        self._runs = _after(last, self._runs)
        self._deleted = _after(last, self._deleted)
        self._joined = [each for each in self._joined if each[0] > last]
        self._leases = _after(last, self._leases)
        self._acknowledged = _after(last, self._acknowledged)
        self._blocked = _after(last, self._blocked)
        self._gone = _after(last, self._gone)


def _after(last: int, due: _Due[Key, Value]) -> _Due[Key, Value]:
    return {key: each for key, each in due.items() if each[0] > last}


def _each(due: _DueRecords) -> Iterator[tuple[int, Record]]:
    for run, records in due.items():
        for _, record in records.values():
            yield run, record


def _run_row(run: Held) -> RunRow:
    # The mappings are replaced when they change, so that they can be written later.
    return RunRow(
        number=run.epoch,
        key=run.key.text,
        lease=run.lease,
        reward=run.reward,
        info=dict(run.info),
        dropped=dict(run.dropped),
        evicted=run.evicted,
        written=run.last_write,
    )


def _lease_row(name: str, leased: Leased) -> LeaseRow:
    return LeaseRow(name, leased.where, leased.lease_s, leased.expires_at, leased.more)
