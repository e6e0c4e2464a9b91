"""The records of a recorder in this process: `RecordClient`'s methods, without a server."""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from typing_extensions import Self

from recorder_core.codec import Head
from recorder_core.drained import Drained, Page, page_name
from recorder_core.errors import NothingRecordedError, RecorderError
from recorder_core.experience import Experience
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.keytree import Selection
from recorder_core.protocol import (
    DEFAULT_LEASE_S,
    MAX_PREFIXES,
    MAX_RUNS,
    KeyReply,
    StatsReply,
    UpdateRequest,
)
from recorder_core.recorder import Recorder
from recorder_core.records import Record
from recorder_core.runs import Run, SampleId, merged_by_key
from recorder_core.stores import Lease, RecordStore
from recorder_core.trajectories import Keep, assemble

Result = TypeVar("Result")
Key = str | RecordKey
Prefix = str | RecordKey | KeyPrefix


class Taken(NamedTuple):
    """A lease, and how many generations were in flight beside it."""

    lease: Lease
    pending: int
    flushed: bool


class Now:
    """What is asked of a recorder and its store, as it is at one moment.

    All but `runs`, which may take long, are to be called by way of `Recorder.after`: there no turn
    is between the queue and the store.

    Args:
        recorder: The recorder.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._store = recorder.store
        self._recent = recorder.recent

    def keys(
        self, where: Selection, after: RecordKey | None = None, limit: int | None = None
    ) -> list[KeyReply]:
        """What is stored and what is in flight, run by run."""
        replies = {
            each.key: KeyReply(**each._asdict())
            for each in self._store.keys(where, after=after, limit=limit)
        }
        for key, count in self._recorder.pending_by_key(where).items():
            if after is None or key.order > after.order:
                known = replies.get(key, KeyReply(key=key))
                replies[key] = known.model_copy(update={"pending": count})
        return [replies[key] for key in sorted(replies, key=lambda key: key.order)[:limit]]

    def runs(self, where: Selection, *, drained: bool = False) -> list[Run]:
        """The runs, which stay where they are; with what was handed out of them and is kept."""
        found = self._store.get(where)
        if drained and (earlier := self._recent.drained(where)):
            found = merged_by_key([*earlier, *found])
        self._count_pending(where, found)
        return found

    def take(
        self, where: Selection, lease: str, lease_s: float, max_bytes: int | None, flushed: bool
    ) -> Taken:
        """Lease the runs, at most `MAX_RUNS` of them."""
        leased = self._store.drain(where, lease, lease_s, max_bytes, MAX_RUNS)
        return Taken(leased, self._count_pending(where, leased.runs), flushed)

    def _count_pending(self, where: Selection, runs: Sequence[Run]) -> int:
        pending = self._recorder.pending_by_key(where)
        for run in runs:
            run.pending = pending.get(run.key, 0)
        return sum(pending.values())

    def forget(self, prefixes: Sequence[KeyPrefix]) -> int:
        """Refuse what comes late under prefixes, and delete what is there."""
        for each in prefixes:
            self._store.block(each)
        return sum(self._store.remove(each) for each in prefixes)

    def stats(self) -> StatsReply:
        """Counters of recorder and store."""
        return StatsReply(recorder=self._recorder.stats(), store=self._store.stats())


class LocalRecords:
    """Reads and writes the records of a recorder in this process.

    What `vllm_recorder.install`, `sglang_recorder.install` and `TinkerRecorder` give back; the
    methods are those of `RecordClient`.

    Args:
        recorder: The recorder.

    Example:
        >>> records = vllm_recorder.install(llm)  # doctest: +SKIP
        >>> records.update_reward("0/task-7/1", 1.0)
        >>> with records.drain("0") as drained:
        ...     train(drained.experiences)
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._now = Now(recorder)

    @property
    def store(self) -> RecordStore:
        """Where the records are."""
        return self.recorder.store

    def _after(self, function: Callable[[], Result]) -> Result:
        return self.recorder.after(function).result()

    def _write(self, function: Callable[[], Result], *, records: bool = False) -> Result:
        return self.recorder.write(function, records=records).result()

    def keys(self, prefix: Prefix = "", *, key: Key | None = None) -> list[KeyReply]:
        """See `RecordClient.keys`."""
        where = selected(prefix, key)
        return self._after(lambda: self._now.keys(where))

    def runs(
        self, prefix: Prefix = "", *, key: Key | None = None, drained: bool = False
    ) -> list[Run]:
        """See `RecordClient.runs`."""
        where = selected(prefix, key)
        self.recorder.flush()
        return self._now.runs(where, drained=drained)

    def get(self, prefix: Prefix = "", *, key: Key | None = None) -> list[Record]:
        """See `RecordClient.get`."""
        return records_of(self.runs(prefix, key=key))

    def experiences(
        self, prefix: Prefix = "", *, key: Key | None = None, keep: Keep | None = None
    ) -> list[Experience]:
        """See `RecordClient.experiences`."""
        return assemble(self.runs(prefix, key=key), keep=keep)

    def update_reward(
        self,
        key: Key,
        reward: float | None = None,
        *,
        info: Mapping[str, Any] | None = None,
        sample_ids: Collection[SampleId] | None = None,
        token_level_reward: Iterable[float] | None = None,
    ) -> int:
        """See `RecordClient.update_reward`."""
        request = UpdateRequest(
            key=parsed(key),
            reward=None if reward is None else float(reward),
            info=None if info is None else dict(info),
            sample_ids=None if sample_ids is None else list(sample_ids),
            token_level_reward=(
                None if token_level_reward is None else [float(each) for each in token_level_reward]
            ),
        )
        updated, unknown = self._write(
            lambda: self.store.update(
                request.key,
                sample_ids=request.sample_ids,
                reward=request.reward,
                info=request.info,
                token_level_reward=request.token_level_reward,
            )
        )
        check_known(request.key, unknown)
        return updated

    @contextmanager
    def drain(
        self,
        prefix: Prefix = "",
        *,
        key: Key | None = None,
        wait_s: float = 0.0,
        lease_s: float = DEFAULT_LEASE_S,
        max_bytes: int | None = None,
        keep: Keep | None = None,
    ) -> Iterator[Drained]:
        """See `RecordClient.drain`."""
        drained = self.lease(
            prefix, key=key, wait_s=wait_s, lease_s=lease_s, max_bytes=max_bytes, keep=keep
        )
        try:
            yield drained
        except BaseException:
            with suppress(RecorderError):  # the block's own error is the one to hear of
                self.release(drained)
            raise
        self.ack(drained)

    def lease(
        self,
        prefix: Prefix = "",
        *,
        key: Key | None = None,
        wait_s: float = 0.0,
        lease_s: float = DEFAULT_LEASE_S,
        max_bytes: int | None = None,
        keep: Keep | None = None,
        lease: str | None = None,
    ) -> Drained:
        """See `RecordClient.lease`."""
        where, name = selected(prefix, key), lease or new_lease()

        def take(page: str) -> Taken:
            return self._now.take(where, page, lease_s, max_bytes, True)

        idle = threading.Event()
        if wait_s > 0 and (cancel := self.recorder.when_idle(where, idle.set)):
            idle.wait(wait_s)
            cancel()
        pages: list[Page] = []
        more = True
        while more:
            page = page_name(name, len(pages))
            try:
                taken = self._write(functools.partial(take, page))
            except RecorderError:
                for each in (page, *(before.head.lease for before in pages)):
                    self._attempt(self.store.release, each)
                raise
            head = Head(page, taken.pending, taken.flushed, taken.lease.more)
            pages.append(Page("", head, taken.lease.runs))
            more = taken.lease.more and max_bytes is None
        return Drained.of(pages, keep)

    def ack(self, drained: Drained) -> int:
        """See `RecordClient.ack`."""
        return self._settle(drained, self.store.ack)

    def release(self, drained: Drained) -> int:
        """See `RecordClient.release`."""
        return self._settle(drained, self.store.release)

    def extend(self, drained: Drained, lease_s: float = DEFAULT_LEASE_S) -> None:
        """See `RecordClient.extend`."""
        self._settle(drained, lambda lease: self.store.extend(lease, lease_s))

    def _settle(self, drained: Drained, function: Callable[[str], int | None]) -> int:
        """Call it for each lease; the first error is raised when all were tried."""
        answers = [self._attempt(function, each.id) for each in drained.leases]
        for each in answers:
            if isinstance(each, RecorderError):
                raise each
        return sum(each for each in answers if isinstance(each, int))

    def _attempt(
        self, function: Callable[[str], int | None], lease: str
    ) -> int | RecorderError | None:
        try:
            return self._write(lambda: function(lease))
        except RecorderError as error:
            return error

    def overwrite(self, key: Key, records: Iterable[Record]) -> int:
        """See `RecordClient.overwrite`."""
        given = list(records)
        self._write(lambda: self.store.overwrite(parsed(key), given), records=True)
        return len(given)

    def delete(self, prefix: Prefix | None = None, *, key: Key | None = None) -> int:
        """See `RecordClient.delete`."""
        where = selected(prefix, key)
        return self._write(lambda: self.store.remove(where))

    def block(self, prefix: Prefix | None = None, *, key: Key | None = None) -> None:
        """See `RecordClient.block`."""
        where = selected(prefix, key)
        self._write(lambda: self.store.block(where))

    def forget(self, prefixes: Iterable[str | KeyPrefix]) -> int:
        """See `RecordClient.forget`."""
        parts = list(in_parts(prefixes))  # all are checked before one is forgotten
        return sum(self._write(functools.partial(self._now.forget, part)) for part in parts)

    def sweep(self, older_than_s: float) -> int:
        """See `RecordClient.sweep`."""
        return self._write(lambda: self.store.sweep(older_than_s))

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every finished generation is stored; False if the time ran out."""
        return self.recorder.flush(timeout)

    def stats(self) -> StatsReply:
        """Counters of recorder and store."""
        return self._after(self._now.stats)

    def close(self, timeout: float = 10.0) -> None:
        """Store what is queued, within `timeout` seconds, then stop."""
        self.recorder.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parsed(key: Key) -> RecordKey:
    """A key, from its text where it is one.

    Raises:
        InvalidKeyError: The text is no record key.
    """
    return key if isinstance(key, RecordKey) else RecordKey.parse(key)


def in_parts(prefixes: Iterable[str | KeyPrefix]) -> Iterator[list[KeyPrefix]]:
    """Prefixes, as many at a time as a call carries.

    Raises:
        InvalidKeyError: A text is none.
    """
    wanted = [each if isinstance(each, KeyPrefix) else KeyPrefix(each) for each in prefixes]
    for at in range(0, len(wanted), MAX_PREFIXES):
        yield wanted[at : at + MAX_PREFIXES]


def selected(prefix: Prefix | None, key: Key | None) -> Selection:
    """What is meant by a prefix, or by a whole key: one run, and no key that begins so.

    Raises:
        InvalidKeyError: The text is none.
        ValueError: Neither is given, or both.
    """
    if key is not None:
        if prefix:
            raise ValueError(f"both prefix {prefix!s} and key {key!s} are given; give one")
        return parsed(key)
    if prefix is None:
        raise ValueError("give a prefix, or key= for one run; the empty prefix means all runs")
    return prefix if isinstance(prefix, (RecordKey, KeyPrefix)) else KeyPrefix(prefix)


def records_of(runs: Iterable[Run]) -> list[Record]:
    """The records of runs."""
    return [record for run in runs for record in run.records.values()]


def check_known(key: RecordKey, unknown: Collection[SampleId]) -> None:
    """Check that every name stood for a generation.

    Raises:
        NothingRecordedError: One did not.
    """
    if unknown:
        names = [each if isinstance(each, str) else tuple(each) for each in unknown]
        raise NothingRecordedError(f"{names} stand for no generation of {key}; the others are done")


def new_lease() -> str:
    """A name for a lease that no other has."""
    return secrets.token_urlsafe(16)
