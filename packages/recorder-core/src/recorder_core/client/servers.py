"""Which servers a client talks to, and what their answers mean; nothing is sent here."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

import httpx

from recorder_core.client.calls import Call, Result, described
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

Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)
Outcome = httpx.Response | httpx.RequestError
"""What came of sending a request."""

_CONNECT_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.1
# Servers close idle connections after 5 s (uvicorn's default). A drain sent into such a
# connection is lost and may not be repeated: it must be the client that closes first.
_LIMITS = httpx.Limits(max_connections=100, keepalive_expiry=2.0)
_REFUSED = {400, 409, 411, 413, 414, 415, 422, 431, 501}
_MAX_MESSAGE = 500


@cache
def _tls() -> ssl.SSLContext:
    # Loading the certificates takes 50 ms, and a program may make a client for each run.
    return httpx.create_ssl_context()


class Servers(Generic[Http]):
    """What both clients share: all but sending and waiting."""

    _new_http: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        base_url: str | Iterable[str],
        *,
        admin_key: str | None = None,
        timeout: float = 60.0,
        retries: int = 2,
        http_client: Http | None = None,
    ) -> None:
        given = [base_url] if isinstance(base_url, str) else base_url
        # A server named twice would be counted twice, and emptied by its own overwrite.
        self.urls: tuple[str, ...] = tuple(dict.fromkeys(_normalized(url) for url in given))
        """The servers' base URLs."""
        if not self.urls:
            raise ValueError("base_url is an empty list; at least one server is needed")
        self._headers = _authorization(admin_key)
        self._timeout = timeout
        self._retries = retries
        self._owns_http = http_client is None
        self._http: Http = http_client or self._new_http(verify=_tls(), limits=_LIMITS)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.urls)!r})"

    def _arguments(self, url: str, call: Call[Any]) -> dict[str, Any]:
        """A call to one server, as httpx's `request` takes it."""
        timeout = self._timeout + call.wait_s
        return {
            "method": call.method,
            "url": url + PREFIX + call.path,
            "params": call.params,
            "content": call.content,
            "headers": [*self._headers.raw, (b"content-type", call.media_type.encode())],
            # Waiting for one of our own connections is no fault of the server's.
            "timeout": httpx.Timeout(timeout, connect=min(timeout, _CONNECT_TIMEOUT_S), pool=None),
            "follow_redirects": False,
        }

    def _pauses(self, call: Call[Any]) -> Iterator[float]:
        """Seconds to wait before each retry."""
        return (_FIRST_PAUSE_S * 2**n for n in range(self._retries if call.repeatable else 0))

    def _read(self, url: str, call: Call[Any], outcome: Outcome) -> Any:
        """One server's part of the result, or the RecorderError that it stands for."""
        try:
            if isinstance(outcome, httpx.RequestError):
                raise _unreachable(outcome) from outcome
            if not outcome.is_success:
                raise _refusal(call, outcome, authorized=bool(self._headers))
            return call.parse(outcome)
        except (ClientError, LeaseError) as error:
            named = type(error)(f"{call.method} {url}{PREFIX}{call.path}: {error}")
            named.__cause__ = error.__cause__
            return named


def conclude(calls: Mapping[str, Call[Result]], parts: Iterable[Any]) -> Result:
    """Make one result of what every server answered.

    Args:
        calls: What was asked, by the server's URL.
        parts: What each answered or the error, in the same order.

    Raises:
        RecorderError: The first error, by its type; the message holds all of them.
    """
    answers = dict(zip(calls, parts, strict=True))
    errors = [part for part in answers.values() if isinstance(part, RecorderError)]
    call = next(iter(calls.values()))
    if not errors:
        return call.merge(answers)
    if len(answers) == 1:
        raise errors[0]
    text = "; ".join(map(str, errors))
    after = f"; {call.if_partial}" if len(errors) < len(answers) else ""
    message = f"{len(errors)} of {len(answers)} servers failed: {text}{after}"
    raise type(errors[0])(message) from errors[0]


def is_transient(outcome: Outcome) -> bool:
    """Whether the same request may succeed in a moment."""
    if isinstance(outcome, httpx.Response):
        return outcome.status_code in (502, 503, 504)
    # Not a timeout: the caller has said how long to wait.
    return isinstance(outcome, httpx.NetworkError | httpx.RemoteProtocolError)


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


def _authorization(admin_key: str | None) -> httpx.Headers:
    key = (os.environ.get(ADMIN_KEY_VARIABLE, "") if admin_key is None else admin_key).strip()
    if any(ord(character) < 32 or ord(character) == 127 for character in key):
        # Refused here: the HTTP library would show it in its own error.
        raise ValueError("the admin key holds a control character, which no header can carry")
    # Its repr hides the key.
    return httpx.Headers([(b"authorization", b"Bearer " + key.encode())] if key else [])


def _unreachable(error: httpx.RequestError) -> ClientError:
    if isinstance(error, httpx.DecodingError):
        return ServerFaultError(f"the reply cannot be decompressed: {error}")
    if isinstance(error, httpx.TimeoutException):
        return ServerUnreachableError(f"no answer in time ({type(error).__name__})")
    reason = str(error) or type(error).__name__
    return ServerUnreachableError(f"no answer: {reason}; is the server running there?")


def _refusal(call: Call[Any], response: httpx.Response, *, authorized: bool) -> RecorderError:
    status, message = response.status_code, _message(response)
    text = f"answered {status}: {message}"
    if status in (401, 403):
        hint = f"; no admin key was given: pass admin_key or set {ADMIN_KEY_VARIABLE}"
        return NotAuthorizedError(text + ("" if authorized else hint))
    # An application answers "Not Found" where it has no such route; our own 404 names the lease.
    if status == 404 and call.path == "/ack" and "lease" in message:
        return LeaseError(text)
    if status in (404, 405):
        return ServerFaultError(f"{text}; is it started with --enable-recording?")
    return (BadRequestError if status in _REFUSED else ServerFaultError)(text)


def _message(response: httpx.Response) -> str:
    """The server's own words: FastAPI's `detail`, OpenAI's `error.message`, or the body."""
    try:
        body = response.json()
        found = body.get("detail") or body["error"]["message"]
        text = found if isinstance(found, str) else described(found)
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        kind = response.headers.get("content-type", "untyped")
        text = f"{kind}, {response.text.strip() or 'empty'}"
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + " …"
