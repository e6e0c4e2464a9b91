"""The `/records` routes: what they do, who may use them, and what hostile bodies cannot do."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import msgspec
import pytest
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from starlette.middleware.cors import CORSMiddleware
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from recorder_core import (
    FinishReason,
    KeyPrefix,
    Record,
    RecordKey,
    Run,
    Turn,
    assemble,
    encode_runs,
)
from recorder_core.codec import MAGIC, MEDIA_TYPE, StreamDecoder
from recorder_core.local import records_of as records_in
from recorder_core.protocol import MAX_BODY_BYTES
from recorder_core.recorder import Recorder
from recorder_core.server import (
    AdminGuard,
    IdentityMiddleware,
    PreflightGuard,
    RecorderCollector,
    records_router,
)
from recorder_core.stores import MemoryStore
from recorder_core.stores.testing import child, root

ALL = KeyPrefix()
KEY = RecordKey("7", "sum", 0)
OTHER = RecordKey("7", "sum", 1)
ADMIN = {"authorization": "Bearer admin-key"}
JSON = {"content-type": "application/json"}
ROUTES = {
    ("get", "/records/keys"),
    ("get", "/records"),
    ("patch", "/records"),
    ("put", "/records"),
    ("delete", "/records"),
    ("post", "/records/drain"),
    ("post", "/records/ack"),
    ("post", "/records/release"),
    ("post", "/records/extend"),
    ("post", "/records/block"),
    ("post", "/records/forget"),
    ("post", "/records/sweep"),
    ("post", "/records/version"),
    ("post", "/records/flush"),
    ("get", "/records/stats"),
    ("get", "/records/recent"),
    ("get", "/records/forest"),
    ("get", "/records/tokens"),
    ("post", "/records/pieces"),
}


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.close()


def serve(
    recorder: Recorder,
    admin_key: str | None = "admin-key",
    set_version: Callable[..., Any] | None = None,
) -> FastAPI:
    app = FastAPI()
    app.include_router(
        records_router(recorder, guard=AdminGuard(admin_key), set_version=set_version)
    )
    app.add_middleware(IdentityMiddleware)
    return app


def connect(app: Any, host: str = "127.0.0.1", **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(host, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8000", **options)


@pytest.fixture
async def client(recorder: Recorder) -> AsyncIterator[httpx.AsyncClient]:
    """Somebody who holds the admin key."""
    async with connect(serve(recorder), headers=ADMIN) as client:
        yield client


def submit(recorder: Recorder, *prompts: list[int], key: RecordKey = KEY) -> None:
    for prompt in prompts:
        recorder.submit(
            Turn(
                key=key,
                prompt_ids=prompt,
                response_ids=[7, 8],
                logprobs=[-0.5, -0.25],
                finish_reason=FinishReason.STOP,
                created_at=time.time(),
                finished_at=time.time(),
            )
        )


class Reply(NamedTuple):
    """What a stream says."""

    lease: str
    pending: int
    runs: list[Run]


def read(response: httpx.Response) -> Reply:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == MEDIA_TYPE
    decoder = StreamDecoder()
    decoder.feed(response.content)
    return Reply(decoder.head.lease, decoder.head.pending, decoder.close())


def records_of(response: httpx.Response) -> list[Record]:
    return records_in(read(response).runs)


def stored(recorder: Recorder) -> list[Record]:
    return records_in(recorder.store.get(ALL))


def stream_of(*records: Record) -> bytes:
    """As a client sends them, whether or not they hang together."""
    return encode_runs([_AnyRun(KEY, records)])


class _AnyRun(Run):
    """Holds what no run does: the same id twice."""

    def __init__(self, key: RecordKey, records: Sequence[Record]) -> None:
        super().__init__(key)
        self._held = {str(number): record for number, record in enumerate(records)}


# What the routes do


async def test_openapi_lists_every_route(client):
    document = (await client.get("/openapi.json")).json()
    listed = {(verb, path) for path, verbs in document["paths"].items() for verb in verbs}
    assert listed == ROUTES
    assert all(document["paths"][path][verb]["description"] for verb, path in ROUTES)
    for verb, path in [("get", "/records"), ("post", "/records/drain")]:
        assert MEDIA_TYPE in document["paths"][path][verb]["responses"]["200"]["content"]
    body = document["paths"]["/records"]["put"]["requestBody"]
    assert MEDIA_TYPE in body["content"]
    body = document["paths"]["/records"]["patch"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["properties"].keys() >= {"key", "reward", "sample_ids"}
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert referred <= document["components"]["schemas"].keys()
    assert "$defs" not in json.dumps(document)


async def test_records_are_listed_as_they_were_stored(client, recorder):
    submit(recorder, [1], [1, 7, 8, 2])
    records = records_of(await client.get("/records", params={"prefix": "7"}))
    assert [(each.parent, each.prompt_ids.tolist()) for each in records] == [
        (None, [1]),
        (records[0].id, [2]),
    ]
    assert records == stored(recorder)
    assert records_of(await client.get("/records", params={"prefix": "70"})) == []


async def test_people_get_assembled_trajectories_as_json(client, recorder):
    submit(recorder, [1], [1, 7, 8, 2])
    response = await client.get(
        "/records", params={"prefix": ""}, headers={"accept": "application/json"}
    )
    assert response.headers["content-type"] == "application/json"
    (trajectory,) = response.json()
    assert trajectory["tokens"] == [1, 7, 8, 2, 7, 8]
    assert trajectory["logprobs"] == [-0.5, -0.25, None, -0.5, -0.25]
    assert trajectory["action_mask"] == [True, True, False, True, True]
    assert [turn["start"] for turn in trajectory["turns"]] == [0, 3]


async def test_keys_tell_counts_and_what_is_in_flight(client, recorder):
    submit(recorder, [1], [2])
    in_flight = [recorder.start(key) for key in (KEY, OTHER, RecordKey("8", "sum", 0))]
    await client.patch("/records", json={"key": str(KEY), "reward": 1.0})
    replies = (await client.get("/records/keys", params={"prefix": "7"})).json()
    assert [
        (each["key"], each["records"], each["rewarded"], each["pending"]) for each in replies
    ] == [("7/sum/0", 2, 2, 1), ("7/sum/1", 0, 0, 1)]
    assert replies[0]["bytes"] == recorder.store.stats().bytes
    assert len(in_flight) == 3


async def test_a_reward_is_written_after_what_has_finished_is_stored(client, recorder):
    submit(recorder, *([number] for number in range(50)))
    response = await client.patch(
        "/records", json={"key": str(KEY), "reward": 0.5, "info": {"env": "math"}}
    )
    assert response.json() == {"updated": 50, "unknown": []}
    (run,) = recorder.store.get(ALL)
    assert (run.reward, run.info) == (0.5, {"env": "math"})


async def test_a_reward_by_record_id_and_by_token(client, recorder):
    submit(recorder, [1], [2])
    recorder.flush()
    name = stored(recorder)[1].id
    body = {"key": str(KEY), "sample_ids": [name], "token_level_reward": [0.0, 1.0]}
    reply = (await client.patch("/records", json=body)).json()
    assert reply == {"updated": 1, "unknown": []}
    untouched, rewarded = stored(recorder)
    assert untouched.token_level_reward is None
    assert rewarded.token_level_reward.tolist() == [0.0, 1.0]
    refused = await client.patch("/records", json={**body, "token_level_reward": [1.0]})
    assert refused.status_code == 400
    assert "1 values" in refused.json()["detail"]


async def test_a_reward_for_an_unknown_key_updates_nothing(client):
    response = await client.patch("/records", json={"key": "no/such/0", "reward": 1.0})
    assert (response.status_code, response.json()["updated"]) == (200, 0)


async def test_a_misspelt_field_is_an_error(client):
    response = await client.patch("/records", json={"key": str(KEY), "rewrad": 1.0})
    assert response.status_code == 422
    assert "rewrad" in response.json()["detail"]


async def test_records_put_are_the_records_got(client, recorder):
    submit(recorder, [1], [1, 7, 8, 2])
    blob = (await client.get("/records", params={"prefix": ""})).content
    await client.delete("/records", params={"prefix": ""})
    response = await client.put("/records", params={"key": str(KEY)}, content=blob)
    assert response.json() == {"records": 2}
    assert (await client.get("/records", params={"prefix": ""})).content == blob


@pytest.mark.parametrize(
    "records",
    [
        [root("a", OTHER)],
        [child(root("absent"), "a")],
        [root("a"), child(root("a", tokens=9), "b")],
        [root("a"), root("a")],
    ],
    ids=["another key", "absent parent", "parent ends elsewhere", "the same id twice"],
)
async def test_a_put_that_does_not_hang_together_changes_nothing(client, recorder, records):
    submit(recorder, [1])
    recorder.flush()
    before = stored(recorder)
    response = await client.put("/records", params={"key": str(KEY)}, content=stream_of(*records))
    assert response.status_code in (400, 409), response.text
    assert stored(recorder) == before


async def test_a_put_that_does_not_fit_the_budget_changes_nothing():
    recorder = Recorder(MemoryStore(100_000))
    submit(recorder, [1])
    recorder.flush()
    before = stored(recorder)
    large = stream_of(root("large", tokens=50_000))
    for body in (large, large[:-1], b""):
        assert (await _put(recorder, body)).status_code == 400
    assert "do not fit the budget of 100000" in (await _put(recorder, large)).json()["detail"]
    assert stored(recorder) == before
    recorder.close()


async def _put(recorder: Recorder, body: bytes) -> httpx.Response:
    async with connect(serve(recorder), headers=ADMIN) as client:
        return await client.put("/records", params={"key": str(KEY)}, content=body)


async def test_a_turn_does_not_continue_a_record_that_was_replaced(client, recorder):
    submit(recorder, [1])
    (old,) = records_of(await client.get("/records", params={"prefix": ""}))
    edited = old.replace(response_ids=[5, 5])
    await client.put("/records", params={"key": str(KEY)}, content=stream_of(edited))
    submit(recorder, [1, 7, 8, 2])
    records = records_of(await client.get("/records", params={"prefix": ""}))
    assert [each.tokens.tolist() for each in assemble(records)] == [
        [1, 5, 5],
        [1, 7, 8, 2, 7, 8],
    ]


async def test_a_body_that_is_too_large_is_refused_with_the_limit(client, recorder):
    """Before it is read whole. E14."""
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'{"key": "7/sum/0", "info": {"a": "'
        while sent < 100 * MAX_BODY_BYTES:
            sent += 65_536
            yield b"x" * 65_536

    for method, path in (("PATCH", "/records"), ("POST", "/records/drain")):
        sent = 0
        refused = await client.request(method, path, content=endless(), headers=JSON)
        assert refused.status_code == 413
        assert str(MAX_BODY_BYTES) in refused.json()["detail"]
        assert sent < 2 * MAX_BODY_BYTES


async def test_a_drain_asked_again_with_its_lease_gives_the_same(client, recorder):
    """S7."""
    submit(recorder, [1], [2])
    body = {"prefix": "7", "lease": "mine"}
    first = await client.post("/records/drain", json=body)
    submit(recorder, [3])
    again = await client.post("/records/drain", json=body)
    assert read(again)[::2] == read(first)[::2]
    assert read(first).lease == "mine"
    other = await client.post("/records/drain", json={"prefix": "", "lease": "mine"})
    assert other.status_code == 404
    assert (await client.post("/records/ack", json={"lease": "mine"})).json() == {"records": 2}
    assert (await client.post("/records/drain", json=body)).status_code == 404
    assert len(stored(recorder)) == 1


async def test_a_released_lease_gives_its_records_back_at_once(client, recorder):
    submit(recorder, [1])
    drained = await client.post("/records/drain", json={"prefix": ""})
    lease = {"lease": read(drained).lease}
    extended = {**lease, "lease_s": 60}
    assert (await client.post("/records/extend", json=extended)).status_code == 204
    assert (await client.post("/records/release", json=lease)).json() == {"records": 1}
    assert (await client.post("/records/release", json=lease)).json() == {"records": 0}
    assert (await client.post("/records/extend", json=extended)).status_code == 404
    assert stored(recorder) == records_of(drained)


async def test_pages_cover_everything_once(client, recorder):
    keys = [RecordKey("7", "sum", run) for run in range(10)]
    for key in keys:
        submit(recorder, [1, 2, 3], key=key)
    found: list[RecordKey] = []
    while True:
        page = await client.post("/records/drain", json={"prefix": "7", "max_bytes": 4_000})
        decoder = StreamDecoder()
        decoder.feed(page.content)
        found += [run.key for run in decoder.close()]
        await client.post("/records/ack", json={"lease": decoder.head.lease})
        if not decoder.head.more:
            break
    assert found == keys


async def test_what_finished_is_counted_once(client, recorder):
    """S5."""
    for round_ in range(50):
        submit(recorder, [round_], [round_, 1])
        (reply,) = (await client.get("/records/keys", params={"prefix": ""})).json()
        assert (reply["records"], reply["pending"]) == (2 * round_ + 2, 0)


async def test_a_run_that_lost_a_turn_says_so(client, recorder):
    """S1."""
    submit(recorder, [1])
    recorder.start(KEY).drop("error")
    recorder.start(KEY).drop("empty")  # no token was sampled: nothing is missing
    (reply,) = (await client.get("/records/keys", params={"prefix": ""})).json()
    assert reply["missing"] == {"error": 1}
    (run,) = read(await client.post("/records/drain", json={"prefix": ""})).runs
    assert run.missing == {"error": 1}


async def test_keys_come_in_pages(client, recorder):
    keys = [RecordKey("7", "sum", run) for run in range(7)]
    for key in keys[::2]:
        submit(recorder, [1], key=key)
    held = [recorder.start(key) for key in keys[1::2]]
    found: list[str] = []
    while True:
        params = {"prefix": "", "limit": 2} | ({"after": found[-1]} if found else {})
        page = (await client.get("/records/keys", params=params)).json()
        found += [each["key"] for each in page]
        if len(page) < 2:
            break
    assert found == [key.text for key in keys]
    assert len(held) == 3


async def test_a_drain_leases_and_an_acknowledgement_ends_it(client, recorder):
    submit(recorder, [1], [2])
    drained = await client.post("/records/drain", json={"prefix": "7"})
    assert len(records_of(drained)) == 2
    assert read(drained).pending == 0
    assert records_of(await client.post("/records/drain", json={"prefix": "7"})) == []
    lease = read(drained).lease
    for expected in (2, 0):
        assert (await client.post("/records/ack", json={"lease": lease})).json() == {
            "records": expected
        }
    assert (await client.post("/records/ack", json={"lease": "other"})).status_code == 404


async def test_a_lease_that_ran_out_gives_the_records_back(client, recorder):
    submit(recorder, [1])
    drained = await client.post("/records/drain", json={"prefix": "", "lease_s": 0.05})
    await asyncio.sleep(0.1)
    lease = read(drained).lease
    assert (await client.post("/records/ack", json={"lease": lease})).status_code == 404
    again = await client.post("/records/drain", json={"prefix": ""})
    assert records_of(again) == records_of(drained)


async def test_a_drain_waits_for_generations_in_flight(client, recorder):
    pending = recorder.start(KEY)
    other = recorder.start(RecordKey("70", "sum", 0))  # not under the prefix: not waited for
    turn = Turn(key=KEY, prompt_ids=[1], response_ids=[2], finish_reason=FinishReason.STOP)
    start = time.monotonic()
    threading.Timer(0.2, pending.finish, [turn]).start()
    drained = await client.post("/records/drain", json={"prefix": "7", "wait_s": 30})
    assert 0.2 <= time.monotonic() - start < 10
    assert len(records_of(drained)) == 1
    assert read(drained).pending == 0
    assert recorder.pending(KeyPrefix(str(other.key))) == 1


async def test_a_drain_that_has_waited_says_what_is_still_in_flight(client, recorder):
    held = [recorder.start(KEY) for _ in range(3)]
    submit(recorder, [1])
    drained = await client.post("/records/drain", json={"prefix": "7", "wait_s": 0.1})
    assert len(records_of(drained)) == 1
    assert read(drained).pending == len(held)


async def test_waiting_drains_do_not_hold_up_other_requests(client, recorder):
    pending = recorder.start(KEY)
    waiting = [
        asyncio.create_task(client.post("/records/drain", json={"prefix": "7", "wait_s": 60}))
        for _ in range(8)
    ]
    await asyncio.sleep(0.05)
    start = time.monotonic()
    assert (await client.get("/records/stats")).status_code == 200
    assert time.monotonic() - start < 1
    pending.drop("rejected")
    assert {response.status_code for response in await asyncio.gather(*waiting)} == {200}


async def test_a_blocked_prefix_takes_no_more(client, recorder):
    submit(recorder, [1])
    assert (await client.post("/records/block", json={"prefix": "7"})).status_code == 204
    submit(recorder, [2])
    assert (await client.post("/records/flush")).json() == {"flushed": True}
    assert recorder.stats().dropped == {"blocked": 1}
    assert len(stored(recorder)) == 1


async def test_forgotten_prefixes_are_empty_and_take_no_more(client, recorder):
    submit(recorder, [1])
    body = {"prefixes": ["7/other", "7/sum", "9"]}
    assert (await client.post("/records/forget", json=body)).json() == {"records": 1}
    submit(recorder, [2])
    assert (await client.post("/records/flush")).json() == {"flushed": True}
    assert recorder.stats().dropped == {"blocked": 1}
    assert stored(recorder) == []


async def test_a_bad_prefix_forgets_none(client, recorder):
    submit(recorder, [1])
    for bad in (["7", "a b"], ["7"] * 1_001, "7"):
        assert (await client.post("/records/forget", json={"prefixes": bad})).status_code == 422
    assert (await client.post("/records/flush")).json() == {"flushed": True}
    assert len(stored(recorder)) == 1
    assert recorder.store.stats().blocked_prefixes == 0


async def test_a_sweep_deletes_the_old(client, recorder):
    submit(recorder, [1])
    assert (await client.post("/records/sweep", json={"older_than_s": 60})).json() == {"records": 0}
    await asyncio.sleep(0.01)
    assert (await client.post("/records/sweep", json={"older_than_s": 0})).json() == {"records": 1}


async def test_a_version_is_handed_to_the_engine(recorder):
    versions = []

    async def set_version(version: str) -> None:
        versions.append(version)

    async with connect(serve(recorder, set_version=set_version), headers=ADMIN) as client:
        assert (await client.post("/records/version", json={"version": "42"})).status_code == 204
        assert (await client.post("/records/version", json={"version": ""})).status_code == 422
    assert versions == ["42"]


@pytest.mark.parametrize("version", [7, 0, -1, 10**255])
async def test_a_version_that_is_an_integer_is_taken_as_its_text(recorder, version):
    """E7."""
    versions = []

    async def set_version(version: str) -> None:
        versions.append(version)

    async with connect(serve(recorder, set_version=set_version), headers=ADMIN) as client:
        reply = await client.post("/records/version", json={"version": version})
        assert reply.status_code == 204
    assert versions == [str(version)]


@pytest.mark.parametrize("version", ["true", "false", "7.0", "7e1", "null", "[7]", "1" * 257])
async def test_a_version_that_is_no_text_and_no_integer_is_refused(recorder, version):
    """E7."""

    async def set_version(version: str) -> None:
        raise AssertionError(version)

    async with connect(serve(recorder, set_version=set_version), headers=ADMIN) as client:
        body = f'{{"version": {version}}}'
        reply = await client.post("/records/version", content=body, headers=JSON)
        assert reply.status_code == 422
        assert "version: " in reply.json()["detail"]


async def test_an_engine_without_a_version_to_set_says_so(client):
    response = await client.post("/records/version", json={"version": "42"})
    assert response.status_code == 501
    assert "no weight-version label" in response.json()["detail"]


async def test_stats_are_those_of_recorder_and_store(client, recorder):
    submit(recorder, [1], [1, 7, 8, 2])
    stats = (await client.get("/records/stats")).json()
    assert stats["recorder"] == dataclasses.asdict(recorder.stats())
    assert stats["recorder"]["extended"] == 1
    assert stats["store"]["records"] == 2


async def test_a_closed_store_is_unavailable(client, recorder):
    recorder.store.close()
    response = await client.get("/records/keys", params={"prefix": ""})
    assert response.status_code == 503


@pytest.mark.parametrize("prefix", ["a//b", "..", "a b", "\ud800", "x" * 60_000], ids=ascii)
async def test_a_bad_prefix_is_refused_with_the_reason(client, prefix):
    query = quote(prefix, errors="surrogatepass")
    for verb in ("GET", "DELETE"):
        response = await client.request(verb, f"/records?prefix={query}")
        assert response.status_code == 400
        assert "key prefix" in response.json()["detail"]


async def test_a_prefix_has_to_be_given(client):
    """Or a whole key, which means that run alone; not both."""
    both = "/records?prefix=7&key=7/sum/0"
    for verb in ("GET", "DELETE"):
        for path in ("/records", both):
            refused = await client.request(verb, path)
            assert refused.status_code == 400
            assert "give either key" in refused.json()["detail"]
    for body in ({}, {"prefix": "7", "key": "7/sum/0"}):
        assert (await client.post("/records/drain", json=body)).status_code == 422


async def test_a_key_means_one_run_and_a_prefix_all_below_it(client, recorder):
    longer = RecordKey.parse("7/sum/0/more/1")
    submit(recorder, [1])
    submit(recorder, [1], key=longer)
    one = await client.get("/records", params={"key": "7/sum/0"})
    assert [each.key for each in records_of(one)] == [KEY]
    below = await client.get("/records", params={"prefix": "7/sum/0"})
    assert [each.key for each in records_of(below)] == [KEY, longer]
    assert (await client.delete("/records", params={"key": "7/sum/0"})).json() == {"records": 1}
    assert [each.key for each in stored(recorder)] == [longer]


# Who may use them


async def test_two_authorization_headers_are_refused(recorder):
    """E16."""
    for guard in (None, "admin-key"):
        for other in (b"admin-key", b"7/sum/0", b""):
            pair = [(b"authorization", b"Bearer admin-key"), (b"authorization", b"Bearer " + other)]
            for headers in (pair, pair[::-1]):
                async with connect(serve(recorder, guard)) as client:
                    response = await client.get("/records/stats", headers=headers)
                assert response.status_code == 400
                assert "send one" in response.json()["detail"]


async def test_an_agents_key_is_no_right(recorder):
    submit(recorder, [1])
    agent_headers = {
        "authorization": f"Bearer {KEY}",
        "x-api-key": "admin-key",
        "x-record-key": str(KEY),
    }
    async with connect(serve(recorder), headers=agent_headers) as agent:
        for verb, path in ROUTES:
            response = await agent.request(verb, path, params={"prefix": "", "key": str(KEY)})
            assert response.status_code == 401, (verb, path)
            assert response.headers["www-authenticate"] == "Bearer"
        body = {"key": str(KEY), "reward": 1.0}
        assert (await agent.patch("/records", json=body)).status_code == 401
    recorder.flush()
    assert [record.reward for record in stored(recorder)] == [None]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Bearer admin-key", 200),
        (b"bearer  admin-key ", 200),
        (b"Bearer admin-key2", 401),
        (b"Bearer admin-ke", 401),
        (b"Bearer ", 401),
        (b"Basic admin-key", 401),
        (b"admin-key", 401),
        (b"Bearer \xff\x00", 401),
    ],
)
async def test_only_the_admin_key_as_a_bearer_token_opens(recorder, header, status):
    async with connect(serve(recorder)) as client:
        response = await client.get("/records/stats", headers={b"authorization": header})
        assert response.status_code == status


@pytest.mark.parametrize("admin_key", ["clé-秘密", " from-the-environment\n"])
async def test_an_admin_key_is_compared_as_the_bytes_that_were_sent(recorder, admin_key):
    async with connect(serve(recorder, admin_key), host="10.0.0.1") as client:
        header = b"Bearer " + admin_key.strip().encode()
        response = await client.get("/records/stats", headers={b"authorization": header})
        assert response.status_code == 200


def test_an_empty_admin_key_is_refused():
    with pytest.raises(ValueError, match="empty"):
        AdminGuard(" ")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.8.8.8", 200),
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("10.0.0.1", 403),
        ("::ffff:10.0.0.1", 403),
        ("0.0.0.0", 403),
        ("localhost.example.org", 403),
        ("", 403),
    ],
)
async def test_without_an_admin_key_only_this_machine_is_served(recorder, host, status):
    async with connect(serve(recorder, None), host=host) as client:
        response = await client.get("/records/stats")
        assert response.status_code == status
        assert status == 200 or "--recording-admin-key" in response.json()["detail"]


async def test_a_unix_socket_is_this_machine(recorder):
    assert await _raw_status(serve(recorder, None), client=None, body=[b"{}"]) == 422


@pytest.mark.parametrize("peer", ["10.0.0.1", "127.0.0.1"])
@pytest.mark.parametrize(
    "header",
    [
        *["x-forwarded-for", "x-forwarded-proto", "X-Original-Forwarded-For", "Forwarded", "Via"],
        *["X-Real-IP", "CF-Connecting-IP", "True-Client-IP", "X-Client-IP"],
    ],
)
async def test_without_an_admin_key_what_a_proxy_passed_on_is_refused(recorder, peer, header):
    """Also where the server takes the proxy's word for the peer's address. E1."""
    app = ProxyHeadersMiddleware(serve(recorder, None), trusted_hosts="*")
    async with connect(app, host=peer) as client:
        response = await client.get("/records/stats", headers={header: "127.0.0.1"})
        assert response.status_code == 403
        assert f"it carries '{header.lower()}'" in response.json()["detail"]
    async with connect(serve(recorder), host=peer, headers=ADMIN) as client:
        response = await client.get("/records/stats", headers={header: "127.0.0.1"})
        assert response.status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *["localhost", "LocalHost:8000", "127.0.0.1", "127.9.9.9:80", "[::1]", "[::1]:65535"],
        "[::ffff:127.0.0.1]:1",
    ],
)
async def test_without_an_admin_key_this_machine_is_asked_by_its_own_names(recorder, host):
    async with connect(serve(recorder, None)) as client:
        assert (await client.get("/records/stats", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *["", "evil.example", "evil.example:8000", "10.0.0.1:8000", "0.0.0.0", "[::]", "[2001::1]"],
        *["localhost.evil.example", "127.0.0.1.evil.example", "evil.example#localhost"],
        *["localhost:8000@evil.example", "evil.example@localhost", "localhost, evil.example"],
        *["127.1", "2130706433", "localhost:", "localhost:8000:1", " localhost", "x" * 5_000],
    ],
)
async def test_without_an_admin_key_a_name_that_was_made_to_mean_this_machine_is_refused(
    recorder, host
):
    """As a page does that points its own name at 127.0.0.1. E2."""
    async with connect(serve(recorder, None)) as client:
        response = await client.get("/records/stats", headers={"host": host})
        assert response.status_code == 403
        assert "ask localhost or 127.0.0.1" in response.json()["detail"]
        assert len(response.text) < 500
    async with connect(serve(recorder), headers=ADMIN) as client:
        assert (await client.get("/records/stats", headers={"host": host})).status_code == 200


async def test_without_an_admin_key_two_hosts_or_none_are_refused(recorder):
    """E2."""
    for headers in ([], [(b"host", b"localhost")] * 2):
        status = await _raw_status(serve(recorder, None), body=[b"{}"], headers=headers)
        assert status == 403


OWN_PAGE = {"host": "localhost:8000", "origin": "http://localhost:8000"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (OWN_PAGE, 200),
        (OWN_PAGE | {"origin": "https://LOCALHOST:8000", "sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        (OWN_PAGE | {"origin": "https://evil.example"}, 403),
        (OWN_PAGE | {"origin": "null"}, 403),
        (OWN_PAGE | {"origin": ""}, 403),
        (OWN_PAGE | {"origin": "http://localhost:3000"}, 403),
        (OWN_PAGE | {"origin": "http://127.0.0.1:8000"}, 403),
        (OWN_PAGE | {"origin": "http://localhost:8000.evil.example"}, 403),
        (OWN_PAGE | {"origin": "file://localhost:8000"}, 403),
        (OWN_PAGE | {"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": ""}, 403),
    ],
)
async def test_without_an_admin_key_another_sites_page_neither_reads_nor_deletes(
    recorder, headers, status
):
    """Nor is it told by a preflight that it may. E2."""
    submit(recorder, [1])
    app = PreflightGuard(
        CORSMiddleware(
            serve(recorder, None), allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
        ),
        AdminGuard(None),
    )
    async with connect(app) as client:
        asked = headers | {"access-control-request-method": "DELETE"}
        if "origin" in headers:
            assert (await client.options("/records", headers=asked)).status_code == status
            assert (await client.options("/v1/models", headers=asked)).status_code == 200
        listed = await client.get("/records/keys", params={"prefix": ""}, headers=headers)
        deleted = await client.delete("/records", params={"prefix": ""}, headers=headers)
        assert (listed.status_code, deleted.status_code) == (status, status)
        assert status == 200 or "web page from" in deleted.json()["detail"]
    assert len(stored(recorder)) == (0 if status == 200 else 1)


async def test_a_page_that_holds_the_admin_key_is_let_in_by_the_key(recorder):
    """From where it comes is between the browser and the engine's own rules. E2."""
    guard = AdminGuard("admin-key")
    app = PreflightGuard(CORSMiddleware(serve(recorder), allow_origins=["*"]), guard)
    page = {"origin": "https://viewer.example", "sec-fetch-site": "cross-site"}
    async with connect(app, host="10.0.0.1", headers=page) as client:
        asked = {"access-control-request-method": "GET"}
        assert (await client.options("/records/stats", headers=asked)).status_code == 200
        assert (await client.get("/records/stats")).status_code == 401
        assert (await client.get("/records/stats", headers=ADMIN)).status_code == 200


async def test_a_body_is_not_read_before_the_key_is_checked(recorder):
    async def endless() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    for verb, path in [(verb, path) for verb, path in ROUTES if verb != "get"]:
        status = await _raw_status(
            serve(recorder), verb.upper(), path, body=endless(), token=b"wrong"
        )
        assert status == 401, (verb, path)


async def _raw_status(
    app: Any,
    verb: str = "PATCH",
    path: str = "/records",
    *,
    body: Any,
    token: bytes = b"",
    client: tuple[str, int] | None = ("127.0.0.1", 1),
    headers: Sequence[tuple[bytes, bytes]] = ((b"host", b"localhost"),),
) -> int:
    chunks = body if hasattr(body, "__anext__") else None
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if chunks is not None:
            return {"type": "http.request", "body": await anext(chunks), "more_body": True}
        return {"type": "http.request", "body": b"".join(body), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": verb,
        "path": path,
        "query_string": b"prefix=&key=7/sum/0",
        "headers": [
            *headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"1000000000000"),
            (b"authorization", b"Bearer " + token),
        ],
        "client": client,
        "server": None,
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
    }
    await app(scope, receive, send)
    return int(sent[0]["status"])


# Hostile bodies


@pytest.mark.parametrize(
    ("verb", "path", "body", "status"),
    [
        ("PATCH", "/records", b'{"key": "7/sum/0", "info": {"a": "' + b"x" * 1_000_000, 422),
        ("PATCH", "/records", b'{"key": "' + b"x" * 1_000_000 + b'"}', 422),
        ("PATCH", "/records", b'{"sample_ids": [' + b"0," * 100_000 + b"0]}", 422),
        ("PATCH", "/records", b'{"info": ' + b"[" * 100_000, None),
        ("PATCH", "/records", b'{"key": "7/sum/0", "\xff\xfe": 1}', None),
        ("PUT", "/records?key=7/sum/0", b"x" * 1_000_000, 400),
        ("PUT", "/records?key=nonsense", stream_of(root()), 400),
        ("GET", "/records?prefix=a//b", b"", 400),
        ("POST", "/records/ack", b'{"lease": "' + b"x" * 1_000_000 + b'"}', 404),
        ("POST", "/records/version", b'{"version": "7"}', 501),
    ],
)
async def test_a_refusal_tells_the_engine_nothing_and_the_client_little(
    recorder, verb, path, body, status
):
    """An engine's own handlers may log what an error is chained to. E13."""
    app = serve(recorder)
    seen: list[Exception] = []

    async def log(request: Request, error: Exception) -> Response:
        seen.append(error)
        return Response(status_code=500)

    for kind in (HTTPException, RequestValidationError, ValueError, TypeError, Exception):
        app.add_exception_handler(kind, log)
    async with connect(app) as client:
        for key, expected in ((b"Bearer wrong", 401), (ADMIN["authorization"], status)):
            headers = JSON | {"authorization": key}
            reply = await client.request(verb, path, content=body, headers=headers)
            assert reply.status_code == expected or (expected is None and reply.status_code < 500)
            assert len(reply.json()["detail"]) <= 2_000
    assert seen == []


_LEAVES: list[Callable[[random.Random], Any]] = [
    lambda _: None,
    lambda _: True,
    lambda r: r.choice([0, 1, -1, 2**31, 2**63, -(2**70), 10**400]),
    lambda r: r.choice([0.5, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324]),
    lambda r: r.choice(["", "7", "7/sum/0", "7/sum/x", "..", "\ud800", "\x00", "x" * 2000, "日本"]),
    lambda r: RAW(r.choice(["1e999", "9" * 5000, "-", "01", "NaN", '"\\ud83d"'])),
]


def _nested(opening: str, depth: int, closing: str) -> str:
    return opening * depth + "1" + closing * depth


class RAW(str):
    """A piece of text that stands in a body as it is."""


def _json(value: Any) -> str:
    if isinstance(value, RAW):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    return json.dumps(value)


def _value(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.random()
    if depth and kind < 0.2:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if depth and kind < 0.4:
        names = ["a", "reward", "\ud800", "", "id"]
        return {rng.choice(names): _value(rng, depth - 1) for _ in range(rng.randrange(4))}
    if kind < 0.45:
        depth = rng.choice([30, 33, 60, 400, 3000])
        opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
        return RAW(_nested(opening, depth, closing))
    return rng.choice(_LEAVES)(rng)


_BODIES: list[tuple[str, str, dict[str, Any]]] = [
    ("PATCH", "/records", {"key": "7/sum/0", "reward": 1.0}),
    ("PATCH", "/records", {"key": "7/sum/0", "info": {"env": "math"}}),
    ("PATCH", "/records", {"key": "7/sum/0", "sample_ids": ["a"], "token_level_reward": [1.0] * 3}),
    ("POST", "/records/drain", {"prefix": "8", "wait_s": 0.0, "lease_s": 60.0}),
    ("POST", "/records/ack", {"lease": "x"}),
    ("POST", "/records/block", {"prefix": "nothing"}),
    ("POST", "/records/forget", {"prefixes": ["nothing"]}),
    ("POST", "/records/sweep", {"older_than_s": 1e6}),
    ("POST", "/records/version", {"version": "1"}),
    ("POST", "/records/flush", {}),
]


def _hostile_json(rng: random.Random) -> tuple[str, str, bytes]:
    verb, path, good = rng.choice(_BODIES)
    body: Any = dict(good)
    kind = rng.random()
    if kind < 0.6 and body:
        name = rng.choice(list(body))
        # A drain or a block of everything is no attack, but would end the test.
        body[name] = [[_value(rng)]] if name.startswith("prefix") else _value(rng)
    elif kind < 0.7:
        body[rng.choice(["x", "\ud800", ""])] = _value(rng)
    elif kind < 0.8:
        body = _value(rng)
    text = _json(body).encode(errors="surrogatepass")
    if kind > 0.9:
        text = text[: rng.randrange(len(text))] + rng.randbytes(rng.randrange(20))
    return verb, path, text


def _hostile_blob(rng: random.Random) -> bytes:
    first = root("a", reward=0.5, info={"env": "math"}, response_text="text")
    good = stream_of(first, child(first, "b"))
    kind = rng.random()
    if kind < 0.15:
        return rng.randbytes(rng.randrange(200))
    if kind < 0.25:
        return good[: rng.randrange(len(good))]
    if kind < 0.4:
        broken = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        return bytes(broken)
    frames = []
    position = len(MAGIC)
    while position < len(good):
        end = position + 4 + int.from_bytes(good[position : position + 4], "little")
        frames.append(msgspec.msgpack.decode(good[position + 4 : end]))
        position = end
    # A value of another kind in a field: what MessagePack can hold at all.
    values = [None, True, 0, -1, 2**63, 0.5, float("nan"), "", "7/sum/0", "x" * 2000, [], [1], {}]
    names = [each.name for each in msgspec.structs.fields(Record)]
    item = rng.choice(frames[1]["runs"][0]["records"])
    for _ in range(rng.randrange(1, 3)):
        item[rng.choice([*names, "unknown"])] = rng.choice(values)
    bodies = [msgspec.msgpack.encode(frame) for frame in frames]
    return MAGIC + b"".join(len(body).to_bytes(4, "little") + body for body in bodies)


async def test_hostile_bodies_cause_no_server_error_and_poison_nothing(recorder):
    rng = random.Random(20)
    types = ["application/json", MEDIA_TYPE, "text/plain", "multipart/form-data", "\xff", ""]
    statuses: Counter[int] = Counter()
    taken_in: Counter[str] = Counter()

    async def set_version(version: str) -> None:
        version.encode()

    async with connect(serve(recorder, set_version=set_version), headers=ADMIN) as client:
        submit(recorder, [1], [1, 7, 8, 2])
        for number in range(2_000):
            kind = rng.choice(types) if rng.random() < 0.2 else "application/json"
            headers = {b"content-type": kind.encode("latin-1")}
            params = {"key": "7/sum/0"}
            if rng.random() < 0.6:
                verb, path, body = _hostile_json(rng)
            else:
                verb, path, body = "PUT", "/records", _hostile_blob(rng)
                if rng.random() < 0.1:
                    params["key"] = rng.choice(["7/sum/1", "x", "7//0", "\x00", "x" * 5000])
            response = await client.request(
                verb, path, content=body, headers=headers, params=params
            )
            statuses[response.status_code] += 1
            assert response.status_code < 500, (verb, path, body, response.text)
            changed = verb in ("PUT", "PATCH") and response.status_code == 200
            taken_in[verb] += changed and response.json().get("updated") != 0
            if changed or number % 50 == 0:
                await _drains(client)
                submit(recorder, [1], [1, 7, 8, 2])
        assert min(taken_in["PUT"], taken_in["PATCH"]) > 20
        assert min(statuses[status] for status in (200, 400, 422)) > 50
        stats = (await client.get("/records/stats")).json()["recorder"]
        assert stats["recorded"] == stats["started"] > 200
        assert stats["errors"] == 0


async def _drains(client: httpx.AsyncClient, info: dict[str, Any] | None = None) -> None:
    """What is under the key can be read by people and programs, drained, and assembled."""
    as_json = {"accept": "application/json"}
    shown = await client.get("/records", params={"prefix": "7"}, headers=as_json)
    assert shown.status_code == 200, shown.text
    drained = await client.post("/records/drain", json={"prefix": "7"})
    records = records_of(drained)
    assert len(json.loads(shown.text, parse_constant=pytest.fail)) == len(assemble(records))
    assert info is None or [run.info for run in read(drained).runs] == [info]
    ack = await client.post("/records/ack", json={"lease": read(drained).lease})
    assert ack.json() == {"records": len(records)}


@pytest.mark.parametrize(
    "info",
    [
        _nested('{"a":', 32, "}"),
        _nested('{"a":', 33, "}"),
        _nested('{"a":', 200, "}"),
        _nested('{"a":', 100_000, "}"),
        '{"a":' + _nested("[", 60, "]") + "}",
        '{"a":NaN}',
        '{"a":[1e999]}',
        '{"a":"\\ud800"}',
        '{"\\ud800":1}',
        '{"a":"\\u0000"}',
        '{"a":' + "9" * 4000 + "}",
        '{"a":' + "9" * 5000 + "}",
        '{"a":' + "9" * 310 + ".0}",
        json.dumps({str(number): number for number in range(20_000)}),
    ],
    ids=lambda text: text[:12],
)
async def test_info_is_refused_or_survives_a_drain(client, recorder, info):
    submit(recorder, [1])
    body = f'{{"key":"7/sum/0","info":{info}}}'
    response = await client.patch(
        "/records", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code in (200, 400, 422), response.text
    await _drains(client, info=json.loads(info) if response.status_code == 200 else {})


# Metrics


def _samples(recorder: Recorder) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(RecorderCollector(recorder))
    # The strict reader: it refuses clashing names and counters that are none.
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_expose_the_counters(recorder):
    submit(recorder, [1], [1, 7, 8, 2], [1, 9, 9], [3])
    recorder.submit(Turn(KEY, [1], [], FinishReason.ABORT))
    recorder.submit(Turn(KEY, [5], [6], FinishReason.STOP))
    recorder.count_unkeyed("not_a_key")
    in_flight = recorder.start(KEY)
    recorder.flush()
    samples = _samples(recorder)
    counted = {name: value for name, value in samples.items() if value and "_seconds" not in name}
    assert counted == {
        "recorder_started_total": 7,
        "recorder_extended_total": 1,
        "recorder_roots_total": 4,
        "recorder_prefix_breaks_total": 1,
        "recorder_dropped_total empty": 1,
        "recorder_flagged_total logprobs_missing": 1,
        "recorder_unkeyed_total not_a_key": 1,
        "recorder_pending": 1,
        "recorder_store_runs": 1,
        "recorder_store_records": 5,
        "recorder_store_bytes": recorder.store.stats().bytes,
        "recorder_store_max_bytes": recorder.store.stats().max_bytes,
        "recorder_store_fates_total stored": 5,
    }
    for name in ("superseded_total", "errors_total", "store_leases", "store_leased_records"):
        assert samples[f"recorder_{name}"] == 0
    in_flight.drop("rejected")


def test_metrics_outlive_a_closed_store(recorder):
    recorder.store.close()
    samples = _samples(recorder)
    assert samples["recorder_started_total"] == 0
    assert "recorder_store_bytes" not in samples
