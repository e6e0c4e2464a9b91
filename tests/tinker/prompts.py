"""Prompts of one length: the server compiles once for each length that it meets."""

from __future__ import annotations

from tinker import types

LENGTH = 16


def prompt_ids(seed: int = 0) -> list[int]:
    """The ids of a prompt; another one for each seed."""
    return [5 + (seed * 31 + position * 7) % 500 for position in range(LENGTH)]


def prompt(seed: int = 0) -> types.ModelInput:
    """A prompt of text; another one for each seed."""
    return types.ModelInput.from_ints(prompt_ids(seed))
