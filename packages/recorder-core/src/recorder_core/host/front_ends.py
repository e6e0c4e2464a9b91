"""The recorder process's side of its front ends."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from queue import SimpleQueue
from typing import Any

from recorder_core.drops import DropReason
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
)
from recorder_core.intake import Call, Outcome, Pending
from recorder_core.keys import RecordKey
from recorder_core.recorder import Recorder

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""What a front end that does not answer holds up whoever asks."""
_LEAVING_S = 2.0


class FrontEnd:
    """One front end, as long as it is connected.

    Args:
        front_ends: Whose it is.
        connection: To it.
    """

    def __init__(self, front_ends: FrontEnds, connection: Connection) -> None:
        self._front_ends = front_ends
        self._recorder = front_ends.recorder
        self._connection = connection
        self._flying: defaultdict[RecordKey, list[Pending]] = defaultdict(list)
        self._exchanges: dict[int, Exchange] = {}
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        for work in (self._read, self._write):
            threading.Thread(target=work, name="front-end", daemon=True).start()

    def send(self, message: Any) -> None:
        """Have something sent, by a thread that may wait for it; a number is a settled turn's."""
        self._outgoing.put(message)

    def close(self) -> None:
        """Hear no more of it."""
        hang_up(self._connection)

    def _write(self) -> None:
        while True:
            messages = [self._outgoing.get()]
            while not self._outgoing.empty():
                messages.append(self._outgoing.get())
            numbers = [each for each in messages if isinstance(each, int)]
            others = [each for each in messages if not isinstance(each, int)]
            for message in [Settled(numbers), *others] if numbers else others:
                if message is None:
                    return
                try:
                    self._connection.send(message)
                except OSError:
                    return  # whoever reads sees that it is gone

    def _read(self) -> None:
        try:
            while True:
                self._take(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("A front end sent what is not understood; it has to connect anew")
        self._connection.close()
        self._outgoing.put(None)
        for each in self._flying.values():
            for pending in each:
                pending.drop(DropReason.LOST)
        self._front_ends.gone(self)

    def _take(self, message: Any) -> None:
        if isinstance(message, Ended):
            self._finish(message)
        elif isinstance(message, Started):
            for key in message.keys:
                self._flying[key].append(self._recorder.start(key))
        elif isinstance(message, Dropped):
            self._ending(message.key).drop(message.reason)
        elif isinstance(message, Delivered):
            for number, delivered in message.replies:
                if (exchange := self._exchanges.pop(number, None)) is not None:
                    exchange.delivered = delivered
        elif isinstance(message, Counted):
            self._recorder.add_counts(message.unkeyed, message.errors)
            for name, value in message.engine.items():
                self._recorder.describe(name, value)
        elif isinstance(message, CaughtUp):
            self._front_ends.caught_up(self, message.number)
        elif isinstance(message, Announced):
            self._front_ends.announce(self, message)

    def _finish(self, message: Ended) -> None:
        number, turn = message

        def settled(outcome: Outcome) -> None:
            self.send(number)

        if turn.exchange is not None and turn.exchange.delivered is None:
            self._exchanges[number] = turn.exchange
        self._ending(turn.key).finish(turn, settled)

    def _ending(self, key: RecordKey) -> Pending:
        flying = self._flying.get(key)
        if not flying:
            return self._recorder.start(key)
        pending = flying.pop()
        if not flying:
            del self._flying[key]
        return pending


class FrontEnds:
    """All front ends of the host.

    Args:
        recorder: Where their turns go.
        folder: Where they find this process.
    """

    def __init__(self, recorder: HostRecorder, folder: Folder) -> None:
        self.recorder = recorder
        self._listener = Listener(
            folder.turns, "AF_UNIX", backlog=64, authkey=folder.key.read_bytes()
        )
        self._lock = threading.Lock()
        self._all: set[FrontEnd] = set()
        self._asked = 0
        # By number: who is still to answer, since when, and what waits for it.
        self._waiting: dict[int, tuple[set[FrontEnd], float, Callable[[], None]]] = {}
        self._closed = False
        for work in (self._accept, self._watch):
            threading.Thread(target=work, name="front-ends", daemon=True).start()

    def when_caught_up(self, then: Callable[[], None]) -> None:
        """Have `then` called when all that has finished in any front end so far is submitted.

        A front end that does not answer is waited for some seconds.
        """
        with self._lock:
            asked = set(self._all)
            if asked:
                self._asked += 1
                self._waiting[self._asked] = (asked, time.monotonic(), then)
                for each in asked:
                    each.send(Ask(self._asked))
        if not asked:
            then()

    def caught_up(self, front_end: FrontEnd, number: int) -> None:
        """A front end has sent all that it had when it was asked this."""
        self._forget(front_end, number)

    def gone(self, front_end: FrontEnd) -> None:
        """A front end is there no more: what it had sent is submitted, the rest is lost."""
        with self._lock:
            self._all.discard(front_end)
            number = self._asked
        self._forget(front_end, number)

    def announce(self, source: FrontEnd, message: Announced) -> None:
        """Tell all others, and the source when they have heard it."""
        with self._lock:
            others = self._all - {source}
        for each in others:
            each.send(message)
        self.when_caught_up(lambda: source.send(Heard(message.number)))

    def close(self) -> None:
        """Hear no more of any of them; those that are leaving are heard to their end."""
        deadline = time.monotonic() + _LEAVING_S
        while self._all and time.monotonic() < deadline:
            time.sleep(0.02)
        self._closed = True
        self._listener.close()
        with self._lock:
            everyone = set(self._all)
        for each in everyone:
            each.close()

    def _forget(self, front_end: FrontEnd, number: int) -> None:
        """Wait no more for its answer to any question up to this one."""
        with self._lock:
            for asked, (left, _, _) in self._waiting.items():
                if asked <= number:
                    left.discard(front_end)
        self._go_on()

    def _go_on(self, late: float = 0.0) -> None:
        """Do what waits for nobody any more, or since before `late`."""
        with self._lock:
            ready = [
                asked
                for asked, (left, since, _) in self._waiting.items()
                if not left or since < late
            ]
            going = [self._waiting.pop(asked)[2] for asked in ready]
        for then in going:
            then()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError):
                continue  # whoever it was has left, or did not know the key
            front_end = FrontEnd(self, connection)
            with self._lock:
                self._all.add(front_end)
            front_end.send(Ask(0))

    def _watch(self) -> None:
        while not self._closed:
            time.sleep(_PATIENCE_S / 10)
            self._go_on(time.monotonic() - _PATIENCE_S)


class HostRecorder(Recorder):
    """A recorder whose turns come from front ends: what is asked of it waits until they are here.

    Args:
        folder: Where front ends find this process.
        **options: Of the recorder.
    """

    def __init__(self, folder: Folder, **options: Any) -> None:
        super().__init__(**options)
        self.front_ends = FrontEnds(self, folder)

    def add_counts(self, unkeyed: dict[str, int], errors: int) -> None:
        """What a front end counted."""
        with self._lock:
            self._unkeyed.update(unkeyed)
            self._counts["errors"] += errors

    def _call(self, call: Call) -> Future[Any]:
        self.front_ends.when_caught_up(lambda: self._queue_call(call))
        return call.future

    def close(self, timeout: float = 10.0) -> None:
        """Hear no more of front ends, store what is queued, then stop."""
        self.front_ends.close()
        super().close(timeout)
