"""What most runs and records have of notes: one empty dictionary for all of them."""

from __future__ import annotations

from typing import Any, NoReturn


class _Nothing(dict[str, Any]):
    """An empty dictionary that stays empty."""

    __slots__ = ()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("these notes are read only: write them with `update_reward(info=...)`")

    __setitem__ = update = setdefault = __ior__ = _refuse

    def __reduce__(self) -> str:
        return "NOTHING"  # wherever it is sent, it is that one


NOTHING = _Nothing()
"""Takes the place of a dictionary of its own, which holds 64 bytes."""
