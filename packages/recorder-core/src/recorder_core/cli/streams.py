"""The standard streams: what the command says, and how they end."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from recorder_core.cli.visible import visible


def prepare(*streams: TextIO) -> None:
    """Let no character that a stream's encoding lacks end the command."""
    for each in streams:
        if isinstance(each, io.TextIOWrapper):
            each.reconfigure(errors="backslashreplace")


def say(message: str) -> None:
    """Tell people something, beside the data: one line."""
    sys.stderr.write(f"recorder: {visible(message)}\n")
    sys.stderr.flush()


def hush(stream: TextIO) -> None:
    """Give what is left in a stream that nobody reads any more to nobody."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
