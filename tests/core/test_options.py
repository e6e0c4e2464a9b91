"""The command-line flags of recording, as every engine has them."""

from __future__ import annotations

import argparse
import logging

import pytest

from recorder_core.options import RecordingOptions, _warn_unused, add_arguments


def read(*argv: str) -> RecordingOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return RecordingOptions.from_args(parser.parse_args(argv), {})


@pytest.fixture(autouse=True)
def said_nothing_yet() -> None:
    _warn_unused.cache_clear()


def test_flags_without_the_one_that_turns_recording_on_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
):
    for _ in range(2):
        options = read("--recording-store", "sqlite:///tmp/x.db", "--recording-aborted", "drop")
    assert not options.enabled
    assert caplog.messages == [
        "Nothing is recorded: --recording-store, --recording-aborted without --enable-recording"
    ]


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--recording-aborted", "keep"),
        ("--enable-recording", "--recording-aborted", "drop"),
    ],
)
def test_else_nothing_is_said(argv: tuple[str, ...], caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    assert read(*argv).enabled == ("--enable-recording" in argv)
    assert caplog.messages == []
