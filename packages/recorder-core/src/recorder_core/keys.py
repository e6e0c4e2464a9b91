"""Record keys: the identity of a run, written `<batch>/<task>/<run>`.

This is the one place that knows the format. A key is an identity, not a right: whoever holds it
may generate under it, and nothing more.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from recorder_core.errors import InvalidKeyError

MAX_KEY_LENGTH = 512
"""Characters in a key. Longer ones are refused, so that a key can never be used to fill memory."""

# Visible ASCII: what an HTTP header carries unchanged and a log line shows unambiguously.
_COMPONENT = re.compile(r"[!-.0-~]+")
# Canonical decimal only: "7" and "07" must not be two spellings of one run.
_RUN = re.compile(r"0|[1-9][0-9]{0,17}")


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

    The last component is the run (a non-negative integer), the one before it the task, all
    before that the batch, which may itself hold slashes.

    Args:
        batch: One or more components, e.g. `"12"` or `"0/eval_short"`.
        task: One component.
        run: The run's number, 0 or more.

    Raises:
        InvalidKeyError: A part does not fit the format.

    Example:
        >>> RecordKey.parse("0/eval_short/1/0")
        RecordKey('0/eval_short/1/0')
        >>> RecordKey.parse("0/eval_short/1/0").batch
        '0/eval_short'
    """

    # Not a pydantic model: keys are hashed and compared on the engine's event loop.
    __slots__ = ("_hash", "parts", "text")

    parts: tuple[str, ...]
    """All components, the batch's first."""
    text: str
    """The key as it is written."""
    _hash: int

    def __init__(self, batch: str, task: str, run: int) -> None:
        parsed = RecordKey.parse(f"{batch}/{task}/{run}")
        if parsed.task != task:
            raise InvalidKeyError(f"task {task!r} must be one component, without '/'")
        self.parts, self.text, self._hash = parsed.parts, parsed.text, parsed._hash

    @classmethod
    def parse(cls, text: str) -> RecordKey:
        """Read a key from its text.

        Raises:
            InvalidKeyError: The text is no record key; the message says what is wrong with it.
        """
        parts = _components(text, "record key")
        if len(parts) < 3:
            raise InvalidKeyError(
                f"record key {text!r} has {len(parts)} component(s), at least three are needed: "
                "<batch>/<task>/<run>"
            )
        if not _RUN.fullmatch(parts[-1]):
            raise InvalidKeyError(
                f"record key {text!r} ends in {parts[-1]!r}, the run must be a decimal number "
                "without sign or leading zeros"
            )
        key = cls.__new__(cls)
        key.parts, key.text, key._hash = parts, text, hash(parts)
        return key

    @property
    def batch(self) -> str:
        """Everything before the task."""
        return "/".join(self.parts[:-2])

    @property
    def task(self) -> str:
        """The task's id."""
        return self.parts[-2]

    @property
    def run(self) -> int:
        """The run's number."""
        return int(self.parts[-1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordKey) and self.parts == other.parts

    def __lt__(self, other: RecordKey) -> bool:
        return (self.parts[:-1], self.run) < (other.parts[:-1], other.run)

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"RecordKey({self.text!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (RecordKey.parse, (self.text,))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """In models a key is validated from its text, and written as its text."""

        def validate(value: Any) -> RecordKey:
            if isinstance(value, RecordKey):
                return value
            if not isinstance(value, str):
                raise InvalidKeyError(f"a record key is a text, not {type(value).__name__}")
            return cls.parse(value)

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
