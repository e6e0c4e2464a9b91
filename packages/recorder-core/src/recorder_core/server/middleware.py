"""Finds out whom a request is recorded for, from the headers that any client can set."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

from recorder_core import tracing
from recorder_core.context import (
    AMBIGUOUS,
    MISSING,
    NOT_A_KEY,
    Identity,
    identify,
    reset_identity,
    set_identity,
)
from recorder_core.exchange import Exchange
from recorder_core.keys import check_secret
from recorder_core.protocol import KEY_HEADER
from recorder_core.server.exchanges import Exchanges

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_KEY_HEADER = KEY_HEADER.encode()
_BEARER_HEADER = b"authorization"
# What may hold a record key; the first that does counts.
_CREDENTIALS = (_KEY_HEADER, _BEARER_HEADER, b"x-api-key")
# Of a request whose credentials all fail, the reason that helps most.
_TELLING = (
    "forged",
    "expired",
    "unsigned",
    "unverifiable",
    "malformed",
    "ambiguous",
    "not_a_key",
    "missing",
)
# Sent by the OpenAI and Anthropic SDKs: how often they have tried this request before.
_RETRY_HEADER = b"x-stainless-retry-count"
_READ = frozenset({*_CREDENTIALS, _RETRY_HEADER})


class IdentityMiddleware:
    """Pure ASGI middleware that puts the request's recording identity in force.

    The record key is the first that is one of `X-Record-Key`, `Authorization: Bearer` and
    `x-api-key`; a header that is there twice is none. Where the engine has an API key `K` of its
    own, a client may send `K:<record key>` as its API key; the engine then sees `K`, and `K` is no
    part of a record key. A request without a record key is served as usual.

    Args:
        app: The application.
        api_keys: The engine's own API keys.
        secret: What record keys have to be signed with; None: they are not signed.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str] = (), secret: str | None = None
    ) -> None:
        self.app = app
        self._secret = None if secret is None else check_secret(secret)
        # The longest first: `a:b` is tried before `a`.
        self._exchanges = Exchanges()
        self._api_keys = sorted((key.encode() for key in api_keys), key=len, reverse=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        identity, engine_key = self._identity(scope.get("headers", ()))
        if engine_key is not None:
            scope = {**scope, "headers": _with_bearer(scope["headers"], engine_key)}
        exchange = None
        if identity.key is not None and scope["type"] == "http":
            exchange = Exchange()
            if tracing.is_on():
                exchange.trace = tracing.trace_headers(scope.get("headers", ()))
            receive, send = self._exchanges.watch(identity.key, exchange, receive, send)
            identity = self._exchanges.begin(identity, exchange)
        token = set_identity(identity)
        try:
            await self.app(scope, receive, send)
        finally:
            reset_identity(token)
            if exchange is not None and exchange.delivered is None:
                exchange.delivered = False  # the application ended before its reply did

    def _identity(self, headers: Sequence[tuple[bytes, bytes]]) -> tuple[Identity, bytes | None]:
        """The identity, and the engine's API key if it was part of a composite one."""
        given: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            if name in _READ:
                given.setdefault(name, []).append(value)
        retries = given.get(_RETRY_HEADER, [b""])[-1]
        attempt = int(retries) if retries.isdigit() and len(retries) < 10 else 0
        engine_key = None
        found = []
        for name in _CREDENTIALS:
            values = given.get(name)
            if values is None:
                continue
            credential = _credential(name, values)
            own = self._own_key(credential)
            if own is not None and name != _KEY_HEADER:
                engine_key = engine_key or own
            found.append(AMBIGUOUS if len(values) > 1 else self._read(credential, own, attempt))
        return _first(found), engine_key

    def _own_key(self, credential: bytes) -> bytes | None:
        """The engine's own key, where a credential begins with it and a colon."""
        for key in self._api_keys:
            if credential[len(key) : len(key) + 1] == b":" and hmac.compare_digest(
                credential[: len(key)], key
            ):
                return key
        return None

    def _read(self, credential: bytes, own: bytes | None, attempt: int) -> Identity:
        rest = credential if own is None else credential[len(own) + 1 :]
        # It may hold slashes, and be sent for the record key that belongs behind it.
        if self._own_key(rest) or any(hmac.compare_digest(rest, key) for key in self._api_keys):
            return NOT_A_KEY
        return identify(rest.decode("latin-1"), attempt, self._secret)


def _credential(name: bytes, values: Sequence[bytes]) -> bytes:
    """What a header says, if it is there once."""
    if len(values) != 1:
        return b""
    if name != _BEARER_HEADER:
        return values[0].strip()
    scheme, _, token = values[0].partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _first(found: Iterable[Identity]) -> Identity:
    """The first that has a key; else the one whose reason says most."""
    best = MISSING
    for identity in found:
        if identity.key is not None:
            return identity
        if _TELLING.index(identity.reason) < _TELLING.index(best.reason):
            best = identity
    return best


def _with_bearer(headers: Sequence[tuple[bytes, bytes]], token: bytes) -> list[tuple[bytes, bytes]]:
    kept = [header for header in headers if header[0] not in (b"authorization", b"x-api-key")]
    return [*kept, (b"authorization", b"Bearer " + token)]
