"""A front end's side: what its hook has in place of a recorder."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection
from typing import Any, Literal, NamedTuple

from recorder_core.drops import DropReason
from recorder_core.errors import RecorderError
from recorder_core.exchange import Exchange
from recorder_core.host.messages import (
    Announced,
    Ask,
    CaughtUp,
    Counted,
    Delivered,
    Dropped,
    Ended,
    Folder,
    Heard,
    Settled,
    Started,
    hang_up,
    resolved,
)
from recorder_core.intake import (
    MAX_QUEUED_TOKENS,
    Fate,
    Finished,
    Intake,
    Lost,
    Noted,
    Outcome,
    Pending,
)
from recorder_core.keys import KeyPrefix, RecordKey

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_RETRY_S = 0.2
_MAX_OWED = 100_000
"""Generations that the recorder process is still to be told of, as not recorded."""


class _Linked(NamedTuple):
    """The recorder process is there (again)."""

    connection: Connection


class _Unlinked(NamedTuple):
    """The recorder process is gone."""

    connection: Connection


class Relay(Intake):
    """Sends what a front end generates to the recorder process.

    While that process is gone, generations go on and are not recorded: `store_down`.

    Args:
        folder: Where the process is found.
        aborted: Whether generations that were aborted after their first token are kept.
        max_queued_tokens: Tokens of waiting turns beyond which turns are dropped.

    Raises:
        RecorderError: The process is not there, and does not come.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        aborted: Literal["keep", "drop"] = "keep",
        max_queued_tokens: int = MAX_QUEUED_TOKENS,
    ) -> None:
        super().__init__(aborted, max_queued_tokens)
        self._folder = folder
        self._listener: Callable[[Any], None] | None = None
        self._begun: list[RecordKey] = []  # guarded by the lock, like the counters
        self._sent_errors = 0
        self._announced = 0
        self._unheard: dict[int, Future[None]] = {}
        self._unsettled: dict[int, RecordKey] = {}
        # What follows is its thread's alone.
        self._connection: Connection | None = None
        self._number = 0
        self._told_engine: dict[str, str] = {}
        self._undecided: dict[int, Exchange] = {}
        self._owed: list[tuple[RecordKey, DropReason]] = []
        self._thread.start()
        linked = threading.Event()
        self._link = threading.Thread(
            target=self._stay_linked, args=(linked,), name="recorder-link", daemon=True
        )
        self._link.start()
        if not linked.wait(_START_TIMEOUT_S):
            self.close(0)
            raise RecorderError(
                f"the recorder process does not answer in {folder.path} after "
                f"{_START_TIMEOUT_S:.0f} s; its log says why"
            )

    # On the engine's side.

    def start(self, key: RecordKey) -> Pending:
        """The engine has taken a request that is to be recorded; callable from any thread."""
        with self._lock:
            self._in_flight.add(key)
            self._begun.append(key)  # sent with what comes next: nobody is woken for it
        return Pending(self, key)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight, or waiting to be sent."""
        with self._lock:
            return not self._in_flight.total

    def announce(self, news: Any) -> Future[None]:
        """Tell all other front ends, after what has finished here so far.

        Args:
            news: Something that can be pickled.

        Returns:
            Done when they have heard it, or the recorder process is not there to tell them.
        """
        heard: Future[None] = Future()
        with self._lock:
            number = self._announced = self._announced + 1
            self._unheard[number] = heard
        self._queue.put(Announced(number, news))
        return heard

    def listen(self, listener: Callable[[Any], None]) -> None:
        """Have what other front ends announce given to `listener`, on a thread of the relay's."""
        self._listener = listener

    def _drop(self, key: RecordKey, reason: DropReason) -> None:
        if self._closed:
            super()._drop(key, reason)
        else:
            self._queue.put(Noted(key, reason))  # it ends where that is sent

    # On the relay's thread.

    def _take(self, item: Any) -> None:
        if isinstance(item, _Linked):
            self._begin(item.connection)
        elif isinstance(item, _Unlinked):
            self._lose(item.connection)
        elif isinstance(item, Finished):
            self._pass_on(item)
        elif isinstance(item, Noted):
            self._end(item.key, item.reason)
        elif isinstance(item, Lost):
            self._end(item.key, DropReason.LOST)
        else:  # an answer, or news
            self._catch_up()
            if not self._send(item) and isinstance(item, Announced):
                self._heard(item.number)

    def _pass_on(self, item: Finished) -> None:
        turn, fate = item.turn, Fate(DropReason.STORE_DOWN)
        began = time.perf_counter()
        try:
            ready = resolved(turn)
            self._catch_up()
            self._number += 1
            self._unsettled[self._number] = turn.key
            # Asked before it is sent: the event loop may decide it meanwhile.
            undecided = turn.exchange is not None and turn.exchange.delivered is None
            if self._send(Ended(self._number, ready)):
                fate = Fate()
                if undecided and turn.exchange is not None:
                    self._undecided[self._number] = turn.exchange
            elif self._unsettled.pop(self._number, None):  # else it is owed with the others
                self._owe(turn.key, DropReason.STORE_DOWN)
        except Exception as error:  # noqa: BLE001 - the engine comes first: it costs this record
            self.count_error("request %s of %s was not recorded", turn.request_id, turn.key)
            fate = Fate(DropReason.ERROR, error=error)
            self._tell_dropped(turn.key, DropReason.ERROR)
        self._done(turn.key, fate, turn)
        self._tell(turn, item.settled, Outcome(fate.dropped, fate.error))
        queued, taken = began - item.queued_at, time.perf_counter() - began
        self._trace(turn, fate, queue_seconds=queued, build_seconds=taken)

    def _end(self, key: RecordKey, reason: DropReason) -> None:
        self._catch_up()
        self._tell_dropped(key, reason)
        self._done(key, Fate(reason))

    def _tell_dropped(self, key: RecordKey, reason: DropReason) -> None:
        if not self._send(Dropped(key, reason)):
            self._owe(key, reason)

    def _owe(self, key: RecordKey, reason: DropReason) -> None:
        if len(self._owed) < _MAX_OWED:
            self._owed.append((key, reason))

    def _catch_up(self) -> None:
        """Send what nobody was woken for: what began, what was counted, what was delivered."""
        if self._connection is None:
            return  # sent when the process is back
        with self._lock:
            begun, self._begun = self._begun, []
            errors = self._counts["errors"] - self._sent_errors
            self._sent_errors += errors
            counted = Counted(dict(self._unkeyed), errors, dict(self._engine))
            self._unkeyed.clear()
        if begun:
            self._send(Started(begun))
        news = counted.unkeyed or errors or counted.engine != self._told_engine
        if news and self._send(counted):
            self._told_engine = counted.engine
        decided = [
            (number, exchange.delivered)
            for number, exchange in self._undecided.items()
            if exchange.delivered is not None
        ]
        if decided:
            self._send(Delivered(decided))
            for number, _ in decided:
                del self._undecided[number]

    def _send(self, message: Any) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.send(message)
        except OSError:  # the link's thread sees it too, and says so
            self._lose(self._connection)
            return False
        return True

    def _begin(self, connection: Connection) -> None:
        self._connection = connection
        self._told_engine = {}
        with self._lock:
            self._begun = []
            flying = self._in_flight.by_key(KeyPrefix())
        owed, self._owed = self._owed, []
        keys = [key for key, count in flying.items() for _ in range(count)]
        self._send(Started([*keys, *(key for key, _ in owed)]))
        for key, reason in owed:
            self._tell_dropped(key, reason)

    def _lose(self, connection: Connection) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        self._undecided.clear()
        for number in list(self._unheard):
            self._heard(number)
        lost, self._unsettled = self._unsettled, {}
        for key in lost.values():
            self._owe(key, DropReason.STORE_DOWN)

    def _heard(self, number: int) -> None:
        heard = self._unheard.pop(number, None)
        if heard is not None:
            heard.set_result(None)

    # On the link's thread.

    def _stay_linked(self, linked: threading.Event) -> None:
        while not self._closed:
            try:
                connection = Client(self._folder.turns, "AF_UNIX", self._folder.key.read_bytes())
            except Exception:  # noqa: BLE001 - not there yet, or going: tried again
                time.sleep(_RETRY_S)
                continue
            self._queue.put(_Linked(connection))
            self._read(connection, linked)
            self._queue.put(_Unlinked(connection))
            if not self._closed:
                logger.warning("The recorder process is gone; generations are not recorded")
                time.sleep(_RETRY_S)

    def _read(self, connection: Connection, linked: threading.Event) -> None:
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                return
            linked.set()  # it is known there, too: it is asked first
            if isinstance(message, Ask):
                self._queue.put(CaughtUp(message.number))
            elif isinstance(message, Settled):
                for number in message.numbers:
                    self._unsettled.pop(number, None)
            elif isinstance(message, Heard):
                self._heard(message.number)
            elif isinstance(message, Announced) and self._listener is not None:
                try:
                    self._listener(message.news)
                except Exception:  # noqa: BLE001 - a fault of the hook's must not end the link
                    self.count_error("what another front end told was not taken: %s", message.news)

    def close(self, timeout: float = 10.0) -> None:
        """Send what is queued, within `timeout` seconds, then stop; later turns are dropped."""
        super().close(timeout)
        if self._connection is not None:
            hang_up(self._connection)
