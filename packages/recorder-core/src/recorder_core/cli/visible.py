"""Text of models and servers, such that no terminal obeys it."""

from __future__ import annotations

import unicodedata

# Joiners inside emoji and of several scripts: they only change how their neighbours look.
_HARMLESS = "\u200c\u200d"
_CONTROL_PICTURES = 0x2400


def visible(text: str, *, lines: bool = False) -> str:
    r"""The text, with everything that moves a cursor or turns the reading direction as a sign.

    A control character is its picture (ESC is ␛), any other that has no shape of its own is its
    number: `<U+202E>` reverses what follows it.

    Args:
        text: Of anybody.
        lines: Keep newlines and tabs, for text that is shown as a block.

    Example:
        >>> visible("\x1b[2J")
        '␛[2J'
    """
    if text.isprintable():
        return text
    kept = _HARMLESS + ("\n\t" if lines else "")
    return "".join(each if each in kept else _shown(each) for each in text)


def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    code = ord(character)
    if code < 0x20:
        return chr(_CONTROL_PICTURES + code)
    return "␡" if code == 0x7F else f"<U+{code:04X}>"
