"""Runs for the tests of the command."""

from __future__ import annotations

from recorder_core import FinishReason, Record, RecordKey, VersionSpan

HOSTILE = "\x1b]0;owned\x07\x1b[2J \u202eabc\x9b31m\u2066 tab\there"


def key(text):
    return RecordKey.parse(text)


def fill(server):
    """Two tasks: three runs of one turn, one of two turns with a branch, and one without reward."""
    for run in range(3):
        server.submit(key(f"0/task-7/{run}"), [1, 2], [3, 4], response_text="Paris.")
    server.submit(
        key("0/task-7/3"),
        [1, 2],
        [3, 4],
        prompt_text="What?",
        response_text="first",
        versions=[VersionSpan(0, 2, "41")],
    )
    for last in (7, 8):
        server.submit(
            key("0/task-7/3"),
            [1, 2, 3, 4, 5],
            [6, last],
            response_text=f"second {last}",
            versions=[VersionSpan(0, 1, "41"), VersionSpan(1, 2, "42")],
        )
    server.submit(key("0/task-8/0"), [1], [2], finish_reason=FinishReason.LENGTH)
    server.recorder.flush()
    for run, reward in enumerate((1.0, 0.0, 0.5, 0.25)):
        server.store.update(key(f"0/task-7/{run}"), reward=reward)


def add(server, runs, tokens=20, *, batch="0"):
    """So many runs of a record each, straight into the store."""
    for run in range(runs):
        ids = list(range(tokens))
        made = Record.of(
            key=RecordKey(batch, "task", run),
            prompt_ids=ids,
            response_ids=ids,
            finish_reason="stop",
            created_at=1.0,
            finished_at=2.0,
        )
        server.store.add(made)
