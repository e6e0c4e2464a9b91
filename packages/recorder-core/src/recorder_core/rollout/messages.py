"""Text about what went wrong: short, and fit for a terminal, a log and JSON."""

from __future__ import annotations

import unicodedata

_ERROR_LENGTH = 400


def printable(text: str, limit: int) -> str:
    """Text that any terminal, log or JSON can hold: at most `limit` characters, and a mark.

    Control characters but line breaks and tabs, and halves of surrogate pairs (as in the names of
    files that are no UTF-8), become escapes.
    """
    shown = "".join(_shown(character) for character in text[:limit])
    return shown if len(text) <= limit >= len(shown) else shown[:limit] + " …"


def described(error: BaseException) -> str:
    """An error's kind and what it says; also where its own class cannot say it."""
    try:
        said = str(error)
    except BaseException as fault:  # noqa: BLE001 - whatever a foreign class does
        said = f"(its message cannot be shown: {type(fault).__name__})"
    return f"{type(error).__name__}: {printable(said, _ERROR_LENGTH)}"


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs"):
        return character
    return character.encode("unicode_escape").decode()
