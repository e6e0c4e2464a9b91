"""Finds out whom a request is recorded for, from the headers that any client can set."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from recorder_core.context import Identity, identify, reset_identity, set_identity
from recorder_core.protocol import KEY_HEADER

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_KEY_HEADER = KEY_HEADER.encode()
# Sent by the OpenAI and Anthropic SDKs: how often they have tried this request before.
_RETRY_HEADER = b"x-stainless-retry-count"


class IdentityMiddleware:
    """Pure ASGI middleware that puts the request's recording identity in force.

    The record key is taken from `X-Record-Key`, else from `Authorization: Bearer`, else from
    `x-api-key`. Where the engine has an API key `K` of its own, a client may send `K:<record key>`
    as its API key; the engine then sees `K`. A request without a record key is served as usual.

    Args:
        app: The application.
        api_keys: The engine's own API keys.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = ()) -> None:
        self.app = app
        # The longest first: `a:b` is tried before `a`.
        self._api_keys = sorted((key.encode() for key in api_keys), key=len, reverse=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        identity, engine_key = self._identity(scope.get("headers", ()))
        if engine_key is not None:
            scope = {**scope, "headers": _with_bearer(scope["headers"], engine_key)}
        token = set_identity(identity)
        try:
            await self.app(scope, receive, send)
        finally:
            reset_identity(token)

    def _identity(self, headers: Sequence[tuple[bytes, bytes]]) -> tuple[Identity, bytes | None]:
        """The identity, and the engine's API key if it was part of a composite one."""
        named = bearer = api_key = b""
        attempt = 0
        for name, value in headers:
            if name == b"authorization":
                scheme, _, rest = value.partition(b" ")
                bearer = rest.strip() if scheme.lower() == b"bearer" else b""
            elif name == b"x-api-key":
                api_key = value.strip()
            elif name == _KEY_HEADER:
                named = value.strip()
            elif name == _RETRY_HEADER and value.isdigit() and len(value) < 10:
                attempt = int(value)
        credential = bearer or api_key
        engine_key = None
        for key in self._api_keys:
            if credential[len(key) : len(key) + 1] == b":" and hmac.compare_digest(
                credential[: len(key)], key
            ):
                engine_key, credential = key, credential[len(key) + 1 :]
                break
        return identify((named or credential).decode("latin-1"), attempt), engine_key


def _with_bearer(headers: Sequence[tuple[bytes, bytes]], token: bytes) -> list[tuple[bytes, bytes]]:
    kept = [header for header in headers if header[0] not in (b"authorization", b"x-api-key")]
    return [*kept, (b"authorization", b"Bearer " + token)]
