"""What a record store promises. `recorder_core.stores.testing` is this page as a test suite."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter

from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.records import Info, Record

_INFO: TypeAdapter[dict[str, Any]] = TypeAdapter(Info)


class AddOutcome(Enum):
    """What became of a record given to `RecordStore.add`."""

    STORED = "stored"
    NO_PARENT = "no_parent"
    """The record that it continues is not in the store any more, or does not end where it starts;
    nothing was stored."""
    BLOCKED = "blocked"
    """Its key is under a blocked prefix; nothing was stored."""
    FULL = "full"
    """The byte budget has no room; nothing was stored."""


class Lease(BaseModel):
    """Records handed out by `RecordStore.drain`, not yet acknowledged."""

    model_config = ConfigDict(frozen=True)

    id: str
    records: tuple[Record, ...]
    """By key, parents before the records that continue them."""
    lease_s: float
    """Seconds after which the records come back unless acknowledged."""


class KeySummary(BaseModel):
    """What a store holds under one key."""

    model_config = ConfigDict(frozen=True)

    key: RecordKey
    records: int
    rewarded: int
    """Records that have a reward."""
    bytes: int
    age_s: float
    """Seconds since a record was last added."""


class StoreStats(BaseModel):
    """A store's size and what has happened in it."""

    model_config = ConfigDict(frozen=True)

    keys: int
    records: int
    """Records in sight: those not leased."""
    bytes: int
    """Memory or disk held, leased records included."""
    max_bytes: int
    leased_records: int
    blocked_prefixes: int
    counters: dict[str, int]
    """Records by what became of them. Each record `stored` is held, or was `acknowledged`,
    `removed`, `overwritten`, `evicted` or `swept`; beside those, `returned` counts leased records
    that came back, `blocked` and `full` records that were refused."""


class RecordStore(Protocol):
    """Records by key. Every method is atomic and may be called from any thread.

    A prefix selects keys component by component; the empty prefix selects all. Leased records are
    out of sight: `get`, `keys`, `update` and a second `drain` do not see them.
    """

    def add(self, record: Record) -> AddOutcome:
        """Take one record; a record whose id the key has already counts as stored."""
        ...

    def overwrite(self, key: RecordKey, records: Iterable[Record]) -> None:
        """Replace all that a key has, leased records included, by these records.

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
        record_ids: Collection[str] | None = None,
        reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        token_level_reward: Sequence[float] | None = None,
    ) -> int:
        """Write what a workflow knows after the run.

        Args:
            key: The run.
            record_ids: Only these records; None means all that the key has now. Records added
                later are not touched.
            reward: The new reward; None leaves it.
            info: Merged into the records' info.
            token_level_reward: float32 [response tokens], the same for each record selected.

        Returns:
            The number of records updated; 0 if there are none, which is no error.

        Raises:
            ValueError: The token-level reward does not have the length of a selected record's
                response, the reward is not finite, the info is not what JSON holds, or it does
                not fit the byte budget. Nothing is changed then.
        """
        ...

    def get(self, prefix: KeyPrefix) -> list[Record]:
        """The records under a prefix, by key, parents first."""
        ...

    def remove(self, prefix: KeyPrefix) -> int:
        """Delete the records under a prefix, leased ones included; returns how many."""
        ...

    def drain(self, prefix: KeyPrefix, lease_s: float) -> Lease:
        """Hand out the records under a prefix.

        Unless they are acknowledged within `lease_s` seconds they come back, unchanged.

        Raises:
            ValueError: `lease_s` is not positive.
        """
        ...

    def ack(self, lease_id: str) -> int:
        """Forget a lease's records for good; acknowledging twice is no error.

        Returns:
            The number of records forgotten by this call.

        Raises:
            LeaseError: The lease is unknown, or has run out and its records are back.
        """
        ...

    def block(self, prefix: KeyPrefix) -> None:
        """Refuse records under a prefix from now on. Costs bounded memory, however many are."""
        ...

    def keys(self, prefix: KeyPrefix) -> list[KeySummary]:
        """What is there under a prefix, in the order of the keys."""
        ...

    def sweep(self, older_than_s: float) -> int:
        """Delete keys to which nothing was added for so many seconds; returns records deleted."""
        ...

    def stats(self) -> StoreStats:
        """Sizes and counters."""
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
    # A parent ends where its child starts, so that it starts before its child does.
    ordered = sorted(given.values(), key=lambda record: record.start)
    for record in ordered:
        parent = given.get(record.parent) if record.parent is not None else None
        if parent is None and record.parent is not None:
            raise ValueError(f"record {record.id} continues {record.parent}, not given")
        if parent is not None and parent.end != record.start:
            raise ValueError(
                f"record {record.id} starts at token {record.start}, its parent {parent.id} ends "
                f"at {parent.end}"
            )
    return ordered


def updated_records(
    records: Iterable[Record],
    *,
    reward: float | None,
    info: Mapping[str, Any] | None,
    token_level_reward: Sequence[float] | None,
) -> list[Record]:
    """The records with a workflow's values written in: `RecordStore.update`'s rule.

    Raises:
        ValueError: As `RecordStore.update` says; `pydantic.ValidationError` for a bad info.
    """
    if info:
        info = _INFO.validate_python(dict(info))
    values: dict[str, Any] = {}
    if reward is not None:
        if not math.isfinite(reward):
            raise ValueError(f"reward is {reward}, it must be finite")
        values["reward"] = float(reward)
    if token_level_reward is not None:
        values["token_level_reward"] = np.asarray(token_level_reward, dtype=np.float32)
    updated = []
    for record in records:
        if token_level_reward is not None and len(token_level_reward) != len(record.response_ids):
            raise ValueError(
                f"token_level_reward has {len(token_level_reward)} values, record {record.id} "
                f"has {len(record.response_ids)} response tokens"
            )
        merged = {"info": {**record.info, **info}} if info else {}
        updated.append(record.model_copy(update=values | merged))
    return updated
