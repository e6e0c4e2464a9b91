"""Warnings about what may happen many times a second."""

from __future__ import annotations

import logging
import time


class Throttle:
    """Logs one kind of message at most once in a while, and says how many it held back.

    Args:
        logger: Where to log.
        interval: Seconds between two messages.
    """

    def __init__(self, logger: logging.Logger, interval: float = 60.0) -> None:
        self._logger = logger
        self._interval = interval
        self._next = float("-inf")
        self._held_back = 0

    def warning(self, message: str, *args: object, exc_info: bool = False) -> None:
        """Log the message, or count it as held back."""
        now = time.monotonic()
        if now < self._next:
            self._held_back += 1
            return
        if self._held_back:
            message += f" ({self._held_back} more since the last such message)"
        self._next, self._held_back = now + self._interval, 0
        self._logger.warning(message, *args, exc_info=exc_info)
