"""The recorder: takes finished turns from the engine, builds and stores records on its own thread.

Copying ids, finding the parent and storing happen on one daemon thread; a store that raises, blocks
or is full costs records, counted by reason, and never a generation.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import Empty
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from recorder_core.adapters import AdapterVersions
from recorder_core.building import build, read_logprobs, read_routed_experts, read_sampling_mask
from recorder_core.codec import check_writable
from recorder_core.drops import DropReason
from recorder_core.errors import NotSavedError
from recorder_core.exchange import Exchange
from recorder_core.intake import (
    MAX_QUEUED_TOKENS,
    Call,
    Fate,
    Finished,
    Intake,
    Lost,
    Noted,
    Outcome,
    at_once,
)
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.keytree import Selection
from recorder_core.measures import Measures
from recorder_core.paths import ROOT, Paths, Placement
from recorder_core.recent import Recent
from recorder_core.records import RETRY_UNCLEAR, Record, Turn
from recorder_core.stores import AddOutcome, MemoryStore, RecordStore

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

MAX_INDEXED_RUNS = 16_384
"""Runs of several records whose paths are remembered; those of others are made anew if needed."""
MAX_INDEXED_RECORDS = 262_144
"""Records whose paths are remembered, over all runs: some 300 MB at most, beside the store's."""
_UNDECIDED = 1024


@dataclass(frozen=True, kw_only=True)
class RecorderStats:
    """What became of every generation: `started = recorded + sum(dropped) + pending`."""

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
    after it (the history was rendered or tokenised anew), or goes on under another adapter."""
    superseded: int
    """Of `recorded`: an answer that was not delivered, and the request sent again."""
    dropped: dict[str, int]
    """Generations not stored, by reason: see `DropReason`."""
    pending: int
    """Generations in flight in the engine, or waiting for the recorder's thread."""
    errors: int
    """Exceptions caught on the way; each cost at most one record, dropped as `error`."""
    flagged: dict[str, int]
    """Of `recorded`: records that carry a flag, by flag."""
    unkeyed: dict[str, int]
    """Generations served and not recorded, by why they carried no record key."""
    engine: dict[str, str] = field(default_factory=dict)
    """How the engine is recorded: what its hook says with `Recorder.describe`."""


class _Taken(NamedTuple):
    """A run whose records were taken out of the store."""

    key: RecordKey


class _Indexed(NamedTuple):
    """The paths of one run, as of one epoch of its records."""

    epoch: int
    paths: Paths
    replaced: set[str]
    """The records counted as superseded."""


class Recorder(Intake):
    """Turns finished generations into stored records.

    Args:
        store: Where records go; a `MemoryStore` by default.
        aborted: Whether generations that were aborted after their first token are kept.
        max_queued_tokens: Tokens of waiting turns beyond which turns are dropped; a prompt that
            several samples share counts once.
        adapter_versions: Reads versions in the names of LoRA adapters; by default every name is an
            adapter of its own.
    """

    def __init__(
        self,
        store: RecordStore | None = None,
        *,
        aborted: Literal["keep", "drop"] = "keep",
        max_queued_tokens: int = MAX_QUEUED_TOKENS,
        adapter_versions: AdapterVersions | None = None,
    ) -> None:
        super().__init__(aborted, max_queued_tokens)
        self.store: RecordStore = MemoryStore() if store is None else store
        self.measures = Measures()
        # A store that tells what it hands out has one.
        self.recent: Recent = getattr(self.store, "recent", None) or Recent()
        self._adapter_versions = adapter_versions
        self._instance = secrets.token_hex(8)
        # What follows is its thread's alone.
        self._indexes: OrderedDict[RecordKey, _Indexed] = OrderedDict()
        self._indexed_records = 0
        self._undecided: list[tuple[Record, Exchange]] = []
        self._unsettled: set[RecordKey] = set()
        self.store.watch(self.pending, lambda key: self._queue.put(_Taken(key)))
        self._thread.start()

    # On the recorder's thread.

    def _take(self, item: Finished | Call | Lost | Noted | _Taken) -> None:
        if isinstance(item, Finished):
            self._process(item)
        elif isinstance(item, Call):
            self._settle()
            item()
        elif isinstance(item, Noted):
            self._note(item.key, item.reason)
        elif isinstance(item, _Taken):
            self._forget(item.key)  # its paths hold its records
        else:
            self._note(item.key, DropReason.LOST)
            self._done(item.key, Fate(DropReason.LOST))

    def _process(self, item: Finished) -> None:
        turn, settled, queued_at = item
        began = time.perf_counter()
        self.measures.queue_seconds.observe(began - queued_at)
        fate = Fate(DropReason.ERROR)
        try:
            fate = self._record(turn)
        except Exception as error:  # noqa: BLE001
            # The engine comes first: a fault here costs this record, and says so.
            self.count_error("request %s of %s was not recorded", turn.request_id, turn.key)
            fate = Fate(DropReason.ERROR, error=error)
        finally:
            if fate.dropped is not None:
                self._note(turn.key, fate.dropped)
            ended = time.perf_counter()
            self.measures.build_seconds.observe(ended - began)
            self._done(turn.key, fate, turn)
        self._tell(turn, settled, Outcome(fate.dropped, fate.error))
        self._trace(turn, fate, queue_seconds=began - queued_at, build_seconds=ended - began)

    def _note(self, key: RecordKey, reason: DropReason) -> None:
        try:
            self.store.note_dropped(key, reason)
        except Exception:  # noqa: BLE001 - as above
            self.count_error("that a generation of %s is not recorded was not noted", key)

    def _record(self, turn: Turn) -> Fate:
        """Build a turn's record and store it."""
        if self._adapter_versions is not None:
            turn = self._adapter_versions.read(turn)
        prompt_ids = np.asarray(turn.prompt_ids, dtype=np.int32)
        response_ids = np.asarray(turn.response_ids, dtype=np.int32)
        logprobs, flags = read_logprobs(turn, len(response_ids))
        routed = read_routed_experts(turn)
        mask, mask_flags = read_sampling_mask(turn, len(response_ids))
        flags += mask_flags
        for _ in range(3):
            index, epoch = self._index(turn.key)
            placement = (
                index.paths.place(
                    prompt_ids,
                    response_ids,
                    created_at=turn.created_at,
                    adapter=turn.adapter,
                    multi_modal=turn.multi_modal,
                )
                if index
                else ROOT
            )
            record = build(turn, prompt_ids, response_ids, logprobs, flags, routed, mask, placement)
            check_writable(record)
            outcome = self.store.add(record, epoch)
            if outcome is not AddOutcome.MOVED:
                break
        if outcome is not AddOutcome.STORED:
            moved = outcome is AddOutcome.MOVED
            return Fate(DropReason.NO_PARENT if moved else DropReason(outcome.value))
        self._stored(record, turn, index, placement)
        counted = ["extended" if record.parent else "roots"]
        counted += ["prefix_break"] * placement.prefix_break
        self._show(record)
        return Fate(counted=tuple(counted), flags=record.flags, record=record)

    def _stored(
        self, record: Record, turn: Turn, index: _Indexed | None, placement: Placement
    ) -> None:
        if index is not None:
            index.paths.add(record, placement)
            self._indexed_records += 1
            self._unsettled.add(record.key)
        if turn.exchange is not None:
            self._undecided.append((record, turn.exchange))
            if len(self._undecided) >= _UNDECIDED:
                self._settle_deliveries()

    def _show(self, record: Record) -> None:
        try:
            self.recent.add(record)
        except Exception:  # noqa: BLE001 - it is stored, whoever looks or not
            self.count_error("record %s is not among the recent ones", record.id)

    def _index(self, key: RecordKey) -> tuple[_Indexed | None, int]:
        """The paths of a run, and its epoch; None where the run has no record yet."""
        epoch = self.store.epoch(key)
        index = self._indexes.get(key)
        if index is None or index.epoch != epoch:
            self._forget(key)
            if not epoch:
                return None, 0
            records = [each for run in self.store.get(key) for each in run.records.values()]
            paths = Paths(records)
            index = self._indexes[key] = _Indexed(epoch, paths, paths.replaced()[0])
            self._indexed_records += len(paths)
        self._indexes.move_to_end(key)
        while len(self._indexes) > MAX_INDEXED_RUNS or (
            self._indexed_records > MAX_INDEXED_RECORDS and len(self._indexes) > 1
        ):
            self._forget(next(iter(self._indexes)))
        return index, epoch

    def _forget(self, key: RecordKey) -> None:
        index = self._indexes.pop(key, None)
        self._indexed_records -= len(index.paths) if index else 0

    def _settle(self) -> None:
        """Find out what can be known now: which answers were delivered, which are superseded."""
        self._settle_deliveries()
        waiting = {record.key for record, _ in self._undecided}
        for key in self._unsettled:
            index = self._indexes.get(key)
            if index is None:
                continue
            replaced, unclear = index.paths.replaced()
            more = len(replaced) - len(index.replaced)
            index.replaced.clear()
            index.replaced.update(replaced)
            with self._lock:
                self._counts["superseded"] += more
            if key not in waiting:
                self._flag(index, unclear)
        self._unsettled = {key for key in self._unsettled if key in waiting}

    def _flag(self, index: _Indexed, unclear: set[str]) -> None:
        for name in unclear:
            record = index.paths.record(name)
            if RETRY_UNCLEAR not in record.flags:
                record.flags = (*record.flags, RETRY_UNCLEAR)
                self._amend(record, flag=RETRY_UNCLEAR)
                with self._lock:
                    self._flagged[RETRY_UNCLEAR] += 1

    def _amend(self, record: Record, **known: Any) -> None:
        # A reward replaces the record in the store: ours may be an earlier one.
        try:
            self.store.amend(record.key, record.id, **known)
        except Exception:  # noqa: BLE001 - the engine comes first: counted and logged
            self.count_error("what is known of record %s was not noted: %s", record.id, known)

    def _settle_deliveries(self) -> None:
        left = []
        for record, exchange in self._undecided:
            if exchange.delivered is None:
                left.append((record, exchange))
                continue
            record.delivered = exchange.delivered
            self._amend(record, delivered=exchange.delivered)
            self._unsettled.add(record.key)
        self._undecided = left

    # For whoever reads.

    def after(self, function: Callable[[], Result]) -> Future[Result]:
        """Have something done behind every turn submitted before, and before those that come later.

        On the recorder's thread: what is stored and what is in flight are then told apart exactly.
        It must be short. Once the recorder is closed it is done here.

        Returns:
            What the function gives or raises; cancelled in time, it is not called.
        """
        return self._call(Call(function, Future(), at_once))

    def write(self, function: Callable[[], Result], *, records: bool = False) -> Future[Result]:
        """As `after`, for what changes the store and is acknowledged: given when that is safe.

        The recorder's thread does not wait for it.

        Args:
            function: What changes something.
            records: See `RecordStore.when_safe`.

        Returns:
            What the function gives or raises, or a `NotSavedError`.
        """
        when_safe = functools.partial(self.store.when_safe, records=records)
        return self._call(Call(function, Future(), when_safe))

    def _call(self, call: Call) -> Future[Any]:
        self._queue_call(call)
        return call.future

    def _queue_call(self, call: Call) -> None:
        with self._lock:
            open_ = not self._closed
            if open_:
                self._queue.put(call)
        if not open_:
            self._sweep_up()
            call()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every turn submitted before this call is stored, and safe, or dropped.

        Args:
            timeout: Seconds; None waits without limit.

        Returns:
            False if the time ran out first, or the store's disk takes no more.
        """
        if threading.current_thread() is self._thread:
            return self._queue.empty()
        if self._closed:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        waiting = self.write(lambda: None, records=True)
        done = not wait([waiting], timeout).not_done
        if not done:
            waiting.cancel()
        return done and not isinstance(waiting.exception(), NotSavedError)

    def when_idle(self, where: Selection, done: Callable[[], None]) -> Callable[[], None] | None:
        """Have `done` called once nothing is in flight there; None if nothing is.

        It is called on the thread that ends the last generation.

        Returns:
            What calls it off.
        """
        with self._lock:
            return self._in_flight.when_none(where, done)

    def pending(self, where: Selection | None = None) -> int:
        """Generations of a run or under a prefix that are in flight or waiting to be stored."""
        self._sweep_up()
        with self._lock:
            return self._in_flight.count(KeyPrefix() if where is None else where)

    def pending_by_key(self, where: Selection) -> dict[RecordKey, int]:
        """As `pending`, key by key."""
        self._sweep_up()
        with self._lock:
            return self._in_flight.by_key(where)

    def stats(self) -> RecorderStats:
        """The counters, taken at one moment."""
        self._sweep_up()
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
                pending=self._in_flight.total,
                errors=counts["errors"],
                flagged=dict(self._flagged),
                unkeyed=dict(self._unkeyed),
                engine=dict(self._engine),
            )

    def _sweep_up(self) -> None:
        """What was forgotten after `close` has no thread to count it."""
        if not self._closed or self._thread.is_alive():
            return
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                return
            if isinstance(item, Lost):
                self._done(item.key, Fate(DropReason.LOST))
            elif isinstance(item, Call):
                item()

    def close(self, timeout: float = 10.0) -> None:
        """Store what is queued, within `timeout` seconds, then stop; later turns are dropped.

        The store stays open: it is its owner's to close.
        """
        super().close(timeout)
