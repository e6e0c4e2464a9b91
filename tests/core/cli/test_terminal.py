"""What people see on a terminal, and that nobody but them drives it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recorder_core.cli.visible import visible
from tests.core.cli.given import HOSTILE, add, fill, key
from tests.core.cli.terminal import result, terminals


@pytest.fixture(scope="module")
def running():
    with terminals() as run:
        yield run


@pytest.fixture
def on_a_terminal(running, environment):
    return running


def test_a_table_is_aligned_and_has_a_head(on_a_terminal, server):
    fill(server)
    code, text = on_a_terminal("ls", "0", "--sort", "reward", "--limit", "3", width=80)
    assert code == 0
    head, line, *rows = result(text).splitlines()
    assert head.split() == ["key", "records", "rewarded", "reward", "size", "age"]
    assert set(line) == {"─"}
    assert [row.split()[:4] for row in rows] == [
        ["0/task-7/1", "1", "1", "0"],
        ["0/task-7/3", "3", "3", "0.25"],
        ["0/task-7/2", "1", "1", "0.5"],
    ]
    assert len({row.rindex("B") for row in rows}) == 1


def test_a_long_table_is_cut_and_says_so(on_a_terminal, server):
    add(server, 1_005, tokens=1)
    code, text = on_a_terminal("ls")
    assert code == 0
    assert text.endswith("recorder: 5 further runs; --limit 1005 shows all\n")
    assert len(result(text).splitlines()) == 2 + 1_000 + 1


@pytest.mark.parametrize("argv", [["ls"], ["stats"], ["show", "0/task-7/3"]])
def test_without_colour(on_a_terminal, server, argv):
    fill(server)
    code, text = on_a_terminal(*argv, NO_COLOR="1")
    assert code == 0
    assert "\x1b[3" not in text
    assert "\x1b[4" not in text
    assert "\x1b" not in result(text)
    assert "\x1b" not in on_a_terminal(*argv, TERM="dumb")[1]


@pytest.mark.parametrize(
    "argv",
    [
        ["show", "0/task/0"],
        ["show", "0/task/0", "--text"],
        ["show", "0/task/0", "--text", "--json"],
        ["show", "0/task/0", "--tokens"],
        ["show", "0/task/0", "--forest"],
        ["tail", "--for", "0.1"],
        ["tail", "--for", "0.1", "--json"],
        ["export", "0"],
    ],
)
def test_text_of_a_model_does_not_drive_the_terminal(on_a_terminal, server, argv):
    server.submit(key("0/task/0"), [1], [2], prompt_text=HOSTILE, response_text=HOSTILE)
    server.recorder.flush()
    server.store.update(key("0/task/0"), info={"judge": HOSTILE})
    code, text = on_a_terminal(*argv, width=200)
    assert code == 0
    text = result(text)
    assert not set(text) & set("\x1b\x07\x9b\u202e\u2066")
    if "--json" in argv or argv[0] == "export":
        assert r"\u001b]0;owned\u0007\u001b[2J \u202eabc\u009b31m" in text
    elif argv[-1] not in ("--tokens", "--forest"):
        assert "␛]0;owned␇␛[2J <U+202E>abc<U+009B>31m<U+2066>" in text


def test_in_a_pipe_it_does_not_either(recorder, server):
    server.submit(key("0/task/0"), [1], [2], prompt_text=HOSTILE, response_text=HOSTILE)
    for argv in (["show", "0/task/0"], ["tail", "--for", "0.1"]):
        out = recorder(*argv).out
        assert "\x1b" not in out
        assert "␛]0;owned␇" in out


def test_what_is_visible():
    assert visible("plain é 日本 👩‍🚀\u00a0.") == "plain é 日本 👩‍🚀\u00a0."
    assert visible("\x00\r\n\t\x7f") == "␀␍␊␉␡"
    assert visible("a\n\tb\r", lines=True) == "a\n\tb␍"
    assert visible("\u200b\u2028\ud800\U000e0041") == "<U+200B><U+2028><U+D800><U+E0041>"


def test_it_asks_before_it_deletes(on_a_terminal, server):
    fill(server)
    question = "recorder: delete 4 runs, 6 records under 0/task-7? [y/N] "
    code, text = on_a_terminal("rm", "0/task-7", typed="n\n")
    assert code == 1
    assert question in text
    assert text.endswith("recorder: nothing was changed\n")
    assert server.store.stats().records == 7

    code, text = on_a_terminal("rm", "0/task-7", typed="y\n")
    assert (code, server.store.stats().records) == (0, 1)
    assert question in text
    assert text.endswith("recorder: 6 records deleted\n")


def test_it_asks_before_it_blocks(on_a_terminal, server):
    fill(server)
    held = server.recorder.start(key("0/task-7/0"))
    code, text = on_a_terminal("block", "0/task-7", typed="yes\n")
    assert code == 0
    assert (
        "recorder: refuse all that is generated under 0/task-7 from now on (4 runs there, 1 "
        "generation in flight)? [y/N] "
    ) in text
    assert server.store.stats().blocked_prefixes == 1
    held.drop("rejected")


def test_long_work_shows_how_far_it_is(on_a_terminal, server):
    """A drain that waits, on a terminal."""
    fill(server)
    held = server.recorder.start(key("0/task-7/0"))
    code, text = on_a_terminal("drain", "0", "-o", "x.rec", "--wait", "1.5")
    assert code == 0
    assert "taking …" in text
    assert "recorder: x.rec: 5 runs, 7 records, acknowledged\n" in text
    assert "recorder: still in flight there: 1 generation\n" in text
    held.drop("rejected")


def test_files_can_be_read_without_the_client(tmp_path):
    """In a pipe nothing of the extra is needed for them."""
    from recorder_core import encode_runs
    from recorder_core.runs import merged_by_key
    from tests.core.builders import record

    (tmp_path / "x.rec").write_bytes(encode_runs(merged_by_key([record()])))
    program = (
        "import sys; sys.modules.update(httpx=None, rich=None); import recorder_core.cli as c; "
        "sys.exit(c.main(['ls', 'x.rec']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith("batch/task/0\t1\t")
