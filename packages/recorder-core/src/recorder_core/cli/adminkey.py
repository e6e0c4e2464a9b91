"""The admin key: where it comes from, so that errors can name the place and never the key."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path

from recorder_core.cli.exits import CommandError, Exit
from recorder_core.environment import ADMIN_KEY_VARIABLE


@dataclass(frozen=True)
class AdminKey:
    """The key, and where it was found."""

    text: str = field(default="", repr=False)
    """Empty where there is none."""
    origin: str | None = None
    """A file, or the environment variable; None where there is no key."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> AdminKey:
        """The key that the command line or the environment gives.

        Raises:
            CommandError: The file cannot be read, or is empty.
        """
        path: Path | None = getattr(args, "admin_key_file", None)
        if path is None:
            key = os.environ.get(ADMIN_KEY_VARIABLE, "").strip()
            return cls(key, ADMIN_KEY_VARIABLE) if key else cls()
        try:
            key = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise CommandError(
                f"the admin key in {path} cannot be read ({why})", Exit.USAGE
            ) from None
        if not key:
            raise CommandError(f"{path} is empty; it should hold the admin key", Exit.USAGE)
        return cls(key, str(path))
