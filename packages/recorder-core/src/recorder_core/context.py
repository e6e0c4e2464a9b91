"""The recording identity of the request in flight.

A server's middleware (or `record_key`, in Python) sets it; the engine's hook reads it when the
engine takes the request. It follows the request through tasks and `contextvars` copies, and does
not reach threads that copy no context.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field

from recorder_core.errors import InvalidKeyError, SignatureError
from recorder_core.exchange import Exchange
from recorder_core.keys import RecordKey, is_signed, verify

MAX_ATTEMPT = 100
"""The highest retry count believed; a client may send any number."""
# Characters of a malformed key, and of each of its parts, that a log line shows.
_HINT, _PART = 60, 8


# Not frozen: one is made on the event loop for each request, in a third of the time.
@dataclass(slots=True)
class Identity:
    """Whom a generation is recorded for, or why it is not."""

    key: RecordKey | None
    reason: str = ""
    """Why there is no key: `missing`, `not_a_key`, `malformed`, `ambiguous` or `skipped`; where
    keys are to be signed, `unsigned`, `expired` or `forged`; where they are not, `unverifiable`."""
    attempt: int = 0
    """How often the client sent this request before, by its own count."""
    exchange: Exchange | None = field(default=None, compare=False)
    """The HTTP request that is being served, if it is one."""
    detail: str = field(default="", compare=False)
    """The reason in words that may be logged; empty where it is on purpose."""


MISSING = Identity(None, "missing", detail="no record key came with it")
# An ordinary API key: `EMPTY`, `sk-...`.
NOT_A_KEY = Identity(None, "not_a_key", detail="its API key is no record key")
AMBIGUOUS = Identity(None, "ambiguous", detail="a header that may hold its key was there twice")
UNVERIFIABLE = Identity(
    None,
    "unverifiable",
    detail="its key is signed, and this server was started without --recording-secret",
)
SKIPPED = Identity(None, "skipped")

# A run's every request names it.
_parse = functools.lru_cache(maxsize=4096)(RecordKey.parse)
_current: ContextVar[Identity | None] = ContextVar("recorder_identity", default=None)


def current_identity() -> Identity | None:
    """The identity in force here, or None where nothing has set one."""
    return _current.get()


def set_identity(identity: Identity) -> Token[Identity | None]:
    """Put an identity in force; give the token to `reset_identity` afterwards."""
    return _current.set(identity)


def reset_identity(token: Token[Identity | None]) -> None:
    """Take back what `set_identity` did."""
    _current.reset(token)


def identify(text: str | None, attempt: int = 0, secret: str | None = None) -> Identity:
    """The identity that a credential stands for; a text that is no record key is no error.

    Args:
        text: A bearer token or the like.
        attempt: The client's own retry count.
        secret: What keys have to be signed with; None: they are not signed.
    """
    if not text:
        return MISSING
    if "/" not in text:
        return NOT_A_KEY
    if secret is None and is_signed(text):
        return UNVERIFIABLE
    try:
        key = _parse(text) if secret is None else verify(text, secret)
    except SignatureError as error:
        return Identity(None, error.reason, detail=f"{error} ({_hinted(text)})")
    except InvalidKeyError:
        return Identity(None, "malformed", detail=f"{_hinted(text)} is no record key")
    return Identity(key, attempt=min(max(attempt, 0), MAX_ATTEMPT))


def _hinted(text: str) -> str:
    """So much of a text that its sender knows it, and so little that no secret is told."""
    parts = text[:_HINT].split("/")
    shortened = [part if len(part) <= _PART else f"{part[: _PART // 2]}..." for part in parts]
    return ascii("/".join(shortened) + "..." * (len(text) > _HINT))


@contextmanager
def record_key(key: RecordKey | str) -> Iterator[RecordKey]:
    """Record the generations started in this block under a key.

    Raises:
        InvalidKeyError: The text is no record key.

    Example:
        >>> with record_key("0/task-7/1"):
        ...     outputs = llm.generate(prompts)  # doctest: +SKIP
    """
    parsed = key if isinstance(key, RecordKey) else RecordKey.parse(key)
    token = set_identity(Identity(parsed))
    try:
        yield parsed
    finally:
        reset_identity(token)


@contextmanager
def skip_recording() -> Iterator[None]:
    """Do not record the generations started in this block: a judge's, a summarizer's."""
    token = set_identity(SKIPPED)
    try:
        yield
    finally:
        reset_identity(token)
