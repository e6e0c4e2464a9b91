"""Addresses, keys and the two clients' surface."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from recorder_core.client import AsyncRecordClient, RecordClient
from recorder_core.local import LocalRecords


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://host:8000/v1", "http://host:8000"),
        (" http://host:8000/v1/ ", "http://host:8000"),
        ("https://host/engines/a/", "https://host/engines/a"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_base_url_is_taken_as_openai_clients_have_it(given, url):
    with RecordClient([given, url]) as client:
        assert client.urls == (url,)
        assert repr(client) == f"RecordClient([{url!r}])"


@pytest.mark.parametrize(
    "url", ["host:8000", "localhost", "", "ftp://host", "http://", "http://h/?a=b", "http://h:x"]
)
def test_what_is_no_base_url_is_refused(url):
    with pytest.raises(ValueError, match="base URL"):
        RecordClient(url)


def test_no_server_or_a_password_in_the_url_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        RecordClient([])
    with pytest.raises(ValueError, match="admin_key") as caught:
        RecordClient("http://user:hunter2@host")
    assert "hunter2" not in str(caught.value)


def surface(kind):
    return {
        name: list(inspect.signature(value).parameters.items())
        for name, value in vars(kind).items()
        if callable(value) and not name.startswith("_")
    }


def test_both_clients_have_the_same_surface():
    assert surface(RecordClient) == surface(AsyncRecordClient)


def test_the_records_of_this_process_have_the_clients_surface():
    """But for what only an engine's own process, or only a server, can do."""
    here, there = surface(LocalRecords), surface(RecordClient)
    own = {"flush", "close"}  # with a time limit
    assert there.keys() - here.keys() == {"pieces", "recent", "set_version"}
    assert here.keys() <= there.keys()
    for name in here.keys() - own:
        assert here[name] == there[name], name


def test_the_rest_of_the_package_does_without_httpx():
    code = (
        "import sys; from recorder_core import *; "
        "assert not {'httpx', 'fastapi', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
