"""What the command says when it cannot do what it was asked, and how it ends."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import termios
import time

import pytest
from fastapi import FastAPI

from recorder_core import encode_runs
from recorder_core.cli.exits import command_error
from tests.core.cli.given import add, fill, key
from tests.core.client.servers import RecordingServer, serving, unused_url


def says(ended, code, text):
    """One line, and nothing on the standard output."""
    assert (ended.code, ended.out) == (code, "")
    assert ended.err == f"recorder: {text}\n"


def test_a_server_that_is_down(recorder, monkeypatch):
    url = unused_url()
    monkeypatch.setenv("RECORDER_URL", url)
    says(
        recorder("ls"),
        5,
        f"{url} does not answer (connection refused). "
        "Is it started with --enable-recording? Else set RECORDER_URL",
    )


def test_without_any_setting_the_engine_is_on_this_machine(monkeypatch):
    from recorder_core.cli.places import urls

    assert urls([]) == ["http://localhost:8000"]
    monkeypatch.setenv("RECORDER_URL", "http://a:1, http://b:2,")
    assert urls([]) == ["http://a:1", "http://b:2"]
    assert urls(["http://c:3,http://d:4"]) == ["http://c:3", "http://d:4"]


def test_a_server_that_does_not_record(recorder):
    with serving(FastAPI()) as url:
        says(
            recorder("ls", "--url", url),
            1,
            f"{url} answers, but does not record: start it with --enable-recording",
        )


def test_no_admin_key(recorder, server, monkeypatch):
    monkeypatch.delenv("RECORDER_ADMIN_KEY")
    says(recorder("ls"), 4, f"{server.url} wants the admin key: set RECORDER_ADMIN_KEY")


def test_a_wrong_admin_key(recorder, server, monkeypatch, tmp_path):
    monkeypatch.setenv("RECORDER_ADMIN_KEY", "guessed")
    says(recorder("ls"), 4, f"{server.url} refuses the key in RECORDER_ADMIN_KEY")
    file = tmp_path / "key"
    file.write_text("guessed too\n")
    ended = recorder("ls", "--admin-key-file", file)
    says(ended, 4, f"{server.url} refuses the key in {file}")
    assert "guessed" not in ended.err


def test_the_admin_key_in_a_file(recorder, server, monkeypatch, tmp_path):
    fill(server)
    file = tmp_path / "key"
    file.write_text(os.environ["RECORDER_ADMIN_KEY"] + "\n")
    monkeypatch.setenv("RECORDER_ADMIN_KEY", "guessed")
    assert recorder("ls", "--admin-key-file", file).code == 0
    says(
        recorder("ls", "--admin-key-file", tmp_path / "none"),
        2,
        f"the admin key in {tmp_path / 'none'} cannot be read (No such file or directory)",
    )
    file.write_text(" \n")
    says(
        recorder("ls", "--admin-key-file", file),
        2,
        f"{file} is empty; it should hold the admin key",
    )


def test_what_is_no_url(recorder, monkeypatch):
    text = "'gpu-0:8000' is no URL; did you mean http://gpu-0:8000?"
    says(recorder("ls", "--url", "gpu-0:8000"), 2, text)
    monkeypatch.setenv("RECORDER_URL", "http://gpu-1:8000,gpu-0:8000")
    says(recorder("ls"), 2, text)
    says(recorder("drain", "0", "-o", "x.rec"), 2, text)
    says(recorder("ls", "--url", "me:hunter2@host:8000"), 2, "what is given is no URL")
    ended = recorder("ls", "--url", "ftp://host")
    says(ended, 2, "the base URL 'ftp://host' is not like http://host:8000")


def test_a_run_that_is_not_there(recorder, server):
    fill(server)
    drained = "Drained runs: --recent"
    says(
        recorder("show", "0/task-7/9"),
        3,
        f"nothing under 0/task-7/9; nearest: 0/task-7/0 to /3. {drained}",
    )
    says(
        recorder("show", "0/task-9/9"),
        3,
        f"nothing under 0/task-9/9; nearest: 0/task-7 to /task-8. {drained}",
    )
    says(
        recorder("show", "0/task-9/9", "--recent"),
        3,
        "nothing under 0/task-9/9; nearest: 0/task-7 to /task-8. If it was drained, it is not "
        "remembered any more",
    )
    elsewhere = "What was drained is with whoever drained it"
    says(recorder("ls", "1"), 3, f"nothing under 1; nearest: 0. {elsewhere}")
    held = server.recorder.start(key("0/task-7/9"))
    says(recorder("show", "0/task-7/9"), 3, "nothing has finished under 0/task-7/9; 1 in flight")
    held.drop("rejected")


def test_nothing_at_all(recorder, server):
    ended = recorder("ls")
    says(ended, 3, f"nothing is recorded in {server.url}")


def test_a_drain_over_a_file_that_is_there(recorder, server, tmp_path):
    fill(server)
    file = tmp_path / "batch-0.rec"
    file.write_bytes(b"dear")

    says(recorder("drain", "0", "-o", "batch-0.rec"), 2, "batch-0.rec exists; --force replaces it")

    assert file.read_bytes() == b"dear"
    assert (server.store.stats().leases, server.store.stats().keys) == (0, 5)


# The file that the drain writes to is a pipe that nobody empties: the drain stands still in it.
STUCK = """
import os, sys
from recorder_core.cli import main
os.mkfifo(f".batch-0.rec.{os.getpid()}.part")
sys.exit(main(["drain", "0", "-o", "batch-0.rec"]))
"""


def test_a_drain_that_is_interrupted(started, server, tmp_path):
    add(server, 1_204, tokens=50)
    process = started(program=STUCK)
    pipe = tmp_path / f".batch-0.rec.{process.pid}.part"
    while not pipe.exists():
        assert process.poll() is None
        time.sleep(0.01)
    with pipe.open("rb") as reader:
        while not waiting_bytes(reader):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)

    assert (process.returncode, out) == (130, "")
    assert re.fullmatch(
        r"recorder: not acknowledged; 1,204 records come back in (10 min|9 min \d+ s)\n", err
    )
    assert list(tmp_path.iterdir()) == []
    assert server.store.stats().leased_records == 1_204


def waiting_bytes(pipe):
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]


def test_a_drain_of_two_engines_that_is_interrupted_as_it_waits(
    started, server, second_server, tmp_path
):
    held = [each.recorder.start(key("0/task/0")) for each in (server, second_server)]
    urls = f"{server.url},{second_server.url}"
    process = started("drain", "0", "-o", "x.rec", "--wait", "60", "--lease", "300", "--url", urls)
    while not (server.recorder._in_flight._waiting and second_server.recorder._in_flight._waiting):
        assert process.poll() is None
        time.sleep(0.01)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)

    assert time.monotonic() - began < 10
    assert (process.returncode, out) == (130, "")
    assert err == "recorder: not acknowledged; what was handed out comes back within 5 min\n"
    assert list(tmp_path.iterdir()) == []
    for each in held:
        each.drop("rejected")


def test_several_engines_that_fail_are_named_together(recorder, server, second_server):
    down = unused_url()
    urls = f"{server.url},{down}"
    ended = recorder("reward", "0/t/0", "1", "--url", urls)
    says(
        ended,
        5,
        f"{down} does not answer (connection refused); the others have done it; the call can be "
        "repeated. Is it started with --enable-recording? Else set RECORDER_URL",
    )


def test_what_a_server_says_does_not_drive_the_terminal(recorder):
    app = FastAPI()

    @app.get("/records/keys")
    def keys():
        from fastapi.responses import JSONResponse

        return JSONResponse({"detail": "\x1b[2J\u202e"}, 500)

    with serving(app) as url:
        ended = recorder("ls", "--url", url)
    says(ended, 1, f"GET {url}/records/keys: answered 500: ␛[2J<U+202E>")


def test_a_request_that_is_refused_as_no_program_of_this_machine(recorder, monkeypatch):
    server = RecordingServer()

    @server.app.middleware("http")
    async def relayed(request, call_next):
        from fastapi.responses import JSONResponse

        return JSONResponse({"detail": "this machine only"}, 403)

    monkeypatch.delenv("RECORDER_ADMIN_KEY")
    with serving(server.app) as url:
        ended = recorder("stats", "--url", url)
    assert ended.code == 4
    assert "answered 403: this machine only" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["ls", "a//b"], "key prefix 'a//b' has the component ''; components are visible ASCII"),
        (["rm", "a//b"], "argument PREFIX: key prefix 'a//b' has the component ''"),
        (["rm", "http://h:1"], "'http://h:1' is an address, and no key prefix: give it as --url"),
        (["show", "0"], "argument KEY: record key '0' has 1 component(s), at least three"),
        (["ls", "--limit", "x"], "argument --limit: 'x' is no whole number"),
        (["ls", "--limit", "0"], "argument --limit: '0' is out of range: 1 or more"),
        (["view", "--port", "70000"], "argument --port: '70000' is out of range: 0 to 65535"),
        (["reward", "0/t/0", "good"], "argument REWARD: 'good' is no number"),
        (["reward", "0/t/0", "nan"], "argument REWARD: 'nan' is no finite number"),
        (["reward", "0/t/0"], "give a reward, or a note by --info NAME=VALUE"),
        (["reward", "0/t/0", "--info", "judge"], "argument --info: 'judge' is no note"),
        (["drain", "0", "-o", "x", "--lease", "0"], "argument --lease: '0' is too little"),
        (["drain", "0"], "the following arguments are required: -o/--output"),
        (["ls", "--sort", "colour"], "argument --sort: invalid choice: 'colour'"),
        (["dance"], "argument COMMAND: invalid choice: 'dance'"),
        ([], "the following arguments are required: COMMAND"),
        (["ls", "0", "1"], "2 prefixes are given, '0', '1'; give one"),
        (["stats", "0"], "'0' is neither a file that is there nor a URL"),
        (["tail", "./x.rec"], "x.rec is a file, and this command is for engines"),
        (["ls", "x.rec", "http://host"], "files and engines are given"),
        (["ls", "./"], "'./' is a folder; name the files in it"),
        (["drain", "0", "-o", "b.parquet"], "a drain writes the records themselves"),
        (["export", "-o", "b.xyz"], "b.xyz says no format; --format is one of jsonl"),
        (["export", "--format", "atif"], "atif names the agent; give --name NAME"),
        (["export", "--pieces"], "jsonl has no place for --pieces; rec and html have"),
        (["export", "--format", "parquet"], "parquet is not to be read here; name a file by -o"),
        (["show", "0/t/0", "./x.rec", "--recent"], "--recent is for engines"),
        (["show", "0/t/0", "--text", "--forest"], "not allowed with argument"),
    ],
)
def test_wrong_usage_is_told_in_a_line(recorder, argv, text):
    ended = recorder(*argv)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("recorder: ")
    assert text in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("command", [["drain", "0"], ["export", "0"]])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_taken(
    recorder, server, command, tmp_path
):
    fill(server)
    says(
        recorder(*command, "-o", "none/x.rec"),
        1,
        "none/x.rec cannot be written (No such file or directory): name a file in a folder that "
        "exists and that you may write to",
    )
    assert server.store.stats().leases == 0


def test_a_folder_is_no_file(recorder, server, tmp_path):
    text = f"{tmp_path} is a folder; name a file"
    says(recorder("drain", "0", "-o", tmp_path), 2, text)
    says(recorder("export", "0", "-o", tmp_path, "--format", "rec"), 2, text)


def test_files_that_are_not_ours_or_not_there(recorder, tmp_path):
    (tmp_path / "x.rec").write_text("hello, hello")
    ended = recorder("ls", "x.rec")
    assert ended.code == 1
    assert ended.err.startswith("recorder: x.rec holds no recorded runs: ")
    says(recorder("ls", "y.rec"), 1, "y.rec cannot be read (No such file or directory)")
    (tmp_path / "cut.rec").write_bytes(encode_runs([])[:-3])
    assert "the stream was cut off" in recorder("ls", "cut.rec").err


@pytest.mark.parametrize(
    ("missing", "argv"), [("shtab", ["--print-completion", "bash"]), ("httpx", ["ls"])]
)
def test_without_the_extra(started, missing, argv):
    program = f"import sys; sys.modules[{missing!r}] = None; import recorder_core.cli as c; "
    out, err = started(*argv, program=program + "sys.exit(c.main())").communicate(timeout=30)
    assert out == ""
    what = f"this needs {missing}, which is not installed"
    assert err == f"recorder: {what}: pip install 'recorder-core[cli]'\n"


def test_a_fault_of_ours_is_not_hidden():
    assert command_error(TypeError("'NoneType' object is not callable")) is None
