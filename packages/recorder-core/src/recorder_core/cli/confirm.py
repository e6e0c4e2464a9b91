"""Asks before something that cannot be taken back."""

from __future__ import annotations

import sys

from recorder_core.cli.exits import CommandError, Exit


def ask(question: str, *, yes: bool) -> None:
    """Ask whoever sits at the terminal.

    Args:
        question: What is to be done, with a question mark.
        yes: Whether the answer is given already.

    Raises:
        CommandError: The answer is not yes, or nobody can be asked.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError(f"{question} Nobody can be asked here: --yes does it", Exit.USAGE)
    sys.stderr.write(f"recorder: {question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("nothing was changed")
