"""Two servers that record, and clients of both kinds."""

from __future__ import annotations

import httpx
import pytest

from recorder_core.client import RecordClient
from tests.core.client.servers import ADMIN_KEY, Awaited, Host, serving


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


@pytest.fixture(params=["blocking", "async"])
def connect(request):
    """Makes a client of either kind."""
    made = []

    def make(*args, handler=None, transport=None, **kwargs):
        is_async = request.param == "async"
        if handler is not None:
            transport = httpx.MockTransport(handler)
        if transport is not None:
            http = httpx.AsyncClient if is_async else httpx.Client
            kwargs["http_client"] = http(transport=transport)
        kwargs.setdefault("admin_key", ADMIN_KEY)
        made.append((Awaited if is_async else RecordClient)(*args, **kwargs))
        return made[-1]

    yield make
    for client in made:
        client.close()
        if isinstance(client, RecordClient):
            client._http.close()


@pytest.fixture
def client(connect, server):
    return connect(server.url)


@pytest.fixture
def both(connect, server, second_server):
    return connect([server.url, second_server.url + "/v1"])


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("recorder_core.client.servers._FIRST_PAUSE_S", 0.01)
