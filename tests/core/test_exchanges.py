"""What the middleware learns of a recorded request: its model, and what became of its reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from recorder_core import FinishReason, RecordKey, Turn
from recorder_core.context import Identity, current_identity
from recorder_core.local import LocalRecords
from recorder_core.recorder import Recorder
from recorder_core.server import IdentityMiddleware

KEY = RecordKey("7", "sum", 0)
Answer = Callable[[], Awaitable[Response]]


def application(answer: Answer, seen: list[Identity]) -> IdentityMiddleware:
    """Reads the request, as engines do, and answers."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        identity = current_identity()
        assert identity is not None
        seen.append(identity)
        while (await receive()).get("more_body"):
            pass
        await (await answer())(scope, receive, send)

    return IdentityMiddleware(app)


async def ask(app: Any, count: int = 0, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}", "x-stainless-retry-count": str(count)}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post("/v1/completions", json=body, headers=headers)


async def whole() -> Response:
    return PlainTextResponse("yes")


async def streamed() -> Response:
    async def pieces() -> Any:
        for piece in ("y", "e", "s"):
            yield piece

    return StreamingResponse(pieces())


async def refused() -> Response:
    return PlainTextResponse("busy", 503)


async def broken() -> Response:
    async def pieces() -> Any:
        yield "y"
        raise RuntimeError("in the midst of the reply")

    return StreamingResponse(pieces())


@pytest.mark.parametrize(
    ("answer", "delivered"), [(whole, True), (streamed, True), (refused, False), (broken, False)]
)
async def test_a_reply_that_was_sent_to_its_end_is_delivered(
    answer: Answer, delivered: bool
) -> None:
    """M1."""
    seen: list[Identity] = []
    await ask(application(answer, seen), model="policy")
    (identity,) = seen
    assert identity.exchange is not None
    assert identity.exchange.delivered is delivered
    assert identity.exchange.model == "policy"


async def test_a_client_that_left_did_not_get_the_reply() -> None:
    """M1."""
    seen: list[Identity] = []
    messages = [{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(current_identity() or pytest.fail("no identity"))
        await receive()
        await receive()
        await PlainTextResponse("too late")(scope, receive, send)

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    await IdentityMiddleware(app)({"type": "http", "headers": headers}, receive, send)
    assert seen[0].exchange is not None
    assert seen[0].exchange.delivered is False


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[1]", b'{"model": 7}', b"[" * 100_000])
async def test_a_body_that_names_no_model_names_none(body: bytes) -> None:
    seen: list[Identity] = []
    app = application(whole, seen)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await client.post("/v1/x", content=body, headers={"authorization": f"Bearer {KEY}"})
    assert seen[0].exchange is not None
    assert seen[0].exchange.model is None


async def test_six_calls_of_which_three_were_refused_first_are_six_trajectories() -> None:
    """A refused try left no record: its retry supersedes none. M1."""
    recorder = Recorder()
    records = LocalRecords(recorder)
    answers = [whole] * 3 + [refused] * 3 + [whole] * 3

    async def generate() -> Response:
        answer = answers.pop(0)
        identity = current_identity()
        assert identity is not None
        assert identity.key is not None
        if answer is whole:
            now = float(10 - len(answers))
            recorder.submit(
                Turn(
                    key=identity.key,
                    prompt_ids=[1],
                    response_ids=[2, len(answers)],
                    logprobs=[-0.5, -0.5],
                    finish_reason=FinishReason.STOP,
                    attempt=identity.attempt,
                    exchange=identity.exchange,
                    created_at=now,
                    finished_at=now + 0.5,
                )
            )
        return await answer()

    seen: list[Identity] = []
    app = application(generate, seen)
    statuses = [(await ask(app, count)).status_code for count in [0] * 6 + [1] * 3]
    assert statuses == [200] * 3 + [503] * 3 + [200] * 3
    assert [identity.attempt for identity in seen] == [0] * 9
    assert len(records.experiences("7")) == 6
    assert recorder.stats().superseded == 0
    # A refusal explains one retry only.
    answers.append(whole)
    await ask(app, 1)
    assert seen[-1].attempt == 1
    assert len(records.experiences("7")) == 7  # the others were delivered
    recorder.close()
