"""The engine's side of recording: what hooks call, and the queue to the thread that does the work.

On the engine's side everything is a few dictionary operations under a lock that is never held
while work is done.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

from recorder_core import tracing
from recorder_core.drops import DropReason
from recorder_core.flight import InFlight
from recorder_core.keys import RecordKey
from recorder_core.records import FinishReason, Record, Turn
from recorder_core.throttle import Throttle

logger = logging.getLogger(__name__)

MAX_QUEUED_TOKENS = 16_000_000
"""Tokens of turns waiting for the recorder's thread; beyond that turns are dropped."""
# Evaluations may share the engine for days: what is said of them is said once an hour.
_UNKEYED_INTERVAL_S = 3600.0


class Outcome(NamedTuple):
    """What became of a finished turn."""

    dropped: DropReason | None = None
    """Why it is not recorded; None: it is stored."""
    error: Exception | None = None
    """What a store raised, where that is why."""


class Pending:
    """A generation in flight. Ends once: by `finish`, by `drop`, or when it is forgotten."""

    __slots__ = ("_recorder", "key")

    def __init__(self, recorder: Intake, key: RecordKey) -> None:
        self.key = key
        self._recorder: Intake | None = recorder

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

    def drop(self, reason: DropReason | str) -> None:
        """The generation is not recorded."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder._drop(self.key, DropReason(reason))

    def __del__(self) -> None:
        # An engine that forgets a request without finishing it must not leave it pending for ever.
        # The garbage collector may run this anywhere, so it takes no lock: SimpleQueue.put may be
        # called even from within itself.
        if self._recorder is not None:
            self._recorder._queue.put(Lost(self.key))


class Finished(NamedTuple):
    """A turn to be stored, and who wants to know."""

    turn: Turn
    settled: Callable[[Outcome], None] | None
    queued_at: float
    """Seconds, as `perf_counter` gives them."""


class Call(NamedTuple):
    """Something to be done behind everything submitted before it."""

    function: Callable[[], Any]
    future: Future[Any]
    when_safe: Callable[[Callable[[Exception | None], None]], None]
    """Has something called once what the function changed is safe."""

    def __call__(self) -> None:
        """Do it, on the thread; whoever waits is told when it is safe."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.function()
            self.when_safe(lambda error: self._settle(result, error))
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            self.future.set_exception(error)

    def _settle(self, result: Any, error: Exception | None) -> None:
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


def at_once(done: Callable[[Exception | None], None]) -> None:
    """For a `Call` that changes nothing."""
    done(None)


class Lost(NamedTuple):
    """A generation that the engine forgot."""

    key: RecordKey


class Noted(NamedTuple):
    """A generation that was dropped on the engine's side: its run is to know."""

    key: RecordKey
    reason: DropReason


class Fate(NamedTuple):
    """What became of a generation."""

    dropped: DropReason | None = None
    counted: tuple[str, ...] = ()
    """The counters that it raises."""
    flags: tuple[str, ...] = ()
    error: Exception | None = None
    record: Record | None = None
    """What is stored of it."""


class Intake(ABC):
    """Takes what an engine's hook hands over, and has one thread of its own work on it.

    Args:
        aborted: Whether generations that were aborted after their first token are kept.
        max_queued_tokens: Tokens of waiting turns beyond which turns are dropped; a prompt that
            several samples share counts once.
    """

    def __init__(self, aborted: Literal["keep", "drop"], max_queued_tokens: int) -> None:
        if aborted not in ("keep", "drop"):
            raise ValueError(f"aborted is {aborted!r}, it must be 'keep' or 'drop'")
        self._keeps_aborted = aborted == "keep"
        self._max_queued_tokens = max_queued_tokens
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._lock = threading.Lock()  # guards what follows; held for a few operations only
        self._queued_tokens = 0
        self._queued_prompts: Counter[int] = Counter()  # by the identity of the ids
        self._started = 0
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._flagged: Counter[str] = Counter()
        self._unkeyed: Counter[str] = Counter()
        self._engine: dict[str, str] = {}
        self._in_flight = InFlight()
        self._closed = False
        self._warn_error = Throttle(logger)
        self._warn_unkeyed: dict[str, Throttle] = {}
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self, key: RecordKey) -> Pending:
        """The engine has taken a request that is to be recorded; callable from any thread."""
        with self._lock:
            self._started += 1
            self._in_flight.add(key)
        return Pending(self, key)

    def submit(self, turn: Turn) -> None:
        """Record a finished turn; callable from any thread, returns in microseconds."""
        self.start(turn.key).finish(turn)

    def count_unkeyed(self, reason: str, detail: str = "") -> None:
        """A generation is served and not recorded, for want of a record key.

        Args:
            reason: One word; the counter's name.
            detail: What is told of it in the log, now and then; empty: it is on purpose.
        """
        with self._lock:
            self._unkeyed[reason] += 1
            warn = self._warn_unkeyed.setdefault(reason, Throttle(logger, _UNKEYED_INTERVAL_S))
        if detail:
            warn.warning(
                "A generation is served and not recorded (%s): %s. To record it, send "
                "<batch>/<task>/<run> as the API key or in the header X-Record-Key; in Python, "
                "use record_key().",
                reason,
                detail,
            )

    def describe(self, name: str, value: str) -> None:
        """Say how the engine is recorded, for whoever reads `stats`."""
        with self._lock:
            self._engine[name] = value

    def count_error(self, message: str, *args: object) -> None:
        """Log and count an exception that is being handled; for hooks, which must swallow it."""
        with self._lock:
            self._counts["errors"] += 1
        self._warn_error.warning(message, *args, exc_info=True)

    def _drop(self, key: RecordKey, reason: DropReason) -> None:
        if reason.cuts and not self._closed:
            self._queue.put(Noted(key, reason))
        self._done(key, Fate(reason))

    def _enqueue(self, turn: Turn, settled: Callable[[Outcome], None] | None) -> None:
        error: Exception | None = None
        try:
            dropped = self._put(turn, settled)
        except Exception as raised:  # noqa: BLE001 - the engine comes first, see below
            self.count_error("request %s of %s was not recorded", turn.request_id, turn.key)
            dropped, error = DropReason.ERROR, raised
        if dropped is not None:
            self._drop(turn.key, dropped)
            self._tell(turn, settled, Outcome(dropped, error))

    def _put(self, turn: Turn, settled: Callable[[Outcome], None] | None) -> DropReason | None:
        """Queue a turn; returns the reason if it is dropped."""
        response = len(turn.response_ids)
        if not response:
            return DropReason.EMPTY
        if turn.finish_reason is FinishReason.ABORT and not self._keeps_aborted:
            return DropReason.ABORTED
        prompt, name = len(turn.prompt_ids), id(turn.prompt_ids)
        with self._lock:
            if self._closed:
                return DropReason.CLOSED
            # The samples of one request share its prompt, and the memory that it takes.
            tokens = response + (0 if name in self._queued_prompts else prompt)
            if self._queued_tokens + tokens > self._max_queued_tokens:
                return DropReason.QUEUE_FULL
            self._queued_tokens += tokens
            self._queued_prompts[name] += 1
            # Under the lock, so that `close` finds every turn before its own mark.
            self._queue.put(Finished(turn, settled, time.perf_counter()))
        return None

    def _done(self, key: RecordKey, fate: Fate, turn: Turn | None = None) -> None:
        # In one step: whoever reads the counters finds that they add up.
        with self._lock:
            if fate.dropped is not None:
                self._dropped[fate.dropped.value] += 1
            self._counts.update(fate.counted)
            self._flagged.update(fate.flags)
            if turn is not None:
                self._unqueue(turn)
            told = self._in_flight.remove(key)
        for done in told:
            done()

    def _unqueue(self, turn: Turn) -> None:
        name = id(turn.prompt_ids)
        self._queued_tokens -= len(turn.response_ids)
        self._queued_prompts[name] -= 1
        if not self._queued_prompts[name]:
            del self._queued_prompts[name]
            self._queued_tokens -= len(turn.prompt_ids)

    def _tell(
        self, turn: Turn, settled: Callable[[Outcome], None] | None, outcome: Outcome
    ) -> None:
        if settled is None:
            return
        try:
            settled(outcome)
        except Exception:  # noqa: BLE001 - a fault of the caller's must not end the thread
            self.count_error("what waits for request %s of %s failed", turn.request_id, turn.key)

    def _trace(self, turn: Turn, fate: Fate, **seconds: float) -> None:
        try:
            tracing.trace(turn, fate.record, fate.dropped, **seconds)
        except Exception:  # noqa: BLE001 - it is recorded, traced or not
            self.count_error("request %s of %s has no span", turn.request_id, turn.key)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._take(item)

    @abstractmethod
    def _take(self, item: Any) -> None:
        """Work on one item of the queue, on the thread."""

    def close(self, timeout: float = 10.0) -> None:
        """Work on what is queued, within `timeout` seconds, then stop; later turns are dropped."""
        deadline = time.monotonic() + timeout
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(max(deadline - time.monotonic(), 0))
