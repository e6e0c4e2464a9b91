"""Signals in processes that tests start."""

from __future__ import annotations

import signal


def as_usual() -> None:
    """For `preexec_fn`: signals end it, even where the tests were started to ignore them."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
