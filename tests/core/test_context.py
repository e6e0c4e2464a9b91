"""Whom a request is recorded for: credentials, their precedence, and who sees which identity."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from recorder_core import RecordKey
from recorder_core.context import (
    Identity,
    current_identity,
    identify,
    record_key,
    skip_recording,
)
from recorder_core.errors import InvalidKeyError
from recorder_core.recorder import Recorder
from recorder_core.server import IdentityMiddleware

KEY = RecordKey.parse("12/task-7/3")
JUNK = {
    "": "missing",
    "EMPTY": "not_a_key",
    "sk-abc": "not_a_key",
    "x" * 300_000: "not_a_key",
    "a/b": "malformed",
    "a/b/..": "malformed",
    "a/b/" + "9" * 509: "malformed",
    "a//0": "malformed",
    "/a/0": "malformed",
    "a/b/0/": "malformed",
    "../../0": "malformed",
    "a/../0": "malformed",
    "../..": "malformed",
    "a b/c/0": "malformed",
    "ключ/задача/0": "malformed",
    "a/\x00/0": "malformed",
    "a/b/0\n": "malformed",
    "a/" * 150_000 + "0": "malformed",
}


@pytest.mark.parametrize(("text", "reason"), JUNK.items(), ids=[repr(text[:12]) for text in JUNK])
def test_what_is_no_record_key_is_named_by_its_reason(text, reason):
    assert identify(text) == Identity(None, reason)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0/task", "'0/task'"),
        ("0/task-3f2a5c1e", "'0/task...'"),
        ("wJalrXUtnFEMI/K7MDENGbPxRfiCY", "'wJal.../K7MD...'"),
        ("a/b/\x1b[2J\n", "'a/b/\\x1b[2J\\n'"),
        ("ключ/0/1", "'\\u043a\\u043b\\u044e\\u0447/0/1'"),
        ("a/" * 150_000 + "0", "'" + "a/" * 30 + "...'"),
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_of_a_malformed_key_so_much_is_shown_as_is_safe(text, shown):
    """E6."""
    assert identify(text).detail == f"{shown} is no record key"


def test_a_record_key_is_an_identity():
    assert identify("0/eval_short/1/0") == Identity(RecordKey("0/eval_short", "1", 0))
    assert identify("0/task/3f2a51c0") == Identity(RecordKey("0", "task", "3f2a51c0"))


@pytest.mark.parametrize(("given", "believed"), [(0, 0), (2, 2), (-3, 0), (10**30, 100)])
def test_a_retry_count_is_believed_within_reason(given, believed):
    assert identify("a/b/0", given).attempt == believed


def test_blocks_nest_and_restore_what_was_in_force():
    assert current_identity() is None
    with record_key("a/b/0") as outer:
        with skip_recording():
            assert current_identity() == Identity(None, "skipped")
            with record_key(RecordKey("c", "d", 1)):
                assert current_identity().key == RecordKey("c", "d", 1)
            assert current_identity() == Identity(None, "skipped")
        assert current_identity().key == outer == RecordKey("a", "b", 0)
    assert current_identity() is None


def test_an_exception_does_not_leave_the_identity_behind():
    with pytest.raises(ZeroDivisionError), record_key("a/b/0"):
        1 / 0  # noqa: B018
    assert current_identity() is None


def test_recording_under_what_is_no_key_is_refused():
    with pytest.raises(InvalidKeyError, match="sk-abc"), record_key("sk-abc"):
        pass


async def test_an_identity_follows_tasks_and_threads_that_copy_the_context():
    with record_key("a/b/0") as key:
        task = asyncio.create_task(asyncio.to_thread(current_identity))
    assert (await task).key == key
    assert await asyncio.to_thread(current_identity) is None


# The middleware


class Engine:
    """An engine's app: notes what it sees of each request, and whom it would record."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        self.identities: list[Identity | None] = []
        self.headers: dict[bytes, bytes] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        identity = current_identity()
        self.identities.append(identity)
        self.headers = dict(scope.get("headers", ()))
        if self.recorder is not None and identity is not None and identity.key is None:
            self.recorder.count_unkeyed(identity.reason)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})


async def ask(app: Any, *headers: tuple[bytes, bytes], kind: str = "http") -> int | None:
    sent = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": kind, "path": "/v1/x", "headers": list(headers)}, receive, send)
    return sent[0]["status"] if sent else None


async def identity_of(*headers: tuple[bytes, bytes], api_keys: tuple[str, ...] = ()) -> Identity:
    engine = Engine()
    assert await ask(IdentityMiddleware(engine, api_keys), *headers) == 200
    assert current_identity() is None
    (identity,) = engine.identities
    assert identity is not None
    return identity


BEARER = (b"authorization", b"Bearer 12/task-7/3")


@pytest.mark.parametrize(
    "headers",
    [
        [BEARER],
        [(b"authorization", b"bearer   12/task-7/3 ")],
        [(b"x-api-key", b"12/task-7/3")],
        [(b"x-record-key", b"12/task-7/3")],
        [(b"x-record-key", b"12/task-7/3"), (b"authorization", b"Bearer other/task/0")],
        [(b"authorization", b"Bearer other/task/0"), (b"x-record-key", b"12/task-7/3")],
        [(b"x-record-key", b"12/task-7/3"), (b"x-api-key", b"other/task/0")],
        [(b"x-api-key", b"other/task/0"), BEARER],
        [(b"x-record-key", b"12/task-7/3"), (b"authorization", b"Bearer sk-the-engine's")],
        [(b"x-record-key", b" "), BEARER],
        [(b"authorization", b"Basic dXNlcg=="), (b"x-api-key", b"12/task-7/3")],
    ],
)
async def test_the_key_is_the_header_then_the_bearer_then_the_x_api_key(headers):
    assert await identity_of(*headers) == Identity(KEY)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer sk-abc"), (b"x-api-key", b"12/task-7/3")],
        [(b"authorization", b"Bearer a/b"), (b"x-api-key", b"12/task-7/3")],
        [(b"x-record-key", b"12/task-7"), BEARER, (b"x-api-key", b"other/task/0")],
        [(b"x-record-key", b"EMPTY"), (b"x-api-key", b"12/task-7/3")],
    ],
)
async def test_the_first_credential_that_is_a_record_key_counts(headers, order):
    """E4."""
    assert await identity_of(*headers[::order]) == Identity(KEY)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([(b"authorization", b"Bearer sk-abc"), (b"x-api-key", b"a/b")], "malformed"),
        ([(b"x-record-key", b"a/b"), (b"authorization", b"Bearer sk-abc")], "malformed"),
        ([BEARER, BEARER, (b"x-api-key", b"sk-abc")], "ambiguous"),
        ([(b"authorization", b"Basic x"), (b"x-api-key", b"sk-abc")], "not_a_key"),
        ([(b"authorization", b"Basic x"), (b"x-api-key", b"")], "missing"),
    ],
)
async def test_of_many_credentials_that_are_none_the_reason_that_helps_most_is_given(
    headers, reason
):
    """E4."""
    assert await identity_of(*headers) == Identity(None, reason)


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key", b"x-record-key"])
async def test_a_header_that_is_there_twice_is_no_identity(name):
    """E16."""
    scheme = b"Bearer " if name == b"authorization" else b""
    first, second = (name, scheme + b"12/task-7/3"), (name, scheme + b"other/task/0")
    for twice in ([first, second], [second, first], [first, first], [(name, b""), first]):
        assert await identity_of(*twice) == Identity(None, "ambiguous")
    # Another header may still say it.
    for other in {b"x-api-key", b"x-record-key"} - {name}:
        assert await identity_of(second, second, (other, b"12/task-7/3")) == Identity(KEY)


async def test_of_two_bearers_none_is_taken_apart():
    """The engine sees what was sent, and decides. E16."""
    engine = Engine()
    twice = [(b"authorization", b"Bearer secret:12/task-7/3"), (b"authorization", b"Bearer x")]
    await ask(IdentityMiddleware(engine, ["secret"]), *twice)
    assert engine.identities == [Identity(None, "ambiguous")]
    assert engine.headers == dict(twice)


@pytest.mark.parametrize("text", [text for text in JUNK if text == text.strip()])
@pytest.mark.parametrize("name", [b"authorization", b"x-api-key", b"x-record-key"])
async def test_junk_is_served_and_not_recorded(name, text):
    prefix = b"Bearer " if name == b"authorization" else b""
    assert await identity_of((name, prefix + text.encode())) == Identity(None, JUNK[text])


async def test_a_request_without_credentials_is_served_and_not_recorded():
    assert await identity_of() == Identity(None, "missing")
    assert await identity_of((b"authorization", b"12/task-7/3")) == Identity(None, "missing")


@pytest.mark.parametrize(
    ("value", "attempt"),
    [
        (b"0", 0),
        (b"2", 2),
        (b"100", 100),
        (b"101", 100),
        (b"999999999", 100),
        (b"9" * 10_000, 0),
        (b"-1", 0),
        (b"1.5", 0),
        (b"", 0),
        ("٣".encode(), 0),
        (b"\xb2", 0),
        (b"nan", 0),
    ],
)
async def test_the_clients_retry_count_is_taken_when_it_is_a_number(value, attempt):
    identity = await identity_of(BEARER, (b"x-stainless-retry-count", value))
    assert identity == Identity(KEY, attempt=attempt)


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
@pytest.mark.parametrize("api_key", ["secret", "se:cr:et", "clé"])
async def test_a_composite_key_is_taken_apart_and_the_engine_sees_its_own(name, api_key):
    scheme = b"Bearer " if name == b"authorization" else b""
    engine = Engine()
    middleware = IdentityMiddleware(engine, [api_key, "another"])
    composite = scheme + api_key.encode() + b":12/task-7/3"
    await ask(middleware, (b"host", b"x"), (name, composite))
    assert engine.identities == [Identity(KEY)]
    assert engine.headers == {b"host": b"x", b"authorization": b"Bearer " + api_key.encode()}


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key", b"x-record-key"])
@pytest.mark.parametrize("own", ["secret", "se/cr/1", "se:cr/e/t"])
@pytest.mark.parametrize(
    ("credential", "expected"),
    [
        ("{own}:12/task-7/3", Identity(KEY)),
        ("{own}", Identity(None, "not_a_key")),
        ("{own}:{own}", Identity(None, "not_a_key")),
        ("{own}:{own}:12/task-7/3", Identity(None, "not_a_key")),
        ("{own}:another/one/1", Identity(None, "not_a_key")),
        ("{own}:another/one/1:12/task-7/3", Identity(None, "not_a_key")),
    ],
)
async def test_the_engines_own_key_is_no_part_of_a_record_key(name, own, credential, expected):
    """By whatever header it comes, beside the bearer that the engine wants. E17."""
    scheme = b"Bearer " if name == b"authorization" else b""
    headers = [(name, scheme + credential.format(own=own).encode())]
    if name != b"authorization":
        headers.append((b"authorization", f"Bearer {own}".encode()))
    assert await identity_of(*headers, api_keys=(own, "another/one/1")) == expected


async def test_the_engines_own_key_in_the_record_keys_header_opens_nothing():
    """E17."""
    engine = Engine()
    header = (b"x-record-key", b"secret:12/task-7/3")
    await ask(IdentityMiddleware(engine, ["secret"]), header)
    assert engine.headers == dict([header])


async def test_of_two_engine_keys_that_fit_the_longer_counts():
    for api_keys in [("a", "a:b"), ("a:b", "a")]:
        identity = await identity_of((b"x-api-key", b"a:b:12/task-7/3"), api_keys=api_keys)
        assert identity == Identity(KEY)


@pytest.mark.parametrize(
    ("credential", "expected"),
    [
        (b"wrong:12/task-7/3", Identity(RecordKey("wrong:12", "task-7", 3))),
        (b"secret", Identity(None, "not_a_key")),
        (b"secret:", Identity(None, "missing")),
        (b"secret:junk", Identity(None, "not_a_key")),
        (b"secre:12/task-7", Identity(None, "malformed")),
        (b"secret:a:b/c/0", Identity(RecordKey("a:b", "c", 0))),
    ],
)
async def test_only_the_engines_own_key_makes_a_composite(credential, expected):
    header = (b"authorization", b"Bearer " + credential)
    assert await identity_of(header, api_keys=("secret",)) == expected


async def test_a_wrong_engine_key_reaches_the_engine_as_it_was_sent():
    engine = Engine()
    headers = (b"authorization", b"Bearer wrong:12/task-7/3")
    await ask(IdentityMiddleware(engine, ["secret"]), headers)
    assert engine.headers == dict([headers])


async def test_what_is_no_request_passes_untouched():
    engine = Engine()
    await ask(IdentityMiddleware(engine), BEARER, kind="lifespan")
    assert engine.identities == [None]


async def test_websockets_have_an_identity_too():
    engine = Engine()
    await ask(IdentityMiddleware(engine), BEARER, kind="websocket")
    assert engine.identities == [Identity(KEY)]


async def test_an_identity_is_gone_after_a_request_that_failed():
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await ask(IdentityMiddleware(failing), BEARER)
    assert current_identity() is None


async def test_concurrent_requests_each_see_their_own_identity():
    seen: dict[int, set[RecordKey | None]] = {run: set() for run in range(64)}

    async def generate(scope: Any, receive: Any, send: Any) -> None:
        run = int(dict(scope["headers"])[b"x-run"])
        for _ in range(20):
            await asyncio.sleep(0)
            identity = current_identity()
            seen[run].add(identity.key if identity else None)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    middleware = IdentityMiddleware(generate)
    await asyncio.gather(
        *(
            ask(
                middleware,
                (b"authorization", b"Bearer 7/sum/%d" % run),
                (b"x-run", b"%d" % run),
            )
            for run in range(64)
        )
    )
    assert seen == {run: {RecordKey("7", "sum", run)} for run in range(64)}


async def test_two_thousand_random_credentials_are_served_and_each_is_counted():
    random.seed(7)
    recorder = Recorder()
    engine = Engine(recorder)
    middleware = IdentityMiddleware(engine, ["secret", "s"])
    pieces = [b"a", b"/", b"0", b"a/b/0", b"..", b":", b"secret:", b"Bearer ", b"\xff", b"\x00"]
    names = [b"authorization", b"x-api-key", b"x-record-key", b"x-stainless-retry-count"]
    for _ in range(2_000):
        headers = [
            (random.choice(names), b"".join(random.choices(pieces, k=random.randrange(6))))
            for _ in range(random.randrange(4))
        ]
        assert await ask(middleware, *headers) == 200
    keyed = sum(each is not None and each.key is not None for each in engine.identities)
    unkeyed = recorder.stats().unkeyed
    assert 0 < keyed < 200
    assert keyed + sum(unkeyed.values()) == 2_000
    assert set(unkeyed) == {"missing", "not_a_key", "malformed", "ambiguous"}
    assert Counter(unkeyed) == Counter(
        each.reason for each in engine.identities if each is not None and each.key is None
    )
    recorder.close()
