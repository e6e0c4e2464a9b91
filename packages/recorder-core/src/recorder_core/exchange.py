"""One keyed HTTP request and its reply, as the server's middleware sees them.

The middleware makes an `Exchange`, the engine's hook hands it on with every generation that the
request caused, and the recorder reads it when it builds the record, off the event loop.
"""

from __future__ import annotations

import json
from typing import Any


class Exchange:
    """What the server knows of a request beyond what its engine does."""

    __slots__ = ("_body", "_model", "delivered", "trace")

    def __init__(self) -> None:
        self.delivered: bool | None = None
        """Whether the reply was sent to its end; None while it is not decided, or not known."""
        self.trace: dict[str, str] = {}
        """The trace that the request belongs to; see `recorder_core.tracing`."""
        self._body: list[bytes] = []
        self._model: str | None = None

    def take(self, chunk: bytes) -> None:
        """Keep a piece of the request's body until `model` is asked for."""
        self._body.append(chunk)

    @property
    def model(self) -> str | None:
        """The model that the request named; None if it named none."""
        if self._body:
            body, self._body = b"".join(self._body), []
            self._model = _model(body)
        return self._model


def _model(body: bytes) -> str | None:
    try:
        request: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None  # what is no JSON names no model
    name = request.get("model") if isinstance(request, dict) else None
    return name if isinstance(name, str) else None
