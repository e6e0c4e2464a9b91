"""Which servers a client talks to, and what their answers mean; nothing is sent here."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import httpx

from recorder_core.client.calls import Call, Result, Stream, described
from recorder_core.client.discovery import lookup
from recorder_core.codec import StreamDecoder
from recorder_core.environment import ADMIN_KEY_VARIABLE
from recorder_core.errors import (
    BadRequestError,
    ClientError,
    LeaseError,
    NotAuthorizedError,
    RecorderError,
    ServerFaultError,
    ServerUnreachableError,
)
from recorder_core.protocol import PREFIX

Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)
Outcome = httpx.Response | Stream | httpx.RequestError | ServerFaultError
"""What came of sending a request: a response, its content if that is a stream of runs, or why there
is none."""

_CONNECT_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.1
# Servers close idle connections after 5 s (uvicorn's default): the client closes first.
_LIMITS = httpx.Limits(max_connections=100, keepalive_expiry=2.0)
_REFUSED = {400, 409, 411, 413, 414, 415, 422, 431, 501}
_LEASING = {"/drain", "/ack", "/extend"}
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
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        given = [base_url] if isinstance(base_url, str) else base_url
        looked_up = [(url, lookup(url)) for url in given]
        # Of each what finds the replicas that it stands for; None: it is one itself.
        self._given = {url if find else _normalized(url): find for url, find in looked_up}
        if not self._given:
            raise ValueError("base_url is an empty list; at least one server is needed")
        self._headers = _authorization(admin_key)
        self._timeout = timeout
        self._retries = retries
        self._progress = progress
        self._owns_http = http_client is None
        self._http: Http = http_client or self._new_http(verify=_tls(), limits=_LIMITS)

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers' base URLs, as they are now.

        Raises:
            ServerUnreachableError: They are looked up, and there is none.
        """
        found = (
            each
            for url, find in self._given.items()
            for each in ([url] if find is None else map(_normalized, find()))
        )
        # A server named twice would be counted twice, and emptied by its own overwrite.
        return tuple(dict.fromkeys(found))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self._given)!r})"

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

    def _tell(self, decoder: StreamDecoder) -> None:
        if self._progress is not None:
            self._progress(decoder.records, decoder.bytes)

    def _pauses(self) -> Iterator[float]:
        """Seconds to wait before each retry."""
        return (_FIRST_PAUSE_S * 2**n for n in range(self._retries))

    def _read(self, url: str, call: Call[Any], outcome: Outcome) -> Any:
        """One server's part of the result, or the RecorderError that it stands for."""
        try:
            if isinstance(outcome, httpx.RequestError):
                raise _unreachable(outcome) from outcome
            if isinstance(outcome, ServerFaultError):
                raise outcome
            if isinstance(outcome, httpx.Response) and not outcome.is_success:
                raise _refusal(call, outcome, authorized=bool(self._headers))
            return call.parse(outcome)
        except (ClientError, LeaseError) as error:
            named = type(error)(f"{call.method} {url}{PREFIX}{call.path}: {error}")
            named.__cause__ = error.__cause__
            if isinstance(named, ClientError):
                named.url = url
                named.status = getattr(outcome, "status_code", None)
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
    if errors:
        raise_together(errors, len(answers), "servers", call.if_partial)
    return call.merge(answers)


def raise_together(
    errors: Sequence[RecorderError], count: int, of: str, if_partial: str
) -> NoReturn:
    """Raise the first of several errors, by its type, with the message of all."""
    if count == 1:
        raise errors[0]
    text = "; ".join(map(str, errors))
    elsewhere = if_partial if len(errors) < count else ""
    after = f"; {elsewhere}" if elsewhere else ""
    together = type(errors[0])(f"{len(errors)} of {count} {of} failed: {text}{after}")
    if isinstance(together, ClientError):
        together.failures, together.elsewhere = tuple(errors), elsewhere
    raise together from errors[0]


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
    if status == 404 and call.path in _LEASING and "lease" in message:
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
