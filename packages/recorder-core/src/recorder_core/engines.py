"""What every engine package checks at start, and what engines without version spans have in common.

Needs the extra `recorder-core[server]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

from recorder_core.errors import UnsupportedEngineError
from recorder_core.records import VersionSpan


@dataclass(frozen=True)
class EngineSupport:
    """Which releases of an engine a package records."""

    engine: str
    """The engine's name, e.g. `vLLM`."""
    package: str
    """The package that records it, e.g. `vllm-recorder`."""
    oldest: Version
    newest: Version
    """The first release that is not supported."""

    def check_version(self, text: str) -> Version:
        """The engine's version.

        Raises:
            UnsupportedEngineError: It is outside the supported range.
        """
        try:
            version = Version(Version(text).base_version)
        except InvalidVersion:
            raise UnsupportedEngineError(
                f"{self.engine} calls its version {text!r}, which is none"
            ) from None
        if not self.oldest <= version < self.newest:
            raise UnsupportedEngineError(
                f"{self.engine} {text} cannot be recorded: this {self.package} supports "
                f">={self.oldest}, <{self.newest}. Install a {self.engine} in that range, or a "
                f"{self.package} for yours."
            )
        return version

    def check_parameters(self, owner: Any, name: str, expected: Sequence[str]) -> None:
        """Check that a class or object has a method, and the names of its first parameters.

        Raises:
            UnsupportedEngineError: It is missing, or takes others.
        """
        where = f"{owner.__name__ if isinstance(owner, type) else type(owner).__name__}.{name}"
        function = getattr(owner, name, None)
        if function is None:
            found = "is missing"
        else:
            parameters = list(inspect.signature(function).parameters)[: len(expected)]
            if parameters == list(expected):
                return
            found = f"takes {parameters}, expected {list(expected)}"
        raise UnsupportedEngineError(
            f"{self.engine}'s {where} {found}: this build of {self.engine} differs from the "
            f"release that {self.package} was made for. Install a released {self.engine} "
            f">={self.oldest}, <{self.newest}"
        )

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """At the command line the message is the answer, not a traceback."""
        try:
            yield
        except UnsupportedEngineError as error:
            raise SystemExit(f"{self.engine.lower()}: error: {error}") from None


class Gives(NamedTuple):
    """What a range of an engine's versions gives beyond what all give: a row of a table."""

    versions: str
    weight_versions: str
    routed_experts: str

    def row(self, engine: str) -> str:
        """The row, in Markdown."""
        return f"| {engine} {self.versions} | {self.weight_versions} | {self.routed_experts} |"


def refuse(refusals: Mapping[str, object]) -> None:
    """Refuse the first of the ways of serving that applies.

    Args:
        refusals: What is wrong, with the way out → whether it applies.

    Raises:
        UnsupportedEngineError: One applies.
    """
    for message, applies in refusals.items():
        if applies:
            raise UnsupportedEngineError(f"--enable-recording: {message}")


class VersionLabels:
    """The weight labels in force while one generation ran, where the engine reports no spans.

    Args:
        label: The label when the generation began; empty if there is none.
    """

    __slots__ = ("_labels",)

    def __init__(self, label: str) -> None:
        # (label, first output token); the empty label where it is not known.
        self._labels: list[tuple[str, int]] = [(label, 0)]

    def change(self, label: str, position: int) -> None:
        """Another label is in force from the output token `position` on."""
        self._labels.append((label, position))

    def spans(self, count: int) -> tuple[tuple[VersionSpan, ...], tuple[str, ...]]:
        """The spans over `count` output tokens, and a flag if a boundary lies within them.

        The label changed on the API server's side; tokens then in flight may have been sampled
        before.
        """
        starts = [*(min(start, count) for _, start in self._labels), count]
        found = tuple(
            VersionSpan(start, end, label)
            for (label, start), end in zip(self._labels, starts[1:], strict=True)
            if label and start < end
        )
        changed = any(start < count for start in starts[1:])
        return found, ("version_boundary_approximate",) if changed else ()
