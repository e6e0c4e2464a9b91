"""The command `recorder`: look at rollouts, and take them, from a terminal or a script.

Needs the extra `recorder-core[cli]`. What a subcommand imports is imported when it runs: `--help`
and completion answer at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from recorder_core.cli.adminkey import AdminKey
from recorder_core.cli.arguments import parser
from recorder_core.cli.exits import Exit, command_error
from recorder_core.cli.streams import hush, prepare, say

__all__ = ["main", "run"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command as a process of its own; returns its exit code."""
    code = run(argv)
    if code == Exit.INTERRUPTED:
        # Threads that still wait for a server would be waited for.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    Args:
        argv: The arguments, without the command's own name; by default the process's.
    """
    key_from: str | None = None
    try:
        prepare(sys.stdout, sys.stderr)
        args = parser().parse_args(argv)
        command = importlib.import_module(f"{__name__}.commands.{args.command}")
        key_from = AdminKey.of(args).origin
        code: int = command.run(args)
        sys.stdout.flush()
    except SystemExit as end:  # argparse's, which has said what it had to
        return end.code if isinstance(end.code, int) else Exit.USAGE
    except KeyboardInterrupt as interrupted:
        say(str(interrupted) or "interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read it, such as `head`, has enough.
        hush(sys.stdout)
        return Exit.DONE
    except Exception as error:
        told = command_error(error, key_from=key_from)
        if told is None:
            raise
        say(str(told))
        return told.code
    return code
