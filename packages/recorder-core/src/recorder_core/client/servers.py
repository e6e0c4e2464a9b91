"""Which servers a client talks to, and what their answers mean."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from recorder_core.client.calls import Call, Part, Whole
from recorder_core.errors import (
    BadRequestError,
    ClientError,
    LeaseError,
    NotAuthorizedError,
    RecorderError,
    ServerFaultError,
    ServerUnreachableError,
)
from recorder_core.options import ADMIN_KEY_VARIABLE
from recorder_core.protocol import PREFIX

CONNECT_TIMEOUT_S = 10.0
# Servers close idle connections after 5 s (uvicorn's default). A drain sent into such a
# connection is lost and may not be repeated: it must be the client that closes first.
LIMITS = httpx.Limits(max_connections=100, keepalive_expiry=2.0)

Outcome = httpx.Response | httpx.RequestError
"""What came of sending a request."""

_REFUSED = {400, 409, 411, 413, 414, 415, 422, 431, 501}
_MAX_MESSAGE = 500


class Servers:
    """The part of the clients that does no input or output."""

    def __init__(
        self,
        base_url: str | Iterable[str],
        admin_key: str | None,
        timeout: float,
        retries: int,
    ) -> None:
        given = [base_url] if isinstance(base_url, str) else list(base_url)
        # A server named twice would be counted twice, and emptied by its own overwrite.
        self.urls: tuple[str, ...] = tuple(dict.fromkeys(_normalized(url) for url in given))
        """The servers' base URLs."""
        if not self.urls:
            raise ValueError("base_url is an empty list; at least one server is needed")
        self._headers = _authorization(admin_key)
        self._timeout = timeout
        self._retries = retries

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.urls)!r})"

    def _arguments(self, url: str, call: Call[Any, Any]) -> dict[str, Any]:
        """A call to one server, as httpx's `request` takes it."""
        timeout = self._timeout + call.wait_s
        return {
            "method": call.method,
            "url": url + call.path,
            "params": dict(call.params),
            "content": call.content,
            "headers": {**self._headers, "content-type": call.media_type},
            # Waiting for one of our own connections is no fault of the server's.
            "timeout": httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT_S), pool=None),
            "follow_redirects": False,
        }

    def _read(self, url: str, call: Call[Part, Any], outcome: Outcome) -> Part | RecorderError:
        """One server's part, or the error that it stands for."""
        try:
            if isinstance(outcome, httpx.RequestError):
                raise _unreachable(outcome) from outcome
            if not outcome.is_success:
                raise _refusal(call, outcome, authorized=bool(self._headers))
            return call.parse(outcome)
        except (ClientError, LeaseError) as error:
            named = type(error)(f"{call.method} {url}{call.path}: {error}")
            named.__cause__ = error.__cause__
            return named


def conclude(
    calls: Mapping[str, Call[Part, Whole]], outcomes: Iterable[Part | RecorderError]
) -> Whole:
    """Make one result of what every server answered.

    Args:
        calls: What was asked, by the server's URL.
        outcomes: What came of it, in the same order.

    Raises:
        RecorderError: The first error, by its type; the message holds all of them.
    """
    parts: dict[str, Part] = {}
    errors: list[RecorderError] = []
    for url, outcome in zip(calls, outcomes, strict=True):
        if isinstance(outcome, RecorderError):
            errors.append(outcome)
        else:
            parts[url] = outcome
    call = next(iter(calls.values()))
    if not errors:
        return call.merge(parts)
    first = errors[0]
    if len(calls) == 1:
        raise first
    text = "; ".join(str(error) for error in errors)
    after = f"; {call.if_partial}" if parts else ""
    raise type(first)(f"{len(errors)} of {len(calls)} servers failed: {text}{after}") from first


def is_transient(outcome: Outcome) -> bool:
    """Whether the same request may succeed in a moment."""
    if isinstance(outcome, httpx.RequestError):
        # Not timeouts: the caller has set how long to wait.
        return isinstance(outcome, (httpx.NetworkError, httpx.RemoteProtocolError))
    return outcome.status_code in (502, 503, 504)


def _normalized(url: str) -> str:
    try:
        parsed = httpx.URL(url.strip())
    except httpx.InvalidURL as error:
        raise ValueError(f"the base URL {url!r} is no URL: {error}") from None
    if parsed.userinfo:  # not shown: it is a secret
        raise ValueError("the base URL holds a user name or password; use admin_key")
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise ValueError(f"the base URL {url!r} is not like http://host:8000")
    # OpenAI clients are given the URL with /v1.
    return str(parsed).rstrip("/").removesuffix("/v1").rstrip("/")


def _authorization(admin_key: str | None) -> dict[str, bytes]:
    key = (os.environ.get(ADMIN_KEY_VARIABLE, "") if admin_key is None else admin_key).strip()
    if any(ord(character) < 32 or ord(character) == 127 for character in key):
        # Refused here: the HTTP library would show it in its own error.
        raise ValueError("the admin key holds a control character, which no header can carry")
    return {"authorization": b"Bearer " + key.encode()} if key else {}


def _unreachable(error: httpx.RequestError) -> ClientError:
    if isinstance(error, httpx.DecodingError):
        return ServerFaultError(f"the reply cannot be decompressed: {error}")
    if isinstance(error, httpx.TimeoutException):
        return ServerUnreachableError(f"no answer in time ({type(error).__name__})")
    return ServerUnreachableError(f"no answer: {error or type(error).__name__}; is it running?")


def _refusal(call: Call[Any, Any], response: httpx.Response, *, authorized: bool) -> RecorderError:
    status, message = response.status_code, _message(response)
    text = f"answered {status}: {message}"
    if status in (401, 403):
        hint = f"; no admin key was given: pass admin_key or set {ADMIN_KEY_VARIABLE}"
        return NotAuthorizedError(text + ("" if authorized else hint))
    # An application answers "Not Found" where it has no such route; our ack names the lease.
    if status == 404 and call.path == f"{PREFIX}/ack" and "lease" in message:
        return LeaseError(text)
    if status in (404, 405):
        return ServerFaultError(
            f"{text}. The server has no such route: is it started with --enable-recording?"
        )
    if status in _REFUSED:
        return BadRequestError(text)
    return ServerFaultError(text)


def _message(response: httpx.Response) -> str:
    """The server's own words: FastAPI's `detail`, OpenAI's `error.message`, or the body."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    found = body.get("detail", body.get("error")) if isinstance(body, dict) else None
    if isinstance(found, dict):
        found = found.get("message")
    if not isinstance(found, str):
        kind = response.headers.get("content-type", "untyped")
        found = f"{kind}, {response.text.strip() or 'empty'}"
    return found if len(found) <= _MAX_MESSAGE else found[:_MAX_MESSAGE] + " …"
