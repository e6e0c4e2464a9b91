"""The recorder: takes finished turns from the engine, builds and stores records on its own thread.

On the engine's side everything is a few dictionary operations under a lock that is never held
while work is done. Copying ids, finding the parent and storing happen on one daemon thread; a
store that raises, blocks or is full costs records, counted by reason, and never a generation.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from recorder_core.arrays import AnyArray
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.records import FinishReason, Record, RoutedExperts, Turn
from recorder_core.stores import AddOutcome, MemoryStore, RecordStore
from recorder_core.throttle import Throttle
from recorder_core.trajectories import ParentIndex, Placement

logger = logging.getLogger(__name__)

MAX_INDEXED_KEYS = 16_384
"""Keys whose paths are remembered; a key beyond that starts a new root, which `assemble` mends."""
MAX_INDEXED_RECORDS = 262_144
"""Records whose paths are remembered, over all keys: some 300 MB at most, beside the store's."""
MAX_QUEUED_TOKENS = 16_000_000
"""Tokens of turns waiting for the recorder's thread; beyond that turns are dropped."""


class RecorderStats(BaseModel):
    """What became of every generation: `started = recorded + sum(dropped) + pending`."""

    model_config = ConfigDict(frozen=True)

    instance: str = ""
    """Which recorder counts: another one says that the engine was started anew, and that what it
    had in memory is gone. Empty from servers that do not say it."""
    started: int
    """Generations that carried a record key."""
    recorded: int
    """Generations stored: `extended + roots`."""
    extended: int
    """Of `recorded`: those that continue an earlier record."""
    roots: int
    """Of `recorded`: those that begin a trajectory."""
    prefix_break: int
    """Of `recorded`: the prompt repeats an earlier record's prompt but not the tokens sampled
    after it; the history was rendered or tokenised anew."""
    superseded: int
    """Of `recorded`: an answer that was not delivered, and the request sent again."""
    dropped: dict[str, int]
    """Generations not stored, by reason: `aborted` (by policy), `empty` (no token sampled),
    `blocked`, `full`, `queue_full`, `closed`, `error`, `lost` (the engine forgot the request),
    `no_parent` (the store wants a parent for a root: a fault of the store), or the hook's own."""
    pending: int
    """Generations in flight in the engine, or waiting for the recorder's thread."""
    errors: int
    """Exceptions caught on the way; each cost at most one record, dropped as `error`."""
    flagged: dict[str, int]
    """Of `recorded`: records that carry a flag, by flag."""
    unkeyed: dict[str, int]
    """Generations served and not recorded, by why they carried no record key."""


class Outcome(NamedTuple):
    """What became of a finished turn."""

    dropped: str = ""
    """Why it is not recorded, as `RecorderStats.dropped` says; empty: it is stored."""
    error: Exception | None = None
    """What a store raised, where that is why."""


class Pending:
    """A generation in flight. Ends once: by `finish`, by `drop`, or when it is forgotten."""

    __slots__ = ("_recorder", "key")

    def __init__(self, recorder: Recorder, key: RecordKey) -> None:
        self.key = key
        self._recorder: Recorder | None = recorder

    def finish(self, turn: Turn, settled: Callable[[Outcome], None] | None = None) -> None:
        """The generation is finished; its turn is queued.

        Args:
            turn: What was generated.
            settled: Called once with what became of the turn, when it is stored or dropped: on
                the recorder's thread, which it must not hold up, or within this call where the
                turn is refused at once.
        """
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder._enqueue(turn, settled)

    def drop(self, reason: str) -> None:
        """The generation is not recorded."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder._done(self.key, _Fate(reason))

    def __del__(self) -> None:
        # An engine that forgets a request without finishing it must not leave it pending for ever.
        # The garbage collector may run this anywhere, so it takes no lock: SimpleQueue.put may be
        # called even from within itself.
        if self._recorder is not None:
            self._recorder._queue.put(_Lost(self.key))


class _Finished(NamedTuple):
    """A turn to be stored, and who wants to know."""

    turn: Turn
    settled: Callable[[Outcome], None] | None


class _Flush(threading.Event):
    """Passes through the queue behind everything submitted before it."""


class _Lost(NamedTuple):
    """A generation that the engine forgot."""

    key: RecordKey


class _Fate(NamedTuple):
    """What became of a generation."""

    dropped: str = ""
    """The reason if it is not recorded."""
    counted: tuple[str, ...] = ()
    """The counters that it raises."""
    flags: tuple[str, ...] = ()
    error: Exception | None = None


class _Forget(NamedTuple):
    """A key whose paths are not to be continued any more."""

    key: RecordKey


class _Indexed:
    """The paths of one key, and how many records they are."""

    __slots__ = ("paths", "records")

    def __init__(self) -> None:
        self.paths = ParentIndex()
        self.records = 0


class Recorder:
    """Turns finished generations into stored records.

    Args:
        store: Where records go; a `MemoryStore` by default.
        aborted: Whether generations that were aborted after their first token are kept.
        max_queued_tokens: Tokens of waiting turns beyond which turns are dropped.
    """

    def __init__(
        self,
        store: RecordStore | None = None,
        *,
        aborted: Literal["keep", "drop"] = "keep",
        max_queued_tokens: int = MAX_QUEUED_TOKENS,
    ) -> None:
        if aborted not in ("keep", "drop"):
            raise ValueError(f"aborted is {aborted!r}, it must be 'keep' or 'drop'")
        self.store: RecordStore = MemoryStore() if store is None else store
        self._keeps_aborted = aborted == "keep"
        self._max_queued_tokens = max_queued_tokens
        self._instance = secrets.token_hex(8)
        self._queue: SimpleQueue[_Finished | _Flush | _Lost | _Forget | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards what follows; held for a few operations only
        self._queued_tokens = 0
        self._started = 0
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._flagged: Counter[str] = Counter()
        self._unkeyed: Counter[str] = Counter()
        self._pending: Counter[RecordKey] = Counter()
        self._closed = False
        self._indexes: OrderedDict[RecordKey, _Indexed] = OrderedDict()  # its thread's alone
        self._indexed_records = 0
        self._warn_error = Throttle(logger)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def start(self, key: RecordKey) -> Pending:
        """The engine has taken a request that is to be recorded; callable from any thread."""
        with self._lock:
            self._started += 1
            self._pending[key] += 1
        return Pending(self, key)

    def submit(self, turn: Turn) -> None:
        """Record a finished turn; callable from any thread, returns in microseconds."""
        self.start(turn.key).finish(turn)

    def count_unkeyed(self, reason: str) -> None:
        """A generation is served and not recorded, for want of a record key."""
        with self._lock:
            self._unkeyed[reason] += 1

    def count_error(self, message: str, *args: object) -> None:
        """Log and count an exception that is being handled; for hooks, which must swallow it."""
        with self._lock:
            self._counts["errors"] += 1
        self._warn_error.warning(message, *args, exc_info=True)

    def _enqueue(self, turn: Turn, settled: Callable[[Outcome], None] | None) -> None:
        try:
            fate = _Fate(self._put(turn, settled))
        except Exception as error:  # noqa: BLE001 - the engine comes first, see below
            self.count_error("request %s of %s was not recorded", turn.request_id, turn.key)
            fate = _Fate("error", error=error)
        if fate.dropped:
            self._done(turn.key, fate)
            self._tell(turn, settled, fate)

    def _put(self, turn: Turn, settled: Callable[[Outcome], None] | None) -> str:
        """Queue a turn; returns the reason if it is dropped."""
        if len(turn.response_ids) == 0:
            return "empty"
        if turn.finish_reason is FinishReason.ABORT and not self._keeps_aborted:
            return "aborted"
        tokens = _tokens(turn)
        with self._lock:
            if self._closed:
                return "closed"
            if self._queued_tokens + tokens > self._max_queued_tokens:
                return "queue_full"
            self._queued_tokens += tokens
            # Under the lock, so that `close` finds every turn before its own mark.
            self._queue.put(_Finished(turn, settled))
        return ""

    def _done(self, key: RecordKey, fate: _Fate, tokens: int = 0) -> None:
        # In one step: whoever reads the counters finds that they add up.
        with self._lock:
            if fate.dropped:
                self._dropped[fate.dropped] += 1
            self._counts.update(fate.counted)
            self._flagged.update(fate.flags)
            self._queued_tokens -= tokens
            self._pending[key] -= 1
            if self._pending[key] <= 0:
                del self._pending[key]

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Flush):
                item.set()
            elif isinstance(item, _Lost):
                self._done(item.key, _Fate("lost"))
            elif isinstance(item, _Forget):
                self._drop_index(item.key)
            else:
                self._process(item.turn, item.settled)

    def _process(self, turn: Turn, settled: Callable[[Outcome], None] | None) -> None:
        fate = _Fate("error")
        try:
            fate = self._record(turn)
        except Exception as error:  # noqa: BLE001
            # The engine comes first: a fault here costs this record, and says so.
            self.count_error("request %s of %s was not recorded", turn.request_id, turn.key)
            fate = _Fate("error", error=error)
        finally:
            self._done(turn.key, fate, _tokens(turn))
        self._tell(turn, settled, fate)

    def _tell(self, turn: Turn, settled: Callable[[Outcome], None] | None, fate: _Fate) -> None:
        if settled is None:
            return
        try:
            settled(Outcome(fate.dropped, fate.error))
        except Exception:  # noqa: BLE001 - a fault of the caller's must not end the thread
            self.count_error("what waits for request %s of %s failed", turn.request_id, turn.key)

    def _record(self, turn: Turn) -> _Fate:
        """Build a turn's record and store it."""
        prompt_ids = np.asarray(turn.prompt_ids, dtype=np.int32)
        response_ids = np.asarray(turn.response_ids, dtype=np.int32)
        routed = _routed_experts(turn)
        logprobs, flags = _logprobs(turn, len(response_ids))
        while True:
            index = self._index(turn.key)
            placement = index.paths.place(
                prompt_ids, response_ids, adapter=turn.adapter, multi_modal=turn.multi_modal
            )
            record = _build(turn, prompt_ids, response_ids, logprobs, flags, routed, placement)
            outcome = self.store.add(record)
            if outcome is not AddOutcome.NO_PARENT or record.parent is None:
                break
            # The key was drained, removed or evicted: what the index remembers is gone.
            self._drop_index(turn.key)
        if outcome is not AddOutcome.STORED:
            return _Fate(outcome.value)
        superseded = index.paths.add(record, placement)
        index.records += 1
        self._indexed_records += 1
        counted = ["extended" if record.parent else "roots"]
        counted += ["prefix_break"] * placement.prefix_break
        counted += ["superseded"] * (superseded is not None)
        return _Fate(counted=tuple(counted), flags=record.flags)

    def _index(self, key: RecordKey) -> _Indexed:
        """The paths of a key; those of the keys used least recently make room."""
        index = self._indexes.get(key)
        if index is None:
            index = self._indexes[key] = _Indexed()
        self._indexes.move_to_end(key)
        while len(self._indexes) > MAX_INDEXED_KEYS or (
            self._indexed_records > MAX_INDEXED_RECORDS and len(self._indexes) > 1
        ):
            self._drop_index(next(iter(self._indexes)))
        return index

    def _drop_index(self, key: RecordKey) -> None:
        index = self._indexes.pop(key, None)
        self._indexed_records -= index.records if index else 0

    def forget(self, key: RecordKey) -> None:
        """Continue nothing that the key has now: its records are about to be replaced by others.

        Takes effect behind the turns submitted before, as `flush` does.
        """
        self._queue.put(_Forget(key))

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every turn submitted before this call is stored or dropped.

        Args:
            timeout: Seconds; None waits without limit.

        Returns:
            False if the time ran out first.
        """
        if threading.current_thread() is self._thread:
            return self._queue.empty()
        marker = _Flush()
        with self._lock:
            closed = self._closed
            if not closed:
                self._queue.put(marker)
        if closed:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return marker.wait(timeout)

    def pending(self, prefix: KeyPrefix | None = None) -> int:
        """Generations under a prefix that are in flight or waiting to be stored."""
        with self._lock:
            items = list(self._pending.items())
        return sum(count for key, count in items if prefix is None or prefix.matches(key))

    def pending_by_key(self, prefix: KeyPrefix) -> dict[RecordKey, int]:
        """As `pending`, key by key."""
        with self._lock:
            items = list(self._pending.items())
        return {key: count for key, count in items if prefix.matches(key)}

    def stats(self) -> RecorderStats:
        """The counters, taken at one moment."""
        with self._lock:
            counts = self._counts
            return RecorderStats(
                instance=self._instance,
                started=self._started,
                recorded=counts["extended"] + counts["roots"],
                extended=counts["extended"],
                roots=counts["roots"],
                prefix_break=counts["prefix_break"],
                superseded=counts["superseded"],
                dropped=dict(self._dropped),
                pending=sum(self._pending.values()),
                errors=counts["errors"],
                flagged=dict(self._flagged),
                unkeyed=dict(self._unkeyed),
            )

    def close(self, timeout: float = 10.0) -> None:
        """Store what is queued, within `timeout` seconds, then stop; later turns are dropped."""
        deadline = time.monotonic() + timeout
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(max(deadline - time.monotonic(), 0))


def _tokens(turn: Turn) -> int:
    return len(turn.prompt_ids) + len(turn.response_ids)


def _logprobs(turn: Turn, count: int) -> tuple[AnyArray | None, tuple[str, ...]]:
    values = turn.logprobs() if callable(turn.logprobs) else turn.logprobs
    if values is None:
        return None, (*turn.flags, "logprobs_missing")
    # A copy where it is an `array.array`: that one has room to grow, which would be kept.
    array = np.array(values, dtype=np.float32)
    if len(array) != count:
        # Which value belongs to which token is not known any more: none is kept.
        return None, (*turn.flags, "logprobs_length_mismatch")
    return array, turn.flags


def _routed_experts(turn: Turn) -> RoutedExperts | None:
    routed = turn.routed_experts() if callable(turn.routed_experts) else turn.routed_experts
    if routed is None or isinstance(routed, RoutedExperts):
        return routed
    return RoutedExperts(data=routed)


def _build(
    turn: Turn,
    prompt_ids: AnyArray,
    response_ids: AnyArray,
    logprobs: AnyArray | None,
    flags: tuple[str, ...],
    routed: RoutedExperts | None,
    placement: Placement,
) -> Record:
    given = {
        "parent": placement.parent,
        "start": placement.start,
        "logprobs": logprobs,
        "versions": tuple(turn.versions),
        "stop_reason": turn.stop_reason,
        "prompt_text": None if placement.parent else turn.prompt_text,
        "response_text": turn.response_text,
        "routed_experts": routed.after(placement.routed_rows) if routed else None,
        "adapter": turn.adapter,
        "multi_modal": turn.multi_modal,
        "request_id": turn.request_id,
        "sample_index": turn.sample_index,
        "attempt": turn.attempt,
        "cached_tokens": turn.cached_tokens,
        "flags": flags,
    }
    return Record(
        id=turn.id,
        key=turn.key,
        # A copy: a view would keep the whole prompt in memory.
        prompt_ids=prompt_ids[placement.start :].copy() if placement.start else prompt_ids,
        response_ids=response_ids,
        finish_reason=turn.finish_reason,
        sampling=turn.sampling,
        created_at=turn.created_at,
        finished_at=turn.finished_at,
        # What is at its default is left out: each field given costs memory, and bytes on the wire.
        **{name: value for name, value in given.items() if not _is_default(name, value)},
    )


def _is_default(name: str, value: Any) -> bool:
    return value is None or (
        isinstance(value, (int, str, tuple)) and value == Record.model_fields[name].default
    )
