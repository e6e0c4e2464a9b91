"""Ways of serving that cannot be recorded, refused before an engine starts."""

from __future__ import annotations

from collections.abc import Mapping

from recorder_core.errors import UnsupportedEngineError


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
