"""What a record store promises. `recorder_core.stores.testing` is this page as a test suite."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from recorder_core.drops import DropReason
from recorder_core.keys import RecordKey
from recorder_core.keytree import Selection
from recorder_core.records import Record
from recorder_core.runs import Run, SampleId, fits

FATES = (
    *("stored", "acknowledged", "removed", "overwritten", "evicted", "swept"),
    *("returned", "blocked", "full", "disk", "lost"),
)
"""What becomes of a record: the names in `StoreStats.counters`."""


class AddOutcome(Enum):
    """What became of a record given to `RecordStore.add`."""

    STORED = "stored"
    MOVED = "moved"
    """The run's records are others by now than when the record was placed: place it anew."""
    NO_PARENT = "no_parent"
    """The record that it continues is not in the store, or does not end where it starts; nothing
    was stored."""
    BLOCKED = "blocked"
    """Its key is under a blocked prefix; nothing was stored."""
    FULL = "full"
    """The byte budget has no room; nothing was stored."""
    DISK = "disk"
    """The disk takes no more; nothing was stored."""


@dataclass(frozen=True, eq=False)
class Lease:
    """Runs handed out by `RecordStore.drain`, not yet acknowledged."""

    id: str
    runs: list[Run]
    """Keys in order; of each run, parents before the records that continue them."""
    lease_s: float
    """Seconds after which the runs come back unless acknowledged."""
    more: bool = False
    """Whether there are runs that `max_bytes` or `max_runs` left no room for."""

    @property
    def records(self) -> list[Record]:
        """The records of all runs."""
        return [record for run in self.runs for record in run.records.values()]


class Updated(NamedTuple):
    """What `RecordStore.update` did."""

    records: int
    """Generations that have the values now."""
    unknown: list[SampleId]
    """Names that stand for no generation of the run."""


class RunSummary(NamedTuple):
    """What a store holds of one run."""

    key: RecordKey
    records: int
    rewarded: int
    """Records that have a reward, their own or the run's."""
    reward: float | None
    """The run's own."""
    missing: dict[str, int]
    """Generations that the run had and that are not here, by reason: see `Run.missing`."""
    bytes: int
    age_s: float
    """Seconds since a record was last added."""
    closed: bool
    """Whether later generations are refused."""


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """A store's size and what has happened in it."""

    keys: int
    """Runs in sight: those not leased."""
    records: int
    """Records in sight."""
    bytes: int
    """Memory or disk held, leased records included."""
    max_bytes: int
    leases: int
    """Leases that are open."""
    leased_records: int
    blocked_prefixes: int
    counters: dict[str, int]
    """Records by what became of them. Each record `stored` is held, or was `acknowledged`,
    `removed`, `overwritten` (also by one of its id that came back from a lease), `evicted` or
    `swept`; beside those, `returned` counts leased records that came back, `blocked`, `full` and
    `disk` records that were refused. Of a store on a disk, what it had at its start counts as
    `stored`, and `lost` are records that the end of the process before took from it."""
    oldest_age_s: float | None = None
    """Seconds since something was added to the run in sight that is first in line for eviction: the
    one written to least recently, or come back from a lease. 0 without runs; None: not known."""


class RecordStore(Protocol):
    """Runs by key. Every method may be called from any thread.

    Each is atomic, but for `get` and `keys` over many runs: they see each run as it is at one
    moment, and hold up nobody meanwhile. A `drain` may leave out what came after it was called.
    What is handed out does not change any more, but for what `amend` writes.

    What is selected is one run, by its `RecordKey`, or all runs under a `KeyPrefix`: a whole key
    never reaches keys that begin with it. Leased runs are out of sight: `get`, `keys`, `update`
    and another `drain` do not see them; a record of such a run begins the run anew, and what comes
    back joins it.

    A run that was deleted for room or age (never one that has generations in flight) and goes on
    says how many records it lacks: see `Run.missing`. One that was removed or overwritten on
    purpose begins anew.
    """

    def watch(
        self,
        in_flight: Callable[[RecordKey], int],
        taken: Callable[[RecordKey], None] = lambda key: None,
    ) -> None:
        """Connect the store with the recorder that fills it.

        Args:
            in_flight: How many generations of a run are in flight: such a run is not evicted.
            taken: To be told of each run whose records are taken away: it takes no lock.
        """
        ...

    def epoch(self, key: RecordKey) -> int:
        """Changes whenever records of a run are taken away or replaced; 0 where it has none."""
        ...

    def add(self, record: Record, epoch: int | None = None) -> AddOutcome:
        """Take one record; a record whose id the run has already counts as stored.

        Args:
            record: The record.
            epoch: The run's epoch when the record's parent was looked for; None: not to be checked.
        """
        ...

    def note_dropped(self, key: RecordKey, reason: DropReason) -> None:
        """A generation of the run is not recorded.

        Kept on the run if it is there. If it is not, and lacks a turn for it, the run begins so,
        unless it is blocked; where there is no room, it is known once the run has begun.
        """
        ...

    def amend(
        self,
        key: RecordKey,
        record_id: str,
        *,
        delivered: bool | None = None,
        flag: str | None = None,
    ) -> None:
        """Write what became known of a record, leased ones included; of one not there, nothing.

        Args:
            key: The run.
            record_id: The record.
            delivered: Whether its reply was sent to its end; None leaves it.
            flag: To be among its flags.
        """
        ...

    def overwrite(self, key: RecordKey, records: Iterable[Record]) -> None:
        """Replace all that a key has, leased records included, by a run of these records.

        Raises:
            ValueError: A record has another key, an id that another one has, or a parent that is
                not among them or ends elsewhere than the record starts; or the records do not
                fit the byte budget. Nothing is changed then.
        """
        ...

    def update(
        self,
        key: RecordKey,
        *,
        sample_ids: Collection[SampleId] | None = None,
        reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        token_level_reward: Sequence[float] | None = None,
    ) -> Updated:
        """Write what a workflow knows after the run.

        Args:
            key: The run. A run that is not there, and has nothing in flight, is left alone.
            sample_ids: Only these generations; None means the run itself: generations that end
                later have the reward and the info too.
            reward: The new reward; None leaves it.
            info: Merged into the run's info, or that of the generations.
            token_level_reward: float32 [response tokens], for each generation selected; without
                `sample_ids`, for each that the run has now.

        Raises:
            ValueError: The token-level reward does not have the length of a selected record's
                response, the reward is not finite, or the values do not fit the byte budget.
                Nothing is changed then.
        """
        ...

    def get(self, where: Selection) -> list[Run]:
        """The runs that are selected, keys in order, parents first; they stay where they are."""
        ...

    def remove(self, where: Selection) -> int:
        """Delete the runs that are selected, leased ones included; returns how many records."""
        ...

    def drain(
        self,
        where: Selection,
        lease: str,
        lease_s: float,
        max_bytes: int | None = None,
        max_runs: int | None = None,
    ) -> Lease:
        """Hand out the runs that are selected.

        Unless they are acknowledged within `lease_s` seconds they come back, unchanged. Asked
        again with the same lease the answer is the same, and its time begins anew.

        Args:
            where: What is to be handed out.
            lease: The caller's name for it: unique.
            lease_s: Seconds.
            max_bytes: Take whole runs until they come to so much memory, but at least one.
            max_runs: Take at most so many runs, whichever are found first.

        Raises:
            LeaseError: The lease is acknowledged already, or was for another selection.
            ValueError: `lease_s` is not positive.
        """
        ...

    def ack(self, lease: str) -> int:
        """Forget a lease's records for good; acknowledging twice is no error.

        Returns:
            The number of records forgotten by this call.

        Raises:
            LeaseError: The lease is unknown, or has run out and its records are back.
        """
        ...

    def release(self, lease: str) -> int:
        """Put a lease's records back at once; one that is not open is no error.

        Returns:
            The number of records that are back by this call.
        """
        ...

    def extend(self, lease: str, lease_s: float) -> None:
        """Begin a lease's time anew.

        Raises:
            LeaseError: The lease is not open.
            ValueError: `lease_s` is not positive.
        """
        ...

    def block(self, where: Selection) -> None:
        """Refuse records there from now on. Costs bounded memory, however many are blocked."""
        ...

    def keys(
        self, where: Selection, *, after: RecordKey | None = None, limit: int | None = None
    ) -> list[RunSummary]:
        """What is there, in the order of the keys.

        Args:
            where: What is asked for.
            after: Only keys that come after this one.
            limit: At most so many.
        """
        ...

    def sweep(self, older_than_s: float) -> int:
        """Delete runs to which nothing was added for so many seconds, and that are not in flight.

        Returns:
            The number of records deleted.
        """
        ...

    def stats(self) -> StoreStats:
        """Sizes and counters."""
        ...

    def when_safe(self, done: Callable[[Exception | None], None], *, records: bool = False) -> None:
        """Have `done` called once what was changed before is as safe as the store makes it.

        At once, or on another thread, which it must not hold up. A store in memory makes nothing
        safer than it is. Any other does not wait for its disk in the calls that change something:
        whoever acknowledges them to somebody else waits for this.

        Args:
            done: Is given None, or why it is not safe (`NotSavedError`): it is in effect then,
                and tried again.
            records: Whether records that were added are meant too, which a full disk has no room
                for where it still has some for what takes a few bytes.
        """
        ...

    def close(self) -> None:
        """Let go of everything; any later call raises StoreClosedError."""
        ...


def in_order(key: RecordKey, records: Iterable[Record]) -> list[Record]:
    """The records that are to replace all that a key has, parents first: `overwrite`'s rule.

    Raises:
        ValueError: As `RecordStore.overwrite` says.
    """
    given: dict[str, Record] = {}
    for record in records:
        if record.key != key:
            raise ValueError(f"record {record.id} has the key {record.key}, not {key}")
        if record.id in given:
            raise ValueError(f"record {record.id} is given twice")
        given[record.id] = record
    # What a record builds on ends where it starts, so that it starts before it.
    ordered = sorted(given.values(), key=lambda record: (record.start, record.end))
    for record in ordered:
        if not fits(record, given):
            raise ValueError(
                f"record {record.id} starts at token {record.start}, where no record given of "
                f"{record.parent or record.base} ends"
            )
    return ordered


def checked_reward(reward: float | None) -> float | None:
    """A reward that can be stored.

    Raises:
        ValueError: It is not finite.
    """
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"reward is {reward}, it must be finite")
    return None if reward is None else float(reward)


def updated_records(
    records: Iterable[Record],
    *,
    reward: float | None = None,
    info: Mapping[str, Any] | None = None,
    token_level_reward: Sequence[float] | None = None,
) -> list[Record]:
    """The records with a workflow's values written in: `RecordStore.update`'s rule.

    Raises:
        ValueError: As `RecordStore.update` says.
    """
    changes: dict[str, Any] = {}
    if (given := checked_reward(reward)) is not None:
        changes["reward"] = given
    if token_level_reward is not None:
        changes["token_level_reward"] = np.asarray(token_level_reward, dtype=np.float32)
    updated = []
    for record in records:
        if token_level_reward is not None and len(token_level_reward) != record.response_count:
            raise ValueError(
                f"token_level_reward has {len(token_level_reward)} values, record {record.id} "
                f"has {record.response_count} response tokens"
            )
        merged = {"info": {**record.info, **info}} if info else {}
        updated.append(record.replace(**changes, **merged))
    return updated
