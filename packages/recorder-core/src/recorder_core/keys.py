"""Record keys: the identity of a run, written `<batch>/<task>/<run>`.

This is the one place that knows the format. A key is an identity, not a right: whoever holds it
may generate under it, and nothing more. Signed, it is a right to that, for a time, and only who
knows the secret can make one: `<batch>/<task>/<run>~<expiry>.<signature>`.
"""

from __future__ import annotations

import base64
import hmac
import math
import re
import time
from typing import TYPE_CHECKING, Any

from recorder_core.errors import InvalidKeyError, SignatureError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

MAX_KEY_LENGTH = 512
"""Characters in a key. Longer ones are refused, so that a key can never be used to fill memory."""

# Visible ASCII: what an HTTP header carries unchanged and a log line shows unambiguously.
_COMPONENT = re.compile(r"[!-.0-~]+")
_KEY = re.compile(r"(?:[!-.0-~]+/){2,}[!-.0-~]+")
MIN_SECRET_LENGTH = 32
"""Characters in a secret. Whoever is given a signed key can try shorter ones at leisure."""

# A run's name may hold a tilde: the last one counts. 22 characters are 128 of the 256 bits.
_SIGNED = re.compile(
    r"(?P<key>.+)~(?P<expiry>0|[1-9][0-9]{0,11})\.(?P<signature>[\w-]{22})", re.ASCII
)
# What is signed begins so: no signature of anything else under the secret is one of a key.
_PURPOSE = b"recorder key 1\0"
_SIGNATURE_BYTES = 16

_MAX_DIGITS = 18


def read_run(text: str) -> int | str:
    """A run as its key says it: a number where it is one (below 10**18), else a name."""
    return int(text) if _is_number(text) else text


def _is_number(text: str) -> bool:
    # Canonical decimal only: "7" is the number 7, "07" is another run, which has a name.
    plain = text.isdigit() and text.isascii() and len(text) <= _MAX_DIGITS
    return plain and (text[0] != "0" or text == "0")


def _components(text: str, what: str) -> tuple[str, ...]:
    if len(text) > MAX_KEY_LENGTH:
        raise InvalidKeyError(f"{what} has {len(text)} characters, at most {MAX_KEY_LENGTH} are")
    parts = tuple(text.split("/"))
    for part in parts:
        if part in (".", "..") or not _COMPONENT.fullmatch(part):
            raise InvalidKeyError(
                f"{what} {text!r} has the component {part!r}; components are visible ASCII, "
                "not empty, and neither '.' nor '..'"
            )
    return parts


class RecordKey:
    """The identity of one run: hashable, immutable, equal by value.

    The last component is the run (a number, or a name such as a UUID), the one before it the task,
    all before that the batch, which may itself hold slashes.

    Args:
        batch: One or more components, e.g. `"12"` or `"0/eval_short"`.
        task: One component.
        run: The run's number, 0 or more, or its name: one component.

    Raises:
        InvalidKeyError: A part does not fit the format.

    Example:
        >>> RecordKey.parse("0/eval_short/1/0")
        RecordKey('0/eval_short/1/0')
        >>> RecordKey.parse("0/eval_short/1/0").batch
        '0/eval_short'
        >>> RecordKey.parse("0/eval_short/1/3f2a51c0").run
        '3f2a51c0'
    """

    # Not a pydantic model: keys are hashed and compared on the engine's event loop. The text alone,
    # which knows its own hash: a store holds a key for each run.
    __slots__ = ("text",)

    text: str
    """The key as it is written."""

    def __init__(self, batch: str, task: str, run: int | str) -> None:
        written = f"{run}"
        if not isinstance(run, str) and not _is_number(written):
            raise InvalidKeyError(f"run {run!r} must be an integer from 0 to 10**18 - 1, or a text")
        parsed = RecordKey.parse(f"{batch}/{task}/{written}")
        if parsed.parts[-2:] != (task, written):
            raise InvalidKeyError(
                f"task {task!r} and run {run!r} must be one component each, without '/'"
            )
        self.text = parsed.text

    @staticmethod
    def parse(text: str) -> RecordKey:
        """Read a key from its text.

        Raises:
            InvalidKeyError: The text is no record key; the message says what is wrong with it.
        """
        plain = len(text) <= MAX_KEY_LENGTH and text[0:1] != "." and "/." not in text
        if not (plain and _KEY.fullmatch(text)):
            parts = _components(text, "record key")  # says what is wrong, if anything is
            if len(parts) < 3:
                raise InvalidKeyError(
                    f"record key {text!r} has {len(parts)} component(s), at least three are "
                    "needed: <batch>/<task>/<run>"
                )
        key = RecordKey.__new__(RecordKey)
        key.text = text
        return key

    @property
    def parts(self) -> tuple[str, ...]:
        """All components, the batch's first."""
        return tuple(self.text.split("/"))

    @property
    def batch(self) -> str:
        """Everything before the task."""
        return self.text.rsplit("/", 2)[0]

    @property
    def task(self) -> str:
        """The task's id."""
        return self.text.rsplit("/", 2)[1]

    @property
    def run(self) -> int | str:
        """The run's number, or its name."""
        return read_run(self.text.rpartition("/")[2])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordKey) and self.text == other.text

    @property
    def order(self) -> tuple[Any, ...]:
        """What keys are sorted by: runs that are numbers by size, before those that are names."""
        *above, last = self.text.split("/")
        run = read_run(last)
        return above, isinstance(run, str), run

    def __lt__(self, other: RecordKey) -> bool:
        return self.order < other.order

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"RecordKey({self.text!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (RecordKey.parse, (self.text,))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """In models a key is validated from its text, and written as its text."""
        from pydantic_core import core_schema  # not before a model wants it

        def validate(value: Any) -> RecordKey:
            if isinstance(value, RecordKey):
                return value
            if not isinstance(value, str):
                raise InvalidKeyError(f"a record key is a text, not {type(value).__name__}")
            return RecordKey.parse(value)

        return core_schema.no_info_plain_validator_function(
            validate,
            json_schema_input_schema=core_schema.str_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(
                str, return_schema=core_schema.str_schema()
            ),
        )


class KeyPrefix:
    """Leading components of record keys; matches component by component.

    `KeyPrefix("1")` matches `1/a/0` and not `10/a/0`. The empty prefix matches every key, and a
    whole key matches itself.

    Args:
        text: Components separated by slashes. One trailing slash is allowed.

    Raises:
        InvalidKeyError: A component does not fit the format.
    """

    __slots__ = ("parts",)

    parts: tuple[str, ...]

    def __init__(self, text: str = "") -> None:
        trimmed = text.removesuffix("/") or text  # "/" alone is no way to say "everything"
        self.parts = _components(trimmed, "key prefix") if trimmed else ()

    def matches(self, key: RecordKey) -> bool:
        """Whether the key begins with these components."""
        return key.parts[: len(self.parts)] == self.parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyPrefix) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def __str__(self) -> str:
        return "/".join(self.parts)

    def __repr__(self) -> str:
        return f"KeyPrefix({str(self)!r})"


def check_secret(secret: str) -> str:
    """A secret that keys can be signed with.

    Raises:
        ValueError: It is too short.
    """
    if len(secret.strip()) < MIN_SECRET_LENGTH:
        raise ValueError(
            f"the secret has {len(secret.strip())} characters, at least {MIN_SECRET_LENGTH} are "
            "needed, as agents can try to guess it; make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return secret.strip()


def sign(key: RecordKey | str, secret: str, lifetime_s: float, *, now: float | None = None) -> str:
    """A key as an agent may be given it: recorded as this run, until its time is over.

    The signature is HMAC-SHA-256 (RFC 2104) over the key and its expiry, 128 bits of it in base64.

    Args:
        key: The run.
        secret: What the engine knows too.
        lifetime_s: Seconds for which generations may be started with it.
        now: Seconds since the epoch; None: the time.

    Returns:
        `<batch>/<task>/<run>~<expiry>.<signature>`: visible ASCII, to be sent as an API key or in
        `X-Record-Key`; the expiry in whole seconds since the epoch.

    Raises:
        InvalidKeyError: The text is no record key.
        ValueError: The secret is too short, or the lifetime is not positive.

    Example:
        >>> sign("0/task-7/1", "an example of a secret, which is no good", 60, now=0)
        '0/task-7/1~60.sPjrc_6BcZmaUWNLJydDKQ'
    """
    if not 0 < lifetime_s < 1e10:
        raise ValueError(f"lifetime_s is {lifetime_s}, it must be positive, and less than 10**10")
    text = key.text if isinstance(key, RecordKey) else RecordKey.parse(key).text
    expiry = math.ceil((time.time() if now is None else now) + lifetime_s)
    signed = f"{text}~{expiry}"
    return f"{signed}.{_signature(signed, check_secret(secret))}"


def verify(text: str, secret: str, *, now: float | None = None) -> RecordKey:
    """The run that a signed key stands for.

    Args:
        text: What somebody sent.
        secret: What `sign` was given.
        now: Seconds since the epoch; None: the time.

    Raises:
        SignatureError: The key is `unsigned`, `forged` or `expired`.
        InvalidKeyError: What is signed is no record key.
    """
    match = _SIGNED.fullmatch(text)
    if match is None:
        raise SignatureError("unsigned", "its key has no signature")
    signed = f"{match['key']}~{match['expiry']}"
    # The text, not the bits: another spelling of the same bits is refused.
    if not hmac.compare_digest(_signature(signed, secret), match["signature"]):
        raise SignatureError("forged", "the signature of its key is not made with this secret")
    if (time.time() if now is None else now) >= int(match["expiry"]):
        raise SignatureError("expired", "the time of its signed key is over")
    return RecordKey.parse(match["key"])


def is_signed(text: str) -> bool:
    """Whether a text has the form of a signed key, whoever signed it."""
    return "~" in text and _SIGNED.fullmatch(text) is not None


def _signature(signed: str, secret: str) -> str:
    digest = hmac.digest(
        secret.encode(), _PURPOSE + signed.encode("utf-8", "surrogatepass"), "sha256"
    )
    return base64.urlsafe_b64encode(digest[:_SIGNATURE_BYTES]).rstrip(b"=").decode()
