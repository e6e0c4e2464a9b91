"""Runs `vllm` command lines as forks of one process: importing vLLM anew takes ten seconds each."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import MagicMock

from examples.vllm_server import ENVIRONMENT

TIME_LIMIT_S = 180.0


@dataclass(frozen=True)
class Command:
    """One command line."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    """What vLLM calls its own version; its real one if empty."""
    without: str = ""
    """`module:Class.method` that this vLLM does not have."""
    stubs: Sequence[str] = ()
    """Modules that vLLM is to believe are installed."""
    understand: bool = False
    """End once the flags are read, and print what they said."""


@dataclass(frozen=True)
class Outcome:
    """What became of it."""

    status: int | None
    """Its exit status; None: it was still running when the time was up."""
    output: str
    """What it printed, errors included."""


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
    # The first one imports what `vllm` needs; it prints help, which is not wanted here.
    sys.argv = ["vllm", "serve", "--help=Recording"]
    with suppress(SystemExit), redirect_stdout(sys.stderr):
        _vllm()
    print(json.dumps([asdict(_run(command)) for command in commands]))


def _vllm() -> None:
    from vllm.entrypoints.cli.main import main

    main()


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
        _prepare(command)
        _vllm()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:  # noqa: BLE001 - printed, as the interpreter would
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _prepare(command: Command) -> None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    from recorder_core.options import RecordingOptions

    sys.argv = ["vllm", *command.argv]
    sys.modules.update({name: MagicMock() for name in command.stubs})
    if command.version:
        vllm.__version__ = command.version
    if command.without:
        module, _, path = command.without.partition(":")
        owner, name = path.split(".")
        delattr(getattr(importlib.import_module(module), owner), name)
    if command.understand:
        read = EngineArgs.from_cli_args.__func__

        def read_and_end(cls: type[Any], args: Any) -> None:
            read(cls, args)
            loaded = sorted(name for name in sys.modules if name.startswith("vllm_recorder"))
            print("understood", RecordingOptions.from_args(args), loaded)
            raise SystemExit(0)

        EngineArgs.from_cli_args = classmethod(read_and_end)


if __name__ == "__main__":
    _main()
