"""The `/records` routes: what they do, who may use them, and what hostile bodies cannot do."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from safetensors.numpy import load, save

from recorder_core import (
    FinishReason,
    KeyPrefix,
    Record,
    RecordKey,
    Turn,
    assemble,
    decode_records,
    encode_records,
)
from recorder_core.codec import MEDIA_TYPE
from recorder_core.protocol import LEASE_HEADER, PENDING_HEADER
from recorder_core.recorder import Recorder
from recorder_core.server import AdminGuard, IdentityMiddleware, RecorderCollector, records_router
from recorder_core.stores.testing import child, root

ALL = KeyPrefix()
KEY = RecordKey("7", "sum", 0)
OTHER = RecordKey("7", "sum", 1)
ADMIN = {"authorization": "Bearer admin-key"}
ROUTES = {
    ("get", "/records/keys"),
    ("get", "/records"),
    ("patch", "/records"),
    ("put", "/records"),
    ("delete", "/records"),
    ("post", "/records/drain"),
    ("post", "/records/ack"),
    ("post", "/records/block"),
    ("post", "/records/sweep"),
    ("post", "/records/version"),
    ("post", "/records/flush"),
    ("get", "/records/stats"),
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


def connect(app: FastAPI, host: str = "127.0.0.1", **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(host, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://engine", **options)


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


def records_of(response: httpx.Response) -> list[Record]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == MEDIA_TYPE
    return decode_records(response.content)


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


async def test_records_are_listed_as_they_were_stored(client, recorder):
    submit(recorder, [1], [1, 7, 8, 2])
    records = records_of(await client.get("/records", params={"prefix": "7"}))
    assert [(each.parent, each.prompt_ids.tolist()) for each in records] == [
        (None, [1]),
        (records[0].id, [2]),
    ]
    assert records == recorder.store.get(ALL)
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
    assert response.json() == {"updated": 50}
    assert {record.reward for record in recorder.store.get(ALL)} == {0.5}


async def test_a_reward_by_record_id_and_by_token(client, recorder):
    submit(recorder, [1], [2])
    recorder.flush()
    name = recorder.store.get(ALL)[1].id
    body = {"key": str(KEY), "record_ids": [name], "token_level_reward": [0.0, 1.0]}
    assert (await client.patch("/records", json=body)).json() == {"updated": 1}
    untouched, rewarded = recorder.store.get(ALL)
    assert untouched.token_level_reward is None
    assert rewarded.token_level_reward.tolist() == [0.0, 1.0]
    refused = await client.patch("/records", json={**body, "token_level_reward": [1.0]})
    assert refused.status_code == 400
    assert "1 values" in refused.json()["detail"]


async def test_a_reward_for_an_unknown_key_updates_nothing(client):
    response = await client.patch("/records", json={"key": "no/such/0", "reward": 1.0})
    assert (response.status_code, response.json()) == (200, {"updated": 0})


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
    before = recorder.store.get(ALL)
    response = await client.put(
        "/records", params={"key": str(KEY)}, content=encode_records(records)
    )
    assert response.status_code in (400, 409), response.text
    assert recorder.store.get(ALL) == before


async def test_a_turn_does_not_continue_a_record_that_was_replaced(client, recorder):
    submit(recorder, [1])
    (old,) = records_of(await client.get("/records", params={"prefix": ""}))
    edited = old.model_copy(update={"response_ids": np.array([5, 5], dtype=np.int32)})
    await client.put("/records", params={"key": str(KEY)}, content=encode_records([edited]))
    submit(recorder, [1, 7, 8, 2])
    records = records_of(await client.get("/records", params={"prefix": ""}))
    assert [each.tokens.tolist() for each in assemble(records)] == [
        [1, 5, 5],
        [1, 7, 8, 2, 7, 8],
    ]


async def test_a_put_body_is_let_go_of(client, recorder):
    tensors = load(encode_records([root()]))
    padded = tensors["json"].tobytes() + b" " * 10_000_000
    blob = save({**tensors, "json": np.frombuffer(padded, dtype=np.uint8)})
    response = await client.put("/records", params={"key": str(KEY)}, content=blob)
    assert response.status_code == 200
    (record,) = recorder.store.get(ALL)
    kept: Any = record.prompt_ids
    while isinstance(kept, np.ndarray):
        kept = kept.base
    assert len(kept.obj if isinstance(kept, memoryview) else kept) < 10_000


async def test_a_drain_leases_and_an_acknowledgement_ends_it(client, recorder):
    submit(recorder, [1], [2])
    drained = await client.post("/records/drain", json={"prefix": "7"})
    assert len(records_of(drained)) == 2
    assert drained.headers[PENDING_HEADER] == "0"
    assert records_of(await client.post("/records/drain", json={"prefix": "7"})) == []
    lease = drained.headers[LEASE_HEADER]
    for expected in (2, 0):
        assert (await client.post("/records/ack", json={"lease": lease})).json() == {
            "records": expected
        }
    assert (await client.post("/records/ack", json={"lease": "other"})).status_code == 404


async def test_a_lease_that_ran_out_gives_the_records_back(client, recorder):
    submit(recorder, [1])
    drained = await client.post("/records/drain", json={"prefix": "", "lease_s": 0.05})
    await asyncio.sleep(0.1)
    lease = drained.headers[LEASE_HEADER]
    assert (await client.post("/records/ack", json={"lease": lease})).status_code == 404
    again = await client.post("/records/drain", json={"prefix": ""})
    assert records_of(again) == records_of(drained)


async def test_a_drain_waits_for_generations_in_flight(client, recorder):
    pending = recorder.start(KEY)
    other = recorder.start(RecordKey("70", "sum", 0))  # not under the prefix: not waited for
    turn = Turn(key=KEY, prompt_ids=[1], response_ids=[2], finish_reason=FinishReason.STOP)
    threading.Timer(0.2, pending.finish, [turn]).start()
    start = time.monotonic()
    drained = await client.post("/records/drain", json={"prefix": "7", "wait_s": 30})
    assert 0.2 <= time.monotonic() - start < 10
    assert len(records_of(drained)) == 1
    assert drained.headers[PENDING_HEADER] == "0"
    assert recorder.pending(KeyPrefix(str(other.key))) == 1


async def test_a_drain_that_has_waited_says_what_is_still_in_flight(client, recorder):
    held = [recorder.start(KEY) for _ in range(3)]
    submit(recorder, [1])
    drained = await client.post("/records/drain", json={"prefix": "7", "wait_s": 0.1})
    assert len(records_of(drained)) == 1
    assert drained.headers[PENDING_HEADER] == str(len(held))


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
    pending.drop("test")
    assert {response.status_code for response in await asyncio.gather(*waiting)} == {200}


async def test_a_blocked_prefix_takes_no_more(client, recorder):
    submit(recorder, [1])
    assert (await client.post("/records/block", json={"prefix": "7"})).status_code == 204
    submit(recorder, [2])
    assert (await client.post("/records/flush")).json() == {"flushed": True}
    assert recorder.stats().dropped == {"blocked": 1}
    assert len(recorder.store.get(ALL)) == 1


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


async def test_an_engine_without_a_version_to_set_says_so(client):
    response = await client.post("/records/version", json={"version": "42"})
    assert response.status_code == 501
    assert "no weight-version label" in response.json()["detail"]


async def test_stats_are_those_of_recorder_and_store(client, recorder):
    submit(recorder, [1], [1, 7, 8, 2])
    stats = (await client.get("/records/stats")).json()
    assert stats["recorder"] == recorder.stats().model_dump()
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
    for verb in ("GET", "DELETE"):
        assert (await client.request(verb, "/records")).status_code == 422
    assert (await client.post("/records/drain", json={})).status_code == 422


# Who may use them


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
    assert [record.reward for record in recorder.store.get(ALL)] == [None]


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
        # Nothing that a client can write into a request changes who it is.
        spoofed = {"x-forwarded-for": "127.0.0.1", "host": "localhost"}
        response = await client.get("/records/stats", headers=spoofed)
        assert response.status_code == status


async def test_a_unix_socket_is_this_machine(recorder):
    assert await _raw_status(serve(recorder, None), client=None, body=[b"{}"]) == 422


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
    ("PATCH", "/records", {"key": "7/sum/0", "record_ids": ["a"], "token_level_reward": [1.0] * 3}),
    ("POST", "/records/drain", {"prefix": "8", "wait_s": 0.0, "lease_s": 60.0}),
    ("POST", "/records/ack", {"lease": "x"}),
    ("POST", "/records/block", {"prefix": "nothing"}),
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
        body[name] = [_value(rng)] if name == "prefix" else _value(rng)
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
    good = encode_records([first, child(first, "b")])
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
    tensors = load(good)
    document = json.loads(tensors["json"].tobytes())
    item: Any = rng.choice(document["items"])
    names = [*Record.model_fields, "unknown", "\ud800"]
    for _ in range(rng.randrange(1, 3)):
        item[rng.choice(names)] = _value(rng)
    text = _json(document).encode(errors="surrogatepass")
    return save({**tensors, "json": np.frombuffer(text, dtype=np.uint8)})


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
            taken_in[verb] += changed and response.json() != {"updated": 0}
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
    assert encode_records(records) == drained.content
    assert info is None or [record.info for record in records] == [info]
    ack = await client.post("/records/ack", json={"lease": drained.headers[LEASE_HEADER]})
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
    assert samples == {
        "recorder_started_total": 7,
        "recorder_extended_total": 1,
        "recorder_roots_total": 4,
        "recorder_prefix_breaks_total": 1,
        "recorder_superseded_total": 0,
        "recorder_errors_total": 0,
        "recorder_dropped_total empty": 1,
        "recorder_flagged_total logprobs_missing": 1,
        "recorder_unkeyed_total not_a_key": 1,
        "recorder_pending": 1,
        "recorder_store_records": 5,
        "recorder_store_bytes": recorder.store.stats().bytes,
        "recorder_store_fates_total stored": 5,
    }
    in_flight.drop("test")


def test_metrics_outlive_a_closed_store(recorder):
    recorder.store.close()
    samples = _samples(recorder)
    assert samples["recorder_started_total"] == 0
    assert "recorder_store_bytes" not in samples
