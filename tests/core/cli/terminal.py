"""Terminals, as the command finds them: pseudo-terminals of a given size."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from contextlib import contextmanager
from pathlib import Path

STYLES = re.compile(r"\x1b\[(?:0|1|[34][0-9])?m")


def result(text):
    """What stays on the terminal of all that was written: styles and progress taken out."""
    return STYLES.sub("", text.rpartition("\x1b[2K")[2])


# Importing takes most of the time that the command does: one process has done it, and forks.
PROGRAM = """
import json, os, sys
from recorder_core.cli import commands, main
from recorder_core.cli.commands import block, drain, export, ls, rm, show, stats, tail
import rich.status, rich.table
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        os.setsid()
        terminal = os.open(asked["terminal"], os.O_RDWR)
        for descriptor in range(3):
            os.dup2(terminal, descriptor)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["folder"])
        code = main(asked["argv"])
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def terminals():
    """Gives a function that runs the command on a terminal of its own.

    It returns the exit code, and all that was written to the terminal.
    """
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def run(*argv, typed="", width=100, **environment):
            ours, theirs = pty.openpty()
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
            asked = {
                "argv": argv,
                "terminal": os.ttyname(theirs),
                "environment": {**os.environ, "TERM": "xterm", **environment},
                "folder": str(Path.cwd()),
            }
            os.write(ours, typed.encode())
            print(json.dumps(asked), file=process.stdin, flush=True)
            written, code = bytearray(), None
            while True:
                ended = code is not None  # then only what is left is read
                waiting = [ours] if ended else [ours, process.stdout]
                ready, _, _ = select.select(waiting, [], [], 0 if ended else None)
                if ours in ready:
                    written += os.read(ours, 65_536)
                elif process.stdout in ready:
                    code = int(process.stdout.readline())
                else:
                    break
            os.close(theirs)
            os.close(ours)
            return code, written.decode().replace("\r\n", "\n")

        yield run
        process.stdin.close()
