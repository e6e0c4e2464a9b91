"""Adapters that are one policy at several times: `policy-v1`, `policy-v2`."""

from __future__ import annotations

import re
from dataclasses import replace

from recorder_core.records import Turn, VersionSpan

_UNTOLD = "default"
"""How vLLM and SGLang label weights that nobody has named."""


class AdapterVersions:
    r"""Reads the version of a LoRA adapter in its name.

    Adapters whose names differ in nothing else share paths, as one adapter of several versions.

    Args:
        pattern: A regular expression, searched for in the name. What its group matches is the
            version, or the whole match where it has none; the name without the match is the
            adapter. So `[-]v(\d+)$` makes `policy-v2` the version 2 of `policy`.

    Raises:
        ValueError: It is no regular expression, has several groups, or matches the empty text.
    """

    def __init__(self, pattern: str) -> None:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        if compiled.groups > 1:
            raise ValueError(f"{pattern!r} has {compiled.groups} groups; one may say the version")
        if compiled.search(""):
            raise ValueError(f"{pattern!r} matches the empty text, so every name has a version")
        self._pattern = compiled

    def read(self, turn: Turn) -> Turn:
        """The turn, with the version that its adapter's name says.

        Tokens of unknown weights stay so; a label that somebody gave stays beside the version.
        """
        adapter, version = self.split(turn.adapter) if turn.adapter else (None, None)
        if version is None:
            return turn
        spans = [(start, end, _join(label, version)) for start, end, label in turn.versions]
        return replace(turn, adapter=adapter, versions=[VersionSpan(*span) for span in spans])

    def split(self, name: str) -> tuple[str, str | None]:
        """The adapter and its version; None where the name has none."""
        found = self._pattern.search(name)
        if found is None or not (version := found[found.re.groups]):
            return name, None
        adapter = name[: found.start()] + name[found.end() :]
        return (adapter, version) if adapter else (name, None)


def _join(label: str, version: str) -> str:
    if label == _UNTOLD or label.startswith(f"{_UNTOLD}+"):
        return version + label[len(_UNTOLD) :]
    return f"{label}/{version}"
