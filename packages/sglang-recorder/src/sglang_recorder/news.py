"""What befalls an engine's weights, as its tokenizer workers tell each other.

It imports nothing of SGLang: the recorder process, which passes it on, would import it too.
"""

from __future__ import annotations

from typing import NamedTuple


class Paused(NamedTuple):
    """Generation is paused, or goes on with the empty mode."""

    mode: str


class Changing(NamedTuple):
    """New weights are about to be put in place."""

    flushes_cache: bool


class Changed(NamedTuple):
    """New weights are in place, or have another label."""

    label: str | None
    """What the engine was told with them; None if nothing."""
    adapter: str | None = None
    """The adapter that they are; None for the model."""


class Flushed(NamedTuple):
    """No KV cache of earlier weights is left."""


News = Paused | Changing | Changed | Flushed
"""Something that befalls the weights."""
