"""Which releases of an engine a package records, and what it checks of one at start.

Needs the extra `recorder-core[server]`.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

from recorder_core.errors import UnsupportedEngineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSupport:
    """Which releases of an engine a package records.

    Newer ones than were tested are recorded too, as far as the package's checks at start go, so
    that an engine can be upgraded before its recorder is.
    """

    engine: str
    """The engine's name, e.g. `vLLM`."""
    package: str
    """The package that records it, e.g. `vllm-recorder`."""
    oldest: Version
    newest_tested: Version
    broken: Mapping[str, str] = field(default_factory=dict)
    """Releases that are known not to work → what goes wrong there."""

    @property
    def tested(self) -> str:
        """The range that is tested, for messages."""
        return f"{self.oldest} to {self.newest_tested}"

    def check_version(self, text: str) -> Version:
        """The engine's version; that it is newer than the newest tested is said once.

        Raises:
            UnsupportedEngineError: It is older than the oldest, or known to be broken.
        """
        try:
            version = Version(Version(text).base_version)
        except InvalidVersion:
            raise UnsupportedEngineError(
                f"{self.engine} calls its version {text!r}, which is none"
            ) from None
        if version < self.oldest:
            raise UnsupportedEngineError(
                f"{self.engine} {text} cannot be recorded: this {self.package} wants {self.oldest} "
                f"or newer. Install {self.engine} {self.tested}, or a {self.package} for "
                "yours."
            )
        fault = self.broken.get(str(version))
        if fault is not None:
            raise UnsupportedEngineError(
                f"{self.engine} {text} cannot be recorded: {fault}. Install another release of "
                f"{self.tested}."
            )
        if not self.is_tested(version):
            _say_untested(self.engine, text, self.package, self.tested)
        return version

    def is_tested(self, version: Version) -> bool:
        """Whether a version that `check_version` gave is no newer than the newest tested."""
        return version <= self.newest_tested

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
            f"{self.engine}'s {where} {found}: another package has patched it, or this build of "
            f"{self.engine} differs from the releases that {self.package} was made for. Install a "
            f"released {self.engine}, {self.tested}"
        )

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """At the command line the message is the answer, not a traceback."""
        try:
            yield
        except UnsupportedEngineError as error:
            raise SystemExit(f"{self.engine.lower()}: error: {error}") from None


@functools.cache
def _say_untested(engine: str, version: str, package: str, tested: str) -> None:
    # Cached: packages check more than once in a process.
    logger.warning(
        "%s %s is newer than this %s is tested with (%s): it starts if what is checked at start is "
        "as expected",
        *[engine, version, package, tested],
    )


class Gives(NamedTuple):
    """What a range of an engine's versions gives beyond what all give: a row of a table."""

    versions: str
    weight_versions: str
    routed_experts: str

    def row(self, engine: str) -> str:
        """The row, in Markdown."""
        return f"| {engine} {self.versions} | {self.weight_versions} | {self.routed_experts} |"
