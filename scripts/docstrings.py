"""Tells the manual's reference of our docstrings: `Example:` begins code, as `Examples:` does."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Google's style has both words; griffe reads doctests only under the plural."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("Example:\n", "Examples:\n")
