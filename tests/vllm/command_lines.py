"""Runs `vllm` command lines in one process: importing vLLM takes ten seconds, a fork none.

    python -m tests.vllm.command_lines < cases.json

Reads a list of `{"argv", "env", "version", "options"}` and writes what became of each: its exit
status (None: it was still running when the time was up) and what it printed. `version` is what
vLLM then calls its own version; with `options` the process ends once the flags are understood,
and prints them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from examples.vllm_server import ENVIRONMENT

TIME_LIMIT_S = 60.0


@dataclass(frozen=True)
class Command:
    """One command line."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    options: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of it."""

    status: int | None
    output: str


def run_all(commands: Mapping[str, Command]) -> dict[str, Outcome]:
    """Run command lines, each in a process that has imported vLLM already."""
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps([asdict(command) for command in commands.values()]),
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    outcomes = (Outcome(**each) for each in json.loads(done.stdout.splitlines()[-1]))
    return dict(zip(commands, outcomes, strict=True))


def _main() -> None:
    commands = [Command(**each) for each in json.load(sys.stdin)]
    with tempfile.TemporaryFile() as ignored:
        # The first one imports what `vllm serve` needs.
        _fork_free_help(ignored.fileno())
    print(json.dumps([asdict(_run(command)) for command in commands]))


def _fork_free_help(output: int) -> None:
    from vllm.entrypoints.cli.main import main

    stdout = os.dup(1)
    os.dup2(output, 1)
    sys.argv = ["vllm", "serve", "--help=Recording"]
    with suppress(SystemExit):
        main()
    sys.stdout.flush()
    os.dup2(stdout, 1)


def _run(command: Command) -> Outcome:
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if not pid:
            os._exit(_child(command, output.fileno()))
        status = _wait(pid)
        output.seek(0)
        return Outcome(status, output.read().decode(errors="replace"))


def _wait(pid: int) -> int | None:
    deadline = time.monotonic() + TIME_LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _child(command: Command, output: int) -> int:
    """Be the command; returns its exit status as the interpreter would."""
    os.setsid()  # its own process group, so that its time limit reaches its children
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(command.env)
    status = 0
    try:
        _vllm(command)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _vllm(command: Command) -> None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli.main import main
    from vllm_recorder import plugin

    if command.version:
        vllm.__version__ = command.version
    if command.options:
        understand = EngineArgs.from_cli_args.__func__

        def and_end(cls: type[Any], args: Any) -> None:
            understand(cls, args)
            print("understood", plugin._options)
            raise SystemExit(0)

        EngineArgs.from_cli_args = classmethod(and_end)
    sys.argv = ["vllm", *command.argv]
    main()


if __name__ == "__main__":
    _main()
