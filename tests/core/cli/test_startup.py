"""How soon the command answers, and what it needs for that."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata

import pytest

from recorder_core.cli.arguments import FORMATS, parser
from recorder_core.cli.writers import WRITERS

PROGRAM = """
import sys
from importlib import metadata
from recorder_core.cli import main
code = main(sys.argv[1:])
print(int(code), *sorted({name.split(".")[0] for name in sys.modules}), file=sys.stderr)
"""
SLOW = {"asyncio", "fastapi", "httpx", "msgspec", "numpy", "pyarrow", "pydantic", "rich", "torch"}


@pytest.mark.parametrize("argv", [["--help"], ["drain", "--help"], ["rm", "a//b"]])
def test_help_and_wrong_usage_import_nothing_that_takes_time(argv):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *argv], capture_output=True, text=True, check=True
    )
    code, *modules = done.stderr.splitlines()[-1].split()
    assert code == ("0" if "--help" in argv else "2")
    assert "recorder_core" in modules
    assert not SLOW & set(modules)


def test_help_names_every_subcommand_and_the_exit_codes(recorder):
    ended = recorder("--help")
    assert (ended.code, ended.err) == (0, "")
    for name in [
        "ls",
        "stats",
        "tail",
        "show",
        "drain",
        "export",
        "view",
        "reward",
        "version",
        "rm",
        "block",
    ]:
        assert f"\n    {name} " in ended.out
    assert "4 not authorised" in ended.out


def test_the_version_is_the_packages(recorder):
    ended = recorder("--version")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"recorder-core {metadata.version('recorder-core')}\n"


def test_the_formats_that_are_named_are_those_that_are_written():
    assert set(FORMATS) == {*WRITERS, "parquet"}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_shell_completes_the_command(recorder, shell):
    pytest.importorskip("shtab")
    ended = recorder("--print-completion", shell)
    assert (ended.code, ended.err) == (0, "")
    assert "--min-lp" in ended.out
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=ended.out, text=True, check=True)


def test_bash_completes_subcommands_and_files(recorder, tmp_path):
    pytest.importorskip("shtab")
    (tmp_path / "batch-0.rec").touch()
    (tmp_path / "completion").write_text(recorder("--print-completion", "bash").out)
    script = """
    source ./completion
    complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_recorder; }
    complete_words recorder ex; echo "${COMPREPLY[@]}"
    complete_words recorder ls batch; echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["export", "batch-0.rec"]


def test_every_option_has_its_help():
    for name, command in parser()._subparsers._group_actions[0].choices.items():
        for action in command._actions:
            assert action.help, (name, action)
