"""Ten thousand requests that no honest client sends, and an agent that wants what is not its own.

The requests come from a seeded generator: those that carry a record key or junk in its place to
the engine's API, and those that send junk to `/records`, with the admin key and without.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from examples.vllm_server import VLLMServer
from recorder_core.client import RecordClient
from recorder_core.recorder import RecorderStats
from tests.models import tiny_qwen3
from tests.vllm.apis import PROMPT, ask, completions, only, settle
from tests.vllm.conftest import ADMIN_KEY, ENV, SERVING, lora_arguments

Keys = Callable[[], str]

CONNECTIONS = 16
ANSWER_WITHIN_S = 30
GENERATIONS, API_REQUESTS, RECORDS_REQUESTS = 600, 2_400, 7_000
HUGE = 300_000
RECORDED = "recorded"

# What may stand where a record key belongs, and what becomes of the generation.
CREDENTIALS: list[tuple[bytes | None, str]] = [
    (None, "missing"),
    (b"", "missing"),
    (b"EMPTY", "not_a_key"),
    (b"none", "not_a_key"),
    (b"sk-abc", "not_a_key"),
    (b"sk-proj-0123456789abcdefghijklmnopqrstuvwxyz", "not_a_key"),
    (b"..", "not_a_key"),
    (b"null undefined", "not_a_key"),
    ("schlüssel".encode(), "not_a_key"),
    (b"x" * 5_000, "not_a_key"),
    (b"a/b", "malformed"),
    (b"/", "malformed"),
    (b"//1", "malformed"),
    (b"a//1", "malformed"),
    (b"../..", "malformed"),
    (b"../../1", "malformed"),
    (b"a/./1", "malformed"),
    (b"a b/c/1", "malformed"),
    (b"hostile/%2e%2e/1/", "malformed"),
    ("bündel/aufgabe/1".encode(), "malformed"),
    ("批/任务/1".encode(), "malformed"),
    (b"a/\xff\xfe/1", "malformed"),
    (b"a/b/", "malformed"),
    (b"a/b/..", "malformed"),
    (b"K:", "not_a_key"),
    (b"x/" * 2_000 + b"1", "malformed"),
    (b"hostile/task/1", RECORDED),
    (b"hostile/named/x", RECORDED),
    (b"hostile/named/-1", RECORDED),
    (b"hostile/named/01", RECORDED),
    (b"hostile/named/1e3", RECORDED),
    (b"hostile/named/" + b"9" * 40, RECORDED),
    (b"hostile/named/1:" + b"K", RECORDED),
    (b"hostile/named/3f2a51c0-77aa-4b1e-9c2d-0123456789ab", RECORDED),
    (b"hostile/deep/er/and/deeper/2", RECORDED),
    (b"hostile/<script>/3", RECORDED),
    (b"hostile/';DROP/4", RECORDED),
    (b"K:hostile/composite/5", RECORDED),
]

# What vLLM itself makes of ids: of the steps of a beam search, samples of one request, scores.
INTERNAL_IDS = [b"search-beam-3", b"0_cmpl-1-0", b"cmpl-1-0-beam-0", b"generative-scoring-1-0"]


@dataclass(frozen=True)
class Raw:
    """A request as it goes over the wire."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    fate: str = ""
    """What becomes of the generation, where it is one."""

    @cached_property
    def wire(self) -> bytes:
        lines = [self.method.encode() + b" " + self.target + b" HTTP/1.1", b"host: hostile"]
        lines += [name + b": " + value for name, value in self.headers]
        if self.body or self.method in ("POST", "PUT", "PATCH"):
            lines.append(b"content-length: " + str(len(self.body)).encode())
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


@dataclass(frozen=True)
class Answer:
    """The end of a request."""

    status: int
    """0: the connection was closed without an answer, as servers do to what is no HTTP."""
    headers: dict[bytes, bytes]
    body: bytes


class Connection:
    """One kept-alive connection, opened anew when the server closes it. As fast as it goes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: Raw) -> Answer:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._streams
            try:
                writer.write(request.wire)
                answer = await self._answer(reader, request.method)
            except (ConnectionError, asyncio.IncompleteReadError):
                # Refused in the middle: the answer may be lost, as the rest is still being sent.
                answer = Answer(0, {}, b"")
        # After a fault of its own the server closes without saying so.
        closed = answer.headers.get(b"connection", b"").lower() == b"close"
        if closed or answer.status == 0 or answer.status >= 500:
            await self.close()
        return answer

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    @staticmethod
    async def _answer(reader: asyncio.StreamReader, method: str) -> Answer:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.rstrip().split(b"\r\n")
        pairs = (line.split(b":", 1) for line in lines)
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        status, body = int(first.split()[1]), b""
        if method != "HEAD" and status not in (204, 304):
            if headers.get(b"transfer-encoding") == b"chunked":
                while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
                    body += await reader.readexactly(size + 2)
                await reader.readuntil(b"\r\n")
            else:
                body = await reader.readexactly(int(headers.get(b"content-length", 0)))
        return Answer(status, headers, body)


def send_all(port: int, requests: Iterable[Raw]) -> list[tuple[Raw, Answer]]:
    """Send requests over a few connections at once."""
    answered: list[tuple[Raw, Answer]] = []

    async def worker(waiting: Iterator[Raw]) -> None:
        connection = Connection(port)
        answered.extend([(request, await connection.send(request)) for request in waiting])
        await connection.close()

    async def main() -> None:
        waiting = iter(list(requests))
        await asyncio.gather(*(worker(waiting) for _ in range(CONNECTIONS)))

    asyncio.run(main())
    return answered


def junk(rng: random.Random, length: int) -> bytes:
    return bytes(rng.randrange(256) for _ in range(length))


def header_junk(rng: random.Random) -> bytes:
    """Bytes that a header may hold."""
    return bytes(rng.choice(range(33, 256)) for _ in range(rng.randrange(1, 60)))


def credential_headers(rng: random.Random, credential: bytes | None) -> list[tuple[bytes, bytes]]:
    """One of the ways to send a credential."""
    if credential is None:
        return rng.choice(
            [[], [(b"authorization", b"Basic dTpw")], [(b"authorization", b"Bearer")]]
        )
    return rng.choice(
        [
            [(b"authorization", b"Bearer " + credential)],
            [(b"Authorization", b"bearer   " + credential)],
            [(b"x-api-key", credential)],
            [(b"x-record-key", credential)],
        ]
    )


def generations(rng: random.Random) -> Iterator[Raw]:
    """Valid requests for one token each."""
    body = {"model": "model", "prompt": "0", "max_tokens": 1, "temperature": 0}
    for number in range(GENERATIONS):
        credential, fate = CREDENTIALS[number % len(CREDENTIALS)]
        if credential is not None and credential.startswith(b"K:"):
            # The server has no key K of its own: all of it is the record key's first part.
            fate = "not_a_key" if credential == b"K:" else RECORDED
        headers = credential_headers(rng, credential)
        headers.append((b"content-type", b"application/json"))
        if rng.random() < 0.2:
            retry = rng.choice([b"1", b"-1", b"1e9", b"9" * 400, b"\xb2", b"", b"NaN"])
            headers.append((b"x-stainless-retry-count", retry))
        if rng.random() < 0.3:
            headers.append((b"x-request-id", rng.choice(INTERNAL_IDS)))
        yield Raw("POST", b"/v1/completions", tuple(headers), json.dumps(body).encode(), fate=fate)


def api_requests(rng: random.Random) -> Iterator[Raw]:
    """Requests to the engine's API that generate nothing."""
    targets = [b"/v1/models", b"/health", b"/version", b"/v1/completions", b"/v1/chat/completions"]
    targets += [b"/v1/responses", b"/v1/messages", b"/tokenize", b"/nowhere", b"/v1/../records"]
    bodies = [b"", b"{", b"[]", b"null", b'{"model": 1}', b'{"messages": []}', b'{"prompt": null}']
    bodies += [b'{"model": "model", "messages": [{"role": "x"}], "max_tokens": -1}']
    bodies += [b'{"model": "nobody", "prompt": "0"}', b"[" * 500, b'{"a": "' + b"\xff" * 50 + b'"}']
    for number in range(API_REQUESTS):
        credential = rng.choice(CREDENTIALS)[0] if rng.random() < 0.7 else header_junk(rng)
        headers = credential_headers(rng, credential)
        for _ in range(rng.randrange(3)):
            headers += credential_headers(rng, header_junk(rng))
        if number % 400 == 0:
            headers.append((b"authorization", b"Bearer " + b"h" * HUGE))
        if number % 100 == 1:
            headers.append((b"authorization", b"Bearer a/\x00/1"))
        body = rng.choice([*bodies, junk(rng, rng.randrange(200))])
        headers.append((b"content-type", rng.choice([b"application/json", b"text/plain", b"\xff"])))
        yield Raw(
            rng.choice(["GET", "POST", "POST", "HEAD"]), rng.choice(targets), (*headers,), body
        )


# Each route, its method, and a body that it takes.
RECORDS_ROUTES: list[tuple[str, str, dict[str, object]]] = [
    ("", "GET", {}),
    ("", "PATCH", {"key": "hostile/task/1", "reward": 1.0, "info": {"a": 1}}),
    ("", "PUT", {}),
    ("", "DELETE", {}),
    ("/keys", "GET", {}),
    ("/drain", "POST", {"prefix": "hostile", "wait_s": 0.01, "lease_s": 1.0}),
    ("/ack", "POST", {"lease": "0123456789abcdef"}),
    ("/block", "POST", {"prefix": "hostile"}),
    ("/forget", "POST", {"prefixes": ["hostile"]}),
    ("/sweep", "POST", {"older_than_s": 1e6}),
    ("/version", "POST", {"version": "hostile"}),
    ("/flush", "POST", {}),
    ("/stats", "GET", {}),
]
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "get"]


def value_junk(rng: random.Random) -> object:
    """What a field may hold; a prefix among them never matches another test's records."""
    return rng.choice(
        [
            *["hostile", "hostile/task/1", "hostile/", "a//b", "..", "\x00", "\ud800", "é" * 700],
            *[None, True, -1, 0, 1, 0.01, 1e308, -1e-9, 10**30, [], {}, [None], {"a": [[]]}],
            *["x" * 100_000, "1e400", "NaN", {"hostile": "x"}, ["hostile/task/1"] * 50],
        ]
    )


def records_body(rng: random.Random, fields: dict[str, object]) -> bytes:
    kind = rng.random()
    if kind < 0.1:
        return junk(rng, rng.randrange(300))
    if kind < 0.2:
        # A safetensors header that promises too much.
        return rng.randrange(1 << 63).to_bytes(8, "little") + b'{"x": {"dtype": "F32"}}'
    if kind < 0.25:
        return b'{"info": ' + b"[" * 3_000 + b"]" * 3_000 + b"}"
    if kind < 0.3:
        return b'{"key": "hostile/task/1", "reward": ' + rng.choice([b"NaN", b"1e999"]) + b"}"
    names = ["reward", "sample_ids", "info", "token_level_reward", "rewrad", *fields]
    wrong = {name: value_junk(rng) for name in rng.sample(names, rng.randrange(3))}
    return json.dumps({**fields, **wrong}).encode()


def records_requests(rng: random.Random) -> Iterator[Raw]:
    """Junk to every route of `/records`, half of it with the admin key."""
    for _ in range(RECORDS_REQUESTS):
        route, method, fields = rng.choice(RECORDS_ROUTES)
        if rng.random() < 0.2:
            method = rng.choice(METHODS)
        query = rng.choice(
            [
                *["?prefix=hostile"] * 5,
                *["", "?prefix=hostile&prefix=..", "?key=hostile/task/1"],
                *["?prefix=%00", "?prefix=%ff%fe", "?prefix=" + "x" * 3_000, "?prefix=%2e%2e%2f"],
                f"?prefix={quote(junk(rng, 20))}",
                f"?key={quote(junk(rng, 20))}&prefix=hostile",
            ]
        )
        tail = rng.choice(["/", "//", "/..", "/%2e", "/%00", "%20", ";x", "/keys"])
        tail = tail if rng.random() < 0.2 else ""
        headers: list[tuple[bytes, bytes]] = []
        if rng.random() < 0.5:
            headers.append((b"authorization", f"Bearer {ADMIN_KEY}".encode()))
        else:
            headers += credential_headers(
                rng, rng.choice([*CREDENTIALS, (header_junk(rng), "")])[0]
            )
        content_type = [b"application/json", b"application/vnd.safetensors", b"text/plain", b"\xff"]
        accept = [
            b"application/json",
            b"*/*",
            b"text/html",
            b"\xff",
            b"application/vnd.safetensors",
        ]
        headers.append((b"content-type", rng.choice(content_type)))
        headers.append((b"accept", rng.choice(accept)))
        target = f"/records{route}{tail}{query}".encode()
        yield Raw(method, target, tuple(headers), records_body(rng, fields))


@pytest.fixture(scope="module")
def port_without_recording(log_folder: Path) -> Iterator[Callable[[], int]]:
    """The port of a server like the recording one but for the flag; started when it is asked."""
    with ExitStack() as stack:

        @cache
        def port() -> int:
            args = [*SERVING, *lora_arguments()]
            log = log_folder / "stock.log"
            return stack.enter_context(VLLMServer(tiny_qwen3(), *args, env=ENV, log=log)).port

        yield port


def stats_of(client: RecordClient) -> RecorderStats:
    settle(client)
    return client.stats()[client.urls[0]].recorder


def added(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return dict(Counter(after) - Counter(before))


def test_whatever_stands_for_a_key_is_served_as_without_recording_and_counted(
    recording_server: VLLMServer,
    record_client: RecordClient,
    port_without_recording: Callable[[], int],
) -> None:
    rng = random.Random(0)
    requests = [*generations(rng), *api_requests(rng)]
    rng.shuffle(requests)
    before = stats_of(record_client)
    answers = send_all(recording_server.port, requests)
    after = stats_of(record_client)

    assert len(answers) == GENERATIONS + API_REQUESTS
    faults = [request for request, answer in answers if answer.status >= 500]
    if faults:
        stock = send_all(port_without_recording(), faults)
        assert [(request, answer) for request, answer in stock if answer.status < 500] == []
    # What is no HTTP, or too much of it, may be cut off.
    cut_off = [request for request, answer in answers if answer.status == 0]
    whole = [each for each in cut_off if b"\x00" not in each.wire and len(each.wire) < HUGE]
    # A server may close a connection in the moment that it is used again: asked anew, it answers.
    again = send_all(recording_server.port, whole)
    assert [request for request, answer in again if answer.status == 0] == []

    fates = Counter(request.fate for request, answer in answers if answer.status == 200)
    refused = [(each, answer) for each, answer in answers if each.fate and answer.status != 200]
    assert refused == []
    assert after.started - before.started == fates[RECORDED]
    assert after.recorded - before.recorded == fates[RECORDED]
    assert added(before.unkeyed, after.unkeyed) == {
        reason: fates[reason] for reason in ("missing", "not_a_key", "malformed")
    }
    assert after.dropped == before.dropped
    assert (after.pending, after.errors) == (0, before.errors)
    # Each under its own key, and still to be drained.
    sent = {fate_key(each) for each in requests if each.fate == RECORDED}
    with record_client.drain("hostile") as drained, record_client.drain("K:hostile") as composite:
        records = [*drained.records, *composite.records]
    assert {str(record.key) for record in records} == sent
    assert len(records) == fates[RECORDED]
    assert record_client.keys("hostile") == []


def fate_key(request: Raw) -> str:
    """The record key that a generation is sent with."""
    names = (b"x-record-key", b"authorization", b"x-api-key")
    (value,) = (value for name, value in request.headers if name.lower() in names)
    return value.decode().split(" ")[-1]


def test_junk_to_the_records_is_refused_and_nothing_else(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    key = fresh_key()
    request = completions(PROMPT, max_tokens=3, temperature=0, ignore_eos=True)
    ask(recording_server, key, request)
    before = stats_of(record_client)
    requests = list(records_requests(random.Random(1)))
    answers = send_all(recording_server.port, requests)
    try:
        assert len(answers) == RECORDS_REQUESTS
        assert [(each, answer) for each, answer in answers if answer.status >= 500] == []
        for each, answer in answers:
            asked = (b"authorization", f"Bearer {ADMIN_KEY}".encode()) in each.headers
            if not asked and each.method != "OPTIONS":
                assert answer.status not in range(200, 300), (each, answer)
        # Not all of it was refused at the door.
        statuses = Counter(answer.status for _, answer in answers)
        assert min(statuses[code] for code in (200, 204, 400, 401, 404, 405, 422)) > 10
        after = stats_of(record_client)
        assert after == before
    finally:
        record_client.set_version("default")
    # Still at work: recording, rewarding and draining.
    ask(recording_server, key, request)
    assert record_client.update_reward(key, 1.0) == len(record_client.get(key)) > 0
    with record_client.drain(key) as drained:
        assert {each.reward for each in drained.experiences} == {1.0}
    assert record_client.get(key) == []


def break_ins(own: str, victim: str) -> Iterator[Raw]:
    """What an agent may try that holds its record key and nothing else."""
    own_key = f"Bearer {own}".encode()
    credentials = [
        [(b"authorization", own_key)],
        [(b"x-record-key", own.encode())],
        [(b"x-api-key", own.encode())],
        [],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer null"), (b"authorization", own_key)],
        [(b"authorization", own_key), (b"x-forwarded-for", b"127.0.0.1")],
        [(b"authorization", own_key), (b"forwarded", b"for=127.0.0.1"), (b"x-real-ip", b"::1")],
        [(b"authorization", own_key), (b"x-http-method-override", b"PATCH")],
        [(b"authorization", own_key), (b"x-original-url", b"/v1/models"), (b"host", b"localhost")],
        [(b"authorization", own_key), (b"x-forwarded-prefix", b"/v1"), (b"upgrade", b"h2c")],
        [(b"authorization", b"Bearer " + own_key)],
        [(b"authorization", b"Basic " + own.encode())],
        [(b"authorization", ADMIN_KEY.upper().encode()), (b"cookie", b"admin=1")],
        [(b"authorization", f"Bearer {ADMIN_KEY[:-1]}".encode())],
    ]
    roots = ["/records", "//records", "/records/", "/%72ecords", "/%2frecords", "/RECORDS"]
    roots += ["/records%20", "/records;a=b", "/./records", "/v1/../records", "/v1/%2e%2e/records"]
    roots += ["/records%2f", "/records%00", "http://127.0.0.1/records", "/v1/records", "/records\\"]
    bodies = {"key": victim, "reward": 9.0}, {"key": own, "reward": 9.0}, {"prefix": ""}
    calls = [
        ("GET", f"?prefix={victim}", {}),
        ("GET", "?prefix=", {}),
        ("GET", "/keys?prefix=", {}),
        ("GET", "/stats", {}),
        ("PATCH", "", bodies[0]),
        ("PATCH", "", bodies[1]),
        ("POST", "", bodies[1]),
        ("POST", "/drain", bodies[2]),
        ("POST", "/block", bodies[2]),
        ("POST", "/forget", {"prefixes": [victim]}),
        ("POST", "/version", {"version": "mine"}),
        ("PUT", f"?key={own}", {}),
        ("DELETE", "?prefix=", {}),
        ("HEAD", "?prefix=", {}),
        ("TRACE", "?prefix=", {}),
    ]
    for root in roots:
        for method, path, body in calls:
            for headers in credentials:
                json_type = (b"content-type", b"application/json")
                target, data = (root + path).encode(), json.dumps(body).encode() if body else b""
                yield Raw(method, target, (*headers, json_type), data)


def test_an_agent_with_its_record_key_can_neither_read_a_record_nor_write_a_reward(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    own, victim = fresh_key(), fresh_key()
    request = completions(PROMPT, max_tokens=3, temperature=0, ignore_eos=True)
    for key in (own, victim):
        ask(recording_server, key, request)
    held = {key: record_client.get(key) for key in (own, victim)}
    answers = send_all(recording_server.port, break_ins(own, victim))
    # Refused, or there is no such route; a redirect leads to another refusal.
    assert {answer.status for _, answer in answers} <= {307, 400, 401, 404, 405}
    for each, answer in answers:
        assert victim.encode() not in answer.body, (each, answer)
        assert only(held[victim]).id.encode() not in answer.body, (each, answer)
    assert {key: record_client.get(key) for key in (own, victim)} == held
    # What was tried was worth trying: the same call with the admin key goes through.
    admin = (b"authorization", f"Bearer {ADMIN_KEY}".encode())
    ((_, answer),) = send_all(
        recording_server.port, [Raw("GET", f"/records?prefix={victim}".encode(), (admin,))]
    )
    assert answer.status == 200
    assert only(held[victim]).id.encode() in answer.body


@pytest.fixture(scope="module")
def keyless_server(log_folder: Path) -> Iterator[VLLMServer]:
    """Without an admin key, and as open as an operator can make it by mistake.

    It takes every proxy's word for the peer, lets pages of every origin in, and logs the stacks of
    errors.
    """
    env = {**ENV, "RECORDER_ADMIN_KEY": None, "FORWARDED_ALLOW_IPS": "*"}
    args = ["--enable-recording", *SERVING, "--allowed-origins", '["*"]']
    with VLLMServer(tiny_qwen3(), *args, env=env, log=log_folder / "keyless.log") as server:
        yield server


# What browsers and proxies add, and the programs of this machine do not.
STRANGERS: list[dict[str, str]] = [
    {"x-forwarded-for": "127.0.0.1"},
    {"x-forwarded-for": "10.9.8.7"},
    {"forwarded": "for=127.0.0.1"},
    {"via": "1.1 proxy"},
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
    {"origin": "null"},
    {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site"},
    {"host": "evil.example"},
    {"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"},
]


@pytest.mark.parametrize("headers", STRANGERS, ids=str)
def test_without_an_admin_key_strangers_neither_list_nor_delete(
    keyless_server: VLLMServer, fresh_key: Keys, headers: dict[str, str]
) -> None:
    """A page of another origin, a name made to point here, and what a proxy passed on. E1, E2."""
    key, records = fresh_key(), f"{keyless_server.base_url}/records"
    ask(keyless_server, key, completions(PROMPT, max_tokens=3, ignore_eos=True))
    with RecordClient(keyless_server.base_url) as client:
        (record,) = client.get(key)
        for method, url, fields in [
            ("GET", f"{records}?prefix={key}", {}),
            ("GET", f"{records}/keys?prefix=", {}),
            ("DELETE", f"{records}?prefix={key}", {}),
            ("POST", f"{records}/drain", {"json": {"prefix": key}}),
            ("PATCH", records, {"json": {"key": key, "reward": 9.0}}),
        ]:
            reply = httpx.request(method, url, headers=headers, **fields)
            assert reply.status_code == 403
            assert "--recording-admin-key" in reply.json()["detail"]
            assert key not in reply.text
        if "origin" in headers:
            asked = {**headers, "access-control-request-method": "DELETE"}
            assert httpx.options(records, headers=asked).status_code == 403
            assert httpx.options(f"{keyless_server.base_url}/v1/models", headers=asked).is_success
        assert client.get(key) == [record]
        assert client.update_reward(key, 1.0) == 1


def test_a_refusal_is_a_line_in_the_log_whatever_the_body_was(keyless_server: VLLMServer) -> None:
    """With the engine's log of error stacks on. E13."""
    records = f"{keyless_server.base_url}/records"
    bodies = [
        b'{"key": "0/task/1", "info": {"a": "' + b"SECRET " * 1_000_000,
        b'{"key": "0/task/1", "sample_ids": "' + b"SECRET " * 1_000_000 + b'"}',
        b'{"key": "0/task/1", "sample_ids": [' + b"0," * 100_000 + b"0]}",
    ]
    before = len(keyless_server.log())
    for body in bodies:
        reply = httpx.patch(
            records, content=body, headers={"content-type": "application/json"}, timeout=60
        )
        assert reply.status_code == (413 if len(body) > 2 * 1024**2 else 422)
        assert len(reply.content) < 3_000
    assert httpx.put(f"{records}?key=0/task/1", content=bodies[0]).status_code == 400
    assert httpx.get(f"{records}/keys?prefix=a//b").status_code == 400
    assert httpx.get(f"{records}/stats", headers={"host": "evil.example"}).status_code == 403
    added = keyless_server.log()[before:]
    assert "Traceback" not in added
    assert "SECRET" not in added
    assert len([line for line in added.splitlines() if "/records" in line]) == 6
    assert max(map(len, added.splitlines())) < 300


def test_what_is_served_and_not_recorded_is_told_once(keyless_server: VLLMServer) -> None:
    """E6."""
    request = completions(PROMPT, max_tokens=2, ignore_eos=True)
    before = len(keyless_server.log())
    for _ in range(5):
        ask(keyless_server, "0/task-with-no-run-3f2a51c0", request)
        ask(keyless_server, "sk-0123456789abcdef", request)
    added = keyless_server.log()[before:]
    told = [line for line in added.splitlines() if "served and not recorded" in line]
    assert len(told) == 2, added
    assert "(malformed): '0/task...' is no record key" in told[0]
    assert "(not_a_key)" in told[1]
    assert "sk-0" not in added


def test_an_agent_cannot_name_another_run_in_its_request(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    own, victim = fresh_key(), fresh_key()
    request = completions(
        PROMPT, max_tokens=3, ignore_eos=True, vllm_xargs={"record_key": victim}, user=victim
    )
    ask(recording_server, own, request)
    ask(recording_server, "sk-no-key", request)
    assert len(record_client.get(own)) == 1
    assert record_client.get(victim) == []
