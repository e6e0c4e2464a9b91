"""`tail`: generations as they are recorded."""

from __future__ import annotations

import json
import signal
import time

import pytest

from recorder_core import Turn
from recorder_core.cli.commands.tail import _Followed
from recorder_core.recent import Recent
from tests.core.cli.given import fill, key
from tests.core.client.servers import RecordingServer, serving

LOOK = _Followed.new
NAN = float("nan")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("recorder_core.cli.commands.tail._WAIT_S", 0.01)
    monkeypatch.setattr("recorder_core.cli.commands.tail._WAIT_FOR_ALL_S", 0.01)


@pytest.fixture
def rounds(monkeypatch):
    """Does one thing before each time that the command looks for what is new, then ends it."""

    def plan(*actions):
        left = list(actions)

        def new(self, wait_s):
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()
            return LOOK(self, wait_s)

        monkeypatch.setattr(_Followed, "new", new)

    return plan


def nothing():
    pass


def texts(ended):
    assert (ended.code, ended.err) in ((0, ""), (130, "recorder: interrupted\n"))
    return [json.loads(line)["text"] for line in ended.out.splitlines()]


def test_it_begins_with_the_generations_that_ended_last(recorder, server):
    for number in range(5):
        server.clock.now += 1
        server.submit(key(f"0/t/{number}"), [1], [2], response_text=str(number))
        server.submit(key("0/t/0"), [1, 2, number], [2], response_text=f"more {number}")
        server.recorder.flush()
    found = texts(recorder("tail", "0", "-n", "3", "--for", "0.01", "--json"))
    assert found == ["more 3", "4", "more 4"]
    assert texts(recorder("tail", "0", "-n", "0", "--for", "0.01", "--json")) == []


def test_it_goes_on_with_new_runs_and_with_those_that_grow(recorder, server, rounds):
    fill(server)

    def go_on():
        server.submit(key("0/task-7/0"), [1, 2, 3, 4, 5], [6], response_text="grown")
        server.submit(key("0/task-9/0"), [1], [2], response_text="new")
        server.submit(key("1/task-9/0"), [1], [2], response_text="elsewhere")

    rounds(nothing, go_on, nothing)
    found = texts(recorder("tail", "0", "-n", "1", "--json"))
    assert found[1:] == ["grown", "new"]


def test_what_is_drained_and_comes_back_is_not_told_twice(recorder, server, rounds):
    fill(server)
    rounds(
        lambda: server.store.drain(key("0/task-7/3"), "lease", 600),
        lambda: server.store.release("lease"),
        nothing,
    )
    assert len(texts(recorder("tail", "0", "-n", "7", "--json"))) == 7


def test_a_run_that_was_drained_begins_anew(recorder, server, rounds):
    fill(server)

    def drain_and_go_on():
        server.store.drain(key("0/task-7/3"), "lease", 600)
        server.submit(key("0/task-7/3"), [9], [6], response_text="anew")

    rounds(drain_and_go_on, nothing)
    assert texts(recorder("tail", "0", "-n", "0", "--json")) == ["anew"]


def test_only_what_is_unlikely(recorder, server):
    for number, logprobs in enumerate(([-0.5, -9.0], [-0.5, -7.0], None, [NAN, NAN])):
        server.recorder.submit(
            Turn(
                key=key(f"0/t/{number}"),
                prompt_ids=[1],
                response_ids=[2, 3],
                finish_reason="stop",
                logprobs=logprobs,
                finished_at=time.time(),
            )
        )
    server.recorder.flush()
    head, *rows = recorder("tail", "--min-lp", "-8", "--for", "0.01").rows
    rows = [dict(zip(head, row, strict=True)) for row in rows]
    assert [(row["key"], row["mean_logprob"], row["min_logprob"]) for row in rows] == [
        ("0/t/0", "-4.75", "-9.0")
    ]


def test_what_a_trainer_drains_at_once_is_told(recorder, server, rounds):
    def generate_and_drain():
        server.submit(key("0/t/0"), [1], [2], response_text="gone")
        server.recorder.flush()
        server.store.drain(key("0/t/0"), "lease", 600)

    rounds(generate_and_drain, nothing)
    assert texts(recorder("tail", "0", "-n", "0", "--json")) == ["gone"]


def test_news_are_told_when_they_come(started, server):
    """Not when the engine is asked again: that is in ten seconds."""
    process = started("tail", "0", "--json")
    server.submit(key("0/t/0"), [1], [2], response_text="first")
    assert json.loads(process.stdout.readline())["text"] == "first"
    began = time.monotonic()
    server.submit(key("0/t/1"), [1], [2], response_text="second")
    assert json.loads(process.stdout.readline())["text"] == "second"
    assert time.monotonic() - began < 5


def test_of_very_many_the_last_are_found(recorder, server, monkeypatch):
    """They come in pages."""
    monkeypatch.setattr("recorder_core.client.calls.RECENT_ENTRIES", 4)
    monkeypatch.setattr("recorder_core.cli.commands.tail.RECENT_ENTRIES", 4)
    for number in range(11):
        finished = {"created_at": 1.0, "finished_at": 2.0 + number}
        server.submit(key(f"0/t/{number}"), [1], [2], response_text=str(number), **finished)
    server.recorder.flush()
    found = texts(recorder("tail", "0", "-n", "6", "--for", "0.01", "--json"))
    assert found == ["5", "6", "7", "8", "9", "10"]


def test_what_is_left_out_is_said(recorder, rounds):
    server = RecordingServer(recent=Recent(max_generations=2))
    server.submit(key("0/t/0"), [1], [2])

    def generate():
        for number in range(3):
            server.submit(key(f"0/t/{number}"), [1], [2])
        server.recorder.flush()

    rounds(generate)
    with serving(server.app) as url:
        told = recorder("tail", "0", "--json", "--url", url)
    assert f"{url} recorded more than it remembers" in told.err
    assert len(told.out.splitlines()) == 3


def test_it_tells_of_all_replicas(recorder, server, second_server):
    server.submit(key("0/t/0"), [1], [2], response_text="here")
    second_server.submit(key("0/t/0"), [1], [3], response_text="there")
    urls = f"{server.url},{second_server.url}"
    assert texts(recorder("tail", "--url", urls, "--for", "0.01", "--json")) == ["here", "there"]


def test_it_ends_when_it_is_interrupted(started, server):
    fill(server)
    process = started("tail", "0")
    assert process.stdout.readline().startswith("finished\tkey\t")
    for _ in range(7):
        assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "recorder: interrupted\n")
    assert process.returncode == 130


def test_a_row_is_one_line(recorder, server):
    server.submit(key("0/t/0"), [1], [2], response_text="one\ttwo\nthree" + "x" * 300)
    server.recorder.flush()
    (_, row) = recorder("tail", "--for", "0.01").rows
    assert row[1] == "0/t/0"
    assert row[-1].startswith("one␉two␊three")
    assert len(row[-1]) == 200
