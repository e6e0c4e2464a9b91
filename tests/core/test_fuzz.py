"""`/records` under requests that follow its OpenAPI description, and such as break it."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from recorder_core import Recorder, RecordKey, Turn
from recorder_core.codec import MEDIA_TYPE
from recorder_core.server import AdminGuard, records_router

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


@schemathesis.serializer(MEDIA_TYPE)
def written(context, value):
    """A body of our own format: whatever bytes come."""
    return value if isinstance(value, bytes) else repr(value).encode()


ADMIN_KEY = "s3cret-admin"
RECORDER = Recorder()


async def take_version(version: str) -> None:
    """An engine that takes any label."""


def application() -> FastAPI:
    app = FastAPI()
    app.include_router(
        records_router(
            RECORDER,
            guard=AdminGuard(ADMIN_KEY),
            set_version=take_version,
            pieces=lambda ids: [b"x" for _ in ids],
        )
    )
    return app


schema = schemathesis.openapi.from_asgi("/openapi.json", application())


@pytest.fixture(autouse=True)
def something_recorded():
    for number in range(3):
        RECORDER.submit(
            Turn(
                key=RecordKey("0", "task", number),
                prompt_ids=[1, 2],
                response_ids=[3],
                logprobs=[-0.5],
                finish_reason="stop",
            )
        )
    yield
    stats = RECORDER.stats()
    assert stats.errors == 0
    assert stats.started == stats.recorded + sum(stats.dropped.values()) + stats.pending


@schema.parametrize()
def test_no_request_is_a_fault_of_the_server(case):
    for waiting in (case.query, case.body):
        if isinstance(waiting, dict) and "wait_s" in waiting:
            waiting["wait_s"] = 0
    response = case.call(headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    assert response.status_code < 500, response.text
