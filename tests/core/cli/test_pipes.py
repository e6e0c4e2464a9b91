"""The command among others in a pipe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.core.cli.given import add, fill, key

COMMAND = f"{sys.executable} -m recorder_core.cli"


def shell(script):
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("argv", ["ls 0", "export 0"])
def test_a_reader_that_has_enough_ends_it_quietly(server, argv):
    add(server, 5_000, tokens=5)
    done = shell(f"{COMMAND} {argv} | head -n 1; echo ${{PIPESTATUS[0]}}")
    assert done.stderr == ""
    first, code = done.stdout.splitlines()
    assert code == "0"
    assert first


def test_a_reader_that_reads_nothing_ends_it_quietly(server):
    fill(server)
    done = shell(f"{COMMAND} ls | true; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_characters_that_the_output_lacks_end_nothing(server):
    server.submit(key("0/task/0"), [1], [2], response_text="日本")
    server.recorder.flush()
    done = subprocess.run(
        f"{COMMAND} show 0/task/0 --text",
        shell=True,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u65e5\u672c" in done.stdout


def test_nobody_is_asked_in_a_script(recorder, server):
    fill(server)
    for command, text in (
        ("rm", "delete 5 runs, 7 records under 0?"),
        ("block", "refuse all that is generated under 0 from now on"),
    ):
        ended = recorder(command, "0")
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith(f"recorder: {text}")
        assert ended.err.endswith("Nobody can be asked here: --yes does it\n")
    stats = server.store.stats()
    assert (stats.records, stats.blocked_prefixes) == (7, 0)
