"""What is sent again, and what is not."""

from __future__ import annotations

import httpx
import pytest

from recorder_core import encode_runs
from recorder_core.codec import Head
from recorder_core.errors import ClientError, ServerFaultError
from tests.core.client.servers import KEY


class Flaky:
    """Fails each call a few times, then answers; counts the attempts."""

    def __init__(self, failures, fault):
        self.attempts = 0
        self.bodies = []
        self._failures = failures
        self._fault = fault

    def __call__(self, request):
        self.attempts += 1
        self.bodies.append(request.read())
        if self.attempts <= self._failures:
            if isinstance(self._fault, int):
                return httpx.Response(self._fault, html="<html>")
            raise self._fault("broken", request=request)
        reply = {"updated": 1, "records": 1, "flushed": True}
        if request.url.path.endswith("/drain"):
            return httpx.Response(200, content=encode_runs([], Head("a")))
        return httpx.Response(200, json=reply)


FAULTS = [httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError, 502, 503, 504]


@pytest.mark.parametrize("fault", FAULTS)
def test_calls_that_do_no_harm_twice_are_sent_again(quick, connect, fault):
    for call in (
        lambda client: client.update_reward(KEY, 1.0),
        lambda client: client.overwrite(KEY, []),
        lambda client: client.delete("0"),
        lambda client: client.flush(),
    ):
        handler = Flaky(1, fault)
        assert call(connect("http://host", handler=handler)) == 1
        assert handler.attempts == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_drain_is_sent_again_under_its_name(quick, connect, fault):
    """S7."""
    handler = Flaky(1, fault)
    drained = connect("http://host", handler=handler).lease("0")
    assert handler.attempts == 2
    assert len(set(handler.bodies)) == 1
    assert [each.id for each in drained.leases] == ["a"]


def test_acknowledging_is_sent_again(quick, connect):
    handler = Flaky(0, 503)
    client = connect("http://host", handler=handler)
    drained = client.lease("0")
    handler._failures, handler.attempts = 2, 0
    assert client.ack(drained) == 1
    assert handler.attempts == 3


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (2, 3)])
def test_retries_end(quick, connect, retries, attempts):
    handler = Flaky(9, 503)
    with pytest.raises(ServerFaultError, match="503"):
        connect("http://host", handler=handler, retries=retries).flush()
    assert handler.attempts == attempts


@pytest.mark.parametrize("fault", [400, 500, httpx.ReadTimeout])
def test_what_will_not_pass_in_a_moment_is_not_sent_again(quick, connect, fault):
    handler = Flaky(1, fault)
    with pytest.raises(ClientError):
        connect("http://host", handler=handler).flush()
    assert handler.attempts == 1
