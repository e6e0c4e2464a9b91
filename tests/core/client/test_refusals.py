"""What is refused, by whom, and how it is told."""

from __future__ import annotations

import socket
import time

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from recorder_core import encode_runs
from recorder_core.client import RecordClient
from recorder_core.codec import MEDIA_TYPE
from recorder_core.errors import (
    BadRequestError,
    InvalidKeyError,
    NotAuthorizedError,
    ServerFaultError,
    ServerUnreachableError,
)
from tests.core.client.servers import ADMIN_KEY, KEY, RecordingServer, serving, unused_url


def test_a_wrong_admin_key_is_refused(connect, server):
    server.submit(KEY, [1], [2])
    client = connect(server.url, admin_key="guessed")

    for call in (client.keys, client.flush, lambda: client.update_reward(KEY, 1.0)):
        with pytest.raises(NotAuthorizedError, match="wants the recording admin key") as caught:
            call()
        assert "guessed" not in str(caught.value)
    assert "guessed" not in repr(client)
    assert "guessed" not in repr(vars(getattr(client, "_client", client))["_headers"])


def test_a_missing_admin_key_is_named(connect, server, monkeypatch):
    monkeypatch.delenv("RECORDER_ADMIN_KEY", raising=False)
    with pytest.raises(NotAuthorizedError, match="pass admin_key or set RECORDER_ADMIN_KEY"):
        connect(server.url, admin_key=None).keys()


def test_the_admin_key_comes_from_the_environment(connect, server, monkeypatch):
    monkeypatch.setenv("RECORDER_ADMIN_KEY", ADMIN_KEY + "\n")
    assert connect(server.url, admin_key=None).keys() == []


def test_an_admin_key_that_no_header_carries_is_refused_unseen():
    with pytest.raises(ValueError, match="control character") as caught:
        RecordClient("http://host", admin_key="my\nsecret")
    assert "secret" not in str(caught.value)


def test_an_unreachable_server_is_named(connect):
    url = unused_url()
    with pytest.raises(ServerUnreachableError, match=f"GET {url}/records/keys: no answer"):
        connect(url, retries=0).keys()


def test_a_server_that_is_silent_times_out(connect):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(ServerUnreachableError, match=r"no answer in time \(ReadTimeout\)"):
            connect(url, timeout=0.2).keys()
        assert time.monotonic() - started < 2  # not tried again


def openai_style_app():
    """An application that reports errors as vLLM does."""
    app = FastAPI()

    @app.exception_handler(404)
    async def not_found(request, error):
        return JSONResponse({"error": {"message": error.detail, "code": 404}}, 404)

    return app


@pytest.mark.parametrize("app", [FastAPI(), openai_style_app()], ids=["fastapi", "openai"])
def test_a_server_without_recording_is_told_apart(connect, app):
    with serving(app) as url:
        client = connect(url)
        for call in (client.keys, lambda: client.get("0"), lambda: client.lease("0")):
            with pytest.raises(
                ServerFaultError, match="404: Not Found; is it started with --enable"
            ):
                call()


def test_a_refused_request_shows_the_reason(client, server):
    server.submit(KEY, [1], [2, 3])
    with pytest.raises(BadRequestError, match=r"has 1 values, record .* has 2 response tokens"):
        client.update_reward(KEY, token_level_reward=[1.0])


def test_an_engine_without_a_version_label_says_so(connect):
    server = RecordingServer(set_version=False)
    with serving(server.app) as url, pytest.raises(BadRequestError, match="no weight-version"):
        connect(url).set_version("1")


def test_what_the_server_would_refuse_is_not_sent(connect):
    client = connect(unused_url())
    with pytest.raises(InvalidKeyError, match="at least three"):
        client.update_reward("just-a-key", 1.0)
    with pytest.raises(InvalidKeyError):
        client.get("a//b")
    with pytest.raises(BadRequestError, match=r"not sent.*reward.*finite"):
        client.update_reward(KEY, float("nan"))
    with pytest.raises(BadRequestError, match=r"not sent.*version"):
        client.set_version(True)
    with pytest.raises(BadRequestError, match=r"not sent.*wait_s"):
        client.lease("0", wait_s=-1)
    with pytest.raises(BadRequestError, match="not sent"):
        client.update_reward(KEY, info={"half a pair": "\ud800"})


def page(status, text="<html>Bad gateway</html>"):
    return lambda request: httpx.Response(status, html=text)


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (page(200), "html.* not what /records answers"),
        (page(500), "answered 500: text/html.*Bad gateway"),
        (page(307), "answered 307"),
        (lambda request: httpx.Response(200, json={"hello": "world"}), "not what /records"),
        (lambda request: httpx.Response(500, content=b"[" * 100_000), "answered 500"),
        (lambda request: httpx.Response(500, content=b"\xff\xfe" * 9000), "answered 500.* …"),
        (lambda request: httpx.Response(500, json={"error": "plain"}), "answered 500.*plain"),
    ],
)
def test_what_is_not_from_records_is_a_fault(connect, handler, message):
    with pytest.raises(ServerFaultError, match=message) as caught:
        connect("http://proxy", handler=handler).stats()
    assert len(str(caught.value)) < 1000


def test_validation_errors_of_a_plain_fastapi_are_readable(connect):
    detail = [{"loc": ["body", "reward"], "msg": "Input should be a number", "input": "x"}]
    with pytest.raises(BadRequestError, match=r"422: body\.reward: Input should be a number"):
        connect(
            "http://host", handler=lambda request: httpx.Response(422, json={"detail": detail})
        ).update_reward(KEY, 1.0)


def test_a_corrupt_drain_is_a_fault(connect):
    blob, headers = encode_runs([]), {"content-type": MEDIA_TYPE}
    for content in (blob[:-3], blob[1:], blob + blob, b""):
        with pytest.raises(ServerFaultError, match="not what /records answers"):
            connect(
                "http://host",
                handler=lambda request, c=content: httpx.Response(200, content=c, headers=headers),
            ).lease("0")
