"""Replicas that are looked up, and come and go."""

from __future__ import annotations

import socket

import pytest

from recorder_core.client import RecordClient
from recorder_core.errors import ServerUnreachableError
from tests.core.client.servers import ADMIN_KEY, KEY


def test_replicas_of_a_file_come_and_go(server, second_server, tmp_path):
    for each in (server, second_server):
        each.submit(KEY, [1], [2])
    path = tmp_path / "replicas of ours"
    path.write_text(f"# the first\n{server.url}/v1\n\n")
    with RecordClient(f"file://{path}".replace(" ", "%20"), admin_key=ADMIN_KEY) as client:
        assert [each.records for each in client.keys("")] == [1]
        path.write_text(f"{server.url}\n{second_server.url}  # new\n{server.url}\n")
        assert [each.records for each in client.keys("")] == [2]
        with client.drain("0") as drained:
            path.write_text(second_server.url)
            assert len(drained.runs[0].records) == 2
        assert server.store.stats().counters["acknowledged"] == 1
        assert list(client.stats()) == [second_server.url]
        for gone in (lambda: path.write_text("# nobody\n"), lambda: path.unlink()):
            gone()
            assert list(client.stats()) == [second_server.url]


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "cannot be read: No such file"), ("# none\n", "names no replica")],
)
def test_a_file_that_names_none_is_refused(tmp_path, text, words):
    path = tmp_path / "replicas"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=words):
        RecordClient(f"file://{path}")


def test_all_addresses_of_a_name_are_asked(server, monkeypatch):
    server.submit(KEY, [1], [2])
    port = server.url.rpartition(":")[2]
    answers = [["127.0.0.1"], ["127.0.0.1", "127.0.0.2"], OSError("no answer")]
    clock = [0.0]
    monkeypatch.setattr("recorder_core.client.discovery.time.monotonic", lambda: clock[0])

    def answer(name, port, **_):
        assert name == "engines"
        found = answers.pop(0)
        if isinstance(found, OSError):
            raise found
        return [(socket.AF_INET, None, 0, "", (host, port)) for host in [*found, *found]]

    client = RecordClient(f"dns+http://engines:{port}", admin_key=ADMIN_KEY)
    with monkeypatch.context() as patched:
        patched.setattr("recorder_core.client.discovery.socket.getaddrinfo", answer)
        first, second = (f"http://127.0.0.{last}:{port}" for last in (1, 2))
        assert client.urls == (first,)
        assert client.urls == (first,)  # not asked again at once
        clock[0] += 6
        assert client.urls == (first, second)
        clock[0] += 6
        assert client.urls == (first, second)


def test_a_name_is_really_looked_up(server):
    server.submit(KEY, [1], [2])
    port = server.url.rpartition(":")[2]
    with RecordClient(f"dns+http://127.0.0.1:{port}", admin_key=ADMIN_KEY) as client:
        assert [each.records for each in client.keys("")] == [1]
        assert repr(client) == f"RecordClient(['dns+http://127.0.0.1:{port}'])"
    client = RecordClient("dns+http://no-such-name.invalid:8000", admin_key=ADMIN_KEY)
    with pytest.raises(ServerUnreachableError, match=r"no-such-name\.invalid has no address"):
        client.keys("")
    with pytest.raises(ValueError, match="is not like dns"):
        RecordClient("dns+http://engines")
