"""The recording identity of the request in flight.

A server's middleware (or `record_key`, in Python) sets it; the engine's hook reads it when the
engine takes the request. It follows the request through tasks and `contextvars` copies, and does
not reach threads that copy no context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass

from recorder_core.errors import InvalidKeyError
from recorder_core.keys import RecordKey

MAX_ATTEMPT = 100
"""The highest retry count believed; a client may send any number."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a generation is recorded for, or why it is not."""

    key: RecordKey | None
    reason: str = ""
    """Why there is no key: `missing`, `not_a_key`, `malformed` or `skipped`."""
    attempt: int = 0
    """How often the client sent this request before, by its own count."""


MISSING = Identity(None, "missing")
SKIPPED = Identity(None, "skipped")

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


def identify(text: str | None, attempt: int = 0) -> Identity:
    """The identity that a credential stands for; a text that is no record key is no error.

    Args:
        text: A bearer token or the like.
        attempt: The client's own retry count.
    """
    if not text:
        return MISSING
    if "/" not in text:
        # An ordinary API key: `EMPTY`, `sk-...`.
        return Identity(None, "not_a_key")
    try:
        key = RecordKey.parse(text)
    except InvalidKeyError:
        return Identity(None, "malformed")
    return Identity(key, attempt=min(max(attempt, 0), MAX_ATTEMPT))


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
