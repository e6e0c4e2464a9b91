"""Completion in the shell, by shtab."""

from __future__ import annotations

import argparse
import sys
from typing import Any

_FILES = {"FILE", "DIR"}


class PrintCompletion(argparse.Action):
    """Prints a script that completes the command, and ends it.

    For bash: `eval "$(recorder --print-completion bash)"`.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print it."""
        import shtab  # of the extra, and wanted here alone

        complete_files(parser, shtab.FILE)
        sys.stdout.write(shtab.complete(parser, values) + "\n")
        parser.exit()


def complete_files(parser: argparse.ArgumentParser, how: Any) -> None:
    """Complete the names of files wherever the command takes one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                complete_files(each, how)
        elif isinstance(action.metavar, str) and not _FILES.isdisjoint(action.metavar.split("|")):
            action.complete = how  # type: ignore[attr-defined]
