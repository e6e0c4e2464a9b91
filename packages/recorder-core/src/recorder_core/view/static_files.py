"""The files of the page: constant bytes, without data."""

from __future__ import annotations

import functools
from importlib import resources


@functools.cache
def static_files() -> dict[str, bytes]:
    """The page's files, by name."""
    folder = resources.files("recorder_core.view") / "static"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
