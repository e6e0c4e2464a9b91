"""Imported by SGLang 0.5.11."""

from __future__ import annotations

from typing import Any

from sgl_kernel import absent


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return absent(name)
