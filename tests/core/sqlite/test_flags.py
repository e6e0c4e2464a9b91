"""`--recording-store`: what it takes, what it refuses, and what is said at the end."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recorder_core.options import RecordingOptions, add_arguments
from recorder_core.stores import MemoryStore
from recorder_core.stores.sqlite import SQLiteStore
from recorder_core.stores.testing import add, root
from tests.core.sqlite.files import rows


def options(*flags: str) -> RecordingOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return RecordingOptions.from_args(parser.parse_args(["--enable-recording", *flags]), {})


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///var/lib/a.db", "/var/lib/a.db"),
        ("sqlite:////var/lib/a.db", "/var/lib/a.db"),
        ("sqlite:///a%20b.db", "/a b.db"),
    ],
)
def test_a_store_is_named_by_its_url(url, path):
    assert options("--recording-store", url).store == Path(path)


def test_memory_is_the_default():
    assert options().store is None
    assert options("--recording-store", "memory").store is None


@pytest.mark.parametrize(
    "url",
    [
        "a.db",
        "/var/a.db",
        "sqlite://a.db",
        "sqlite://",
        "sqlite:///",
        "sqlite:///a/",
        "redis://x",
        "sqlite:///a.db?mode=ro",
    ],
)
def test_what_names_no_file_is_refused(url, capsys):
    with pytest.raises(SystemExit):
        options("--recording-store", url)
    assert "sqlite:///" in capsys.readouterr().err


def test_a_file_that_cannot_be_used_ends_the_start(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("step,reward\n" * 100)
    with pytest.raises(SystemExit, match=r"--recording-store: error: .* is no record store"):
        RecordingOptions(enabled=True, store=path).make_recorder()


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from recorder_core import RecordKey, Turn
from recorder_core.options import RecordingOptions

recorder = RecordingOptions(store=Path(sys.argv[1])).make_recorder()
for number in range(3):
    recorder.submit(
        Turn(
            key=RecordKey("7", "sum", number),
            prompt_ids=[1],
            response_ids=[2],
            logprobs=[-0.5],
            finish_reason="stop",
            created_at=1.0,
            finished_at=2.0,
        )
    )
"""


def test_a_process_that_ends_says_what_is_left_and_where(tmp_path):
    path = tmp_path / "records.db"
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "3 records were not drained" in ended.stderr
    assert f"they are in {path}, and back with --recording-store sqlite://{path}" in ended.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["records.db"]
    assert rows(path, "SELECT count(*) FROM generations") == [(3,)]


def test_what_a_killed_process_had_taken_is_counted(tmp_path):
    path = tmp_path / "records.db"
    add(store := SQLiteStore(path), root("a"))
    store.close()
    script = SCRIPT.replace(
        "import os", "from recorder_core.stores.sqlite import writer; import os"
    )
    script = script.replace("recorder =", "writer.LINGER_S = 60.0\nrecorder =")
    script += """
while recorder.pending():
    time.sleep(0.001)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    store = SQLiteStore(path)
    assert store.stats().counters == {"stored": 1, "lost": 3}
    store.close()


def test_the_default_store_needs_no_sqlite():
    """Some Pythons are built without it."""
    script = "import sys, recorder_core, recorder_core.options; assert 'sqlite3' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ})
    recorder = RecordingOptions().make_recorder()
    assert isinstance(recorder.store, MemoryStore)
    recorder.close()
