"""Servers that record, and the command, asked as a shell would ask it."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import NamedTuple

import pytest

from recorder_core.cli import run
from tests import signals
from tests.core.client.servers import ADMIN_KEY, Host, serving


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def rows(self):
        """The lines of a table, header first."""
        return [line.split("\t") for line in self.out.splitlines()]


@pytest.fixture(scope="module")
def hosts():
    first, second = Host(), Host()
    with serving(first) as first.url, serving(second) as second.url:
        yield first, second


@pytest.fixture
def server(hosts):
    with hosts[0].recording() as server:
        yield server


@pytest.fixture
def second_server(hosts):
    with hosts[1].recording() as server:
        yield server


@pytest.fixture(autouse=True)
def environment(request, monkeypatch, tmp_path):
    """Nobody's own settings; where a test has a server, the command finds it."""
    monkeypatch.chdir(tmp_path)
    for name in ("RECORDER_URL", "NO_COLOR", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RECORDER_ADMIN_KEY", ADMIN_KEY)
    if "server" in request.fixturenames:
        monkeypatch.setenv("RECORDER_URL", request.getfixturevalue("server").url)


@pytest.fixture
def recorder(capfd, environment):
    """Runs the command in this process; neither stream is a terminal."""

    def ask(*argv):
        capfd.readouterr()
        code = run([str(each) for each in argv])
        return Ended(code, *capfd.readouterr())

    return ask


@pytest.fixture
def started(environment):
    """Starts the command as a process of its own."""
    processes = []

    def start(*argv, program=None, **settings):
        begin = ["-m", "recorder_core.cli"] if program is None else ["-c", program]
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
        process = subprocess.Popen(
            [sys.executable, *begin, *map(str, argv)],
            preexec_fn=signals.as_usual,
            **settings,
        )
        processes.append(process)
        return process

    yield start
    for each in processes:
        if each.poll() is None:
            each.send_signal(signal.SIGKILL)
        each.communicate()
