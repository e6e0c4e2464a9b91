"""Numbers as people read them, and as programs do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def counted(number: int, thing: str = "") -> str:
    """A count, and of what: `1,204 records`, `1 record`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}" if thing else f"{number:,}"


def size(count: float) -> str:
    """Bytes, in the largest unit of which there is one."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def duration(seconds: float) -> str:
    """A length of time, in its two largest units: `9 min 40 s`."""
    whole = max(round(seconds), 0)
    for unit, name, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {name}" + (f" {rest} {small}" if rest else "")
    minutes, rest = divmod(whole, 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min" + (f" {rest} s" if rest else "")


def pairs(counts: Mapping[str, Any]) -> str:
    """Names and values in one word: `error=1,lost=2`."""
    return ",".join(f"{name}={value}" for name, value in counts.items())


def plain(value: Any) -> str:
    """A value of a table for a program: nothing is rounded, and nothing is grouped."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return pairs(value)
    return str(value)


def shown(value: Any) -> str:
    """A value of a table for people."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int):
        return counted(value)
    return f"{value:.4g}" if isinstance(value, float) else plain(value)
