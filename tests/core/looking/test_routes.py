"""The routes that the page reads, and the page's own: what they say, and to whom."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from recorder_core import KeyPrefix, RecordKey, Turn
from recorder_core.codec import decode_runs
from recorder_core.recent import Recent
from recorder_core.recorder import Recorder
from recorder_core.server import AdminGuard, PageMiddleware, records_router
from recorder_core.stores import MemoryStore
from recorder_core.view.pieces import NoPiecesError, Pieces

KEY = "7/sum/0"
ADMIN = {"authorization": "Bearer admin-key"}


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(MemoryStore(recent=Recent(1024**2)))
    yield recorder
    recorder.close()


def serve(recorder: Recorder, pieces: Pieces | None = None) -> FastAPI:
    app = FastAPI()
    app.include_router(records_router(recorder, guard=AdminGuard("admin-key"), pieces=pieces))
    return app


def connect(app: FastAPI | PageMiddleware, **options: object) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", **options)


@pytest.fixture
async def client(recorder: Recorder) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(serve(recorder), headers=ADMIN) as client:
        yield client


def submit(recorder: Recorder, *prompts: Sequence[int]) -> None:
    for prompt in prompts:
        recorder.submit(
            Turn(
                key=RecordKey.parse(KEY),
                prompt_ids=prompt,
                response_ids=[7, 8],
                logprobs=[-0.5, -0.25],
                finish_reason="stop",
                created_at=time.time(),
                finished_at=time.time(),
                response_text="<b>hi</b>",
            )
        )
    assert recorder.flush()


async def test_a_forest_tells_of_a_run(client, recorder):
    submit(recorder, [1], [1, 7, 8, 2])
    forest = (await client.get("/records/forest", params={"key": KEY})).json()
    (leaf,) = forest["leaves"]
    assert (leaf["length"], leaf["trained"], leaf["mask"]) == (6, 4, [[1, 3], [4, 6]])
    assert [record["parent"] for record in forest["records"]] == [None, leaf["turns"][0]["id"]]
    assert "response_text" not in forest["records"][0]
    asked = {"key": KEY, "texts": True}
    texts = (await client.get("/records/forest", params=asked)).json()
    assert texts["records"][0]["response_text"] == "<b>hi</b>"


async def test_the_tokens_of_a_leaf_are_plain_arrays(client, recorder):
    submit(recorder, [1, 2])
    forest = (await client.get("/records/forest", params={"key": KEY})).json()
    asked = {"key": KEY, "leaf": forest["leaves"][0]["id"]}
    reply = await client.get("/records/tokens", params=asked)
    assert np.frombuffer(reply.content, "<i4", 4).tolist() == [1, 2, 7, 8]
    assert np.frombuffer(reply.content, "<f4", offset=16).tolist()[2:] == [-0.5, -0.25]
    gone = await client.get("/records/tokens", params={**asked, "leaf": "other"})
    assert gone.status_code == 404
    assert "it may have gone on" in gone.json()["detail"]


async def test_a_run_that_is_not_there_is_said_to_be(client):
    reply = await client.get("/records/forest", params={"key": KEY})
    assert reply.status_code == 404
    assert "nothing is kept of 7/sum/0" in reply.json()["detail"]
    assert (await client.get("/records/forest", params={"key": "7"})).status_code == 400


async def test_a_drained_run_is_still_read_and_never_drained_twice(client, recorder):
    submit(recorder, [1])
    recorder.store.drain(KeyPrefix(), "lease", 60)
    recorder.store.ack("lease")
    forest = (await client.get("/records/forest", params={"key": KEY})).json()
    assert forest["drained"] is True
    assert forest["leaves"][0]["length"] == 3
    plain = await client.get("/records", params={"key": KEY})
    recent = await client.get("/records", params={"key": KEY, "recent": True})
    assert decode_runs(plain.content) == []
    assert [run.key.text for run in decode_runs(recent.content)] == [KEY]
    drained = await client.post("/records/drain", json={"prefix": ""})
    assert decode_runs(drained.content) == []


async def test_what_goes_on_after_a_drain_is_shown_with_what_was_drained(client, recorder):
    submit(recorder, [1])
    recorder.store.drain(KeyPrefix(), "lease", 60)
    submit(recorder, [1, 7, 8, 2])
    forest = (await client.get("/records/forest", params={"key": KEY})).json()
    assert len(forest["records"]) == 2
    assert [leaf["length"] for leaf in forest["leaves"]] == [6]


async def test_news_are_waited_for(client, recorder):
    submit(recorder, [1])
    first = (await client.get("/records/recent")).json()
    assert [each["key"] for each in first["generations"]] == [KEY]
    asked = {"after": first["next"], "wait_s": 30}
    waiting = asyncio.create_task(client.get("/records/recent", params=asked))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    recorder.store.update(RecordKey.parse(KEY), reward=0.5)
    news = (await asyncio.wait_for(waiting, 10)).json()
    assert [(each["key"], each["reward"]) for each in news["runs"]] == [(KEY, 0.5)]
    asked = {"after": news["next"], "wait_s": 0.05}
    assert (await client.get("/records/recent", params=asked)).json()["runs"] == []


async def test_pieces_are_bytes(recorder):
    app = serve(recorder, lambda ids: [bytes([each]) for each in ids])
    async with connect(app, headers=ADMIN) as client:
        reply = await client.post("/records/pieces", json={"ids": [240, 0, 10]})
        assert [base64.b64decode(each) for each in reply.json()["pieces"]] == [
            b"\xf0",
            b"\x00",
            b"\n",
        ]
        for wrong in ({"ids": [-1]}, {"ids": [2**31]}, {"ids": "1"}, {}):
            assert (await client.post("/records/pieces", json=wrong)).status_code == 422


def no_bytes(ids: Sequence[int]) -> list[bytes]:
    raise NoPiecesError("no tokenizer is loaded here")


def breaks(ids: Sequence[int]) -> list[bytes]:
    raise RuntimeError("Already borrowed")


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (None, "no tokenizer to ask"),
        (no_bytes, "no tokenizer is loaded here"),
        (breaks, "Already borrowed"),
    ],
)
async def test_where_bytes_are_not_known_it_is_said_why(recorder, pieces, reason):
    async with connect(serve(recorder, pieces), headers=ADMIN) as client:
        reply = await client.post("/records/pieces", json={"ids": [1]})
        assert reply.status_code == 501
        assert reason in reply.json()["detail"]


async def test_data_is_for_the_holder_of_the_key_and_the_page_for_all(recorder):
    async with connect(serve(recorder)) as client:
        asked = {"key": KEY, "leaf": "a"}
        for path in ("recent", "forest", "tokens"):
            assert (await client.get(f"/records/{path}", params=asked)).status_code == 401
        assert (await client.post("/records/pieces", json={"ids": []})).status_code == 401
        page = await client.get("/records/view")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        script = await client.get("/records/view/app.js")
        assert script.headers["content-type"].startswith("text/javascript")
        for name in ("..%2Fforest.py", "nothing.js", "app.js.map"):
            assert (await client.get(f"/records/view/{name}")).status_code == 404


async def test_the_page_passes_an_engine_that_asks_for_its_key():
    async def engine(scope, receive, send):
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with connect(PageMiddleware(engine)) as client:
        assert (await client.get("/records/view")).status_code == 200
        assert (await client.get("/records/view/style.css")).status_code == 200
        assert (await client.get("/records/keys")).status_code == 401
        assert (await client.post("/records/view")).status_code == 401
