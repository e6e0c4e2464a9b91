"""What becomes of the replies to recorded requests, seen where they leave the application."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from recorder_core.context import Identity
from recorder_core.exchange import Exchange
from recorder_core.keys import RecordKey

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_TRIED_AGAIN = frozenset({408, 409, 429})
"""Beside 5xx: what SDKs send a request again for."""
_MAX_REFUSED = 16_384
"""Runs with refused requests that are remembered."""


class Exchanges:
    """Watches requests, and remembers for each run how many were refused and not yet sent again.

    Such a request comes back with a retry count, and left no record that it could supersede.
    """

    def __init__(self) -> None:
        self._refused: OrderedDict[RecordKey, int] = OrderedDict()

    def begin(self, identity: Identity, exchange: Exchange) -> Identity:
        """The identity of a request that begins: it knows its exchange.

        A retry count that a refused request explains is none.
        """
        assert identity.key is not None
        refused = self._refused.get(identity.key, 0) if identity.attempt else 0
        if refused > 1:
            self._refused[identity.key] = refused - 1
        elif refused:
            del self._refused[identity.key]
        attempt = 0 if refused else identity.attempt
        return Identity(identity.key, attempt=attempt, exchange=exchange)

    def watch(
        self, key: RecordKey, exchange: Exchange, receive: Receive, send: Send
    ) -> tuple[Receive, Send]:
        """A request's channels, by way of which the exchange learns what becomes of it.

        Plain functions around coroutines: a streamed reply passes here once for each token.
        """
        refused = gone = False

        async def receiving() -> Message:
            nonlocal gone
            message = await receive()
            if message["type"] == "http.request":
                exchange.take(message.get("body", b""))
            elif message["type"] == "http.disconnect" and exchange.delivered is None:
                gone = True
            return message

        def sending(message: Message) -> Awaitable[None]:
            nonlocal refused
            if message["type"] == "http.response.start":
                status = message["status"]
                refused = status >= 400
                if status >= 500 or status in _TRIED_AGAIN:
                    self._remember(key)
            elif not message.get("more_body", False):
                return last(message)
            return send(message)

        async def last(message: Message) -> None:
            await send(message)
            if exchange.delivered is None:
                exchange.delivered = not (refused or gone)

        return receiving, sending

    def _remember(self, key: RecordKey) -> None:
        self._refused[key] = self._refused.get(key, 0) + 1
        self._refused.move_to_end(key)
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)
