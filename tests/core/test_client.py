"""The clients, against the real routes on a real HTTP server."""

import asyncio
import inspect
import logging
import pickle
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from recorder_core import FinishReason, Record, Turn, assemble, encode_records
from recorder_core.client import AsyncRecordClient, RecordClient
from recorder_core.codec import MEDIA_TYPE
from recorder_core.errors import (
    BadRequestError,
    ClientError,
    InvalidKeyError,
    LeaseError,
    NotAuthorizedError,
    ServerFaultError,
    ServerUnreachableError,
)
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.recorder import Recorder
from recorder_core.server import AdminGuard, IdentityMiddleware, records_router
from recorder_core.stores import MemoryStore

ADMIN_KEY = "s3cret-admin"
KEY = RecordKey.parse("0/task/0")


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class RecordingServer:
    """An application with `/records`, its recorder, and what it was asked."""

    def __init__(self, *, set_version=None):
        self.clock = Clock()
        self.recorder = Recorder(MemoryStore(clock=self.clock))
        self.store = self.recorder.store
        self.version = None

        async def take_version(version):
            self.version = version

        self.app = FastAPI()
        self.app.include_router(
            records_router(
                self.recorder,
                guard=AdminGuard(ADMIN_KEY),
                set_version=take_version if set_version is None else None,
            )
        )
        self.app.add_middleware(IdentityMiddleware)

    def submit(self, key, prompt_ids, response_ids, **fields):
        fields = {"finish_reason": FinishReason.STOP, "finished_at": time.time(), **fields}
        self.recorder.submit(
            Turn(
                key=key,
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                logprobs=[-0.5] * len(response_ids),
                **fields,
            )
        )


@contextmanager
def serving(app):
    """The application on a port of this machine; gives its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level=logging.CRITICAL, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


class Host:
    """A port of this machine that answers for one application after another."""

    def __init__(self):
        self.app = None

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)

    @contextmanager
    def recording(self):
        server = RecordingServer()
        server.url, self.app = self.url, server.app
        yield server
        server.recorder.close()


@pytest.fixture(scope="module")
def hosts():
    first, second = Host(), Host()
    with serving(first) as first.url, serving(second) as second.url:
        yield first, second


@pytest.fixture
def server(hosts):
    with hosts[0].recording() as server:
        yield server


@pytest.fixture
def second_server(hosts):
    with hosts[1].recording() as server:
        yield server


class Awaited:
    """An `AsyncRecordClient` with the surface of a `RecordClient`, so that tests fit both."""

    def __init__(self, *args, **kwargs):
        self._loop = asyncio.new_event_loop()
        self._client = AsyncRecordClient(*args, **kwargs)

    def __getattr__(self, name):
        value = getattr(self._client, name)
        if name == "drain":
            return lambda *args, **kwargs: self._drain(value(*args, **kwargs))
        if not inspect.iscoroutinefunction(value):
            return value
        return lambda *args, **kwargs: self._loop.run_until_complete(value(*args, **kwargs))

    @contextmanager
    def _drain(self, draining):
        drained = self._loop.run_until_complete(draining.__aenter__())
        try:
            yield drained
        except BaseException as error:
            kind, trace = type(error), error.__traceback__
            if not self._loop.run_until_complete(draining.__aexit__(kind, error, trace)):
                raise
        else:
            self._loop.run_until_complete(draining.__aexit__(None, None, None))

    def __repr__(self):
        return repr(self._client)

    def close(self):
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


@pytest.fixture(params=["blocking", "async"])
def connect(request):
    """Makes a client of either kind."""
    made = []

    def make(*args, handler=None, **kwargs):
        is_async = request.param == "async"
        if handler is not None:
            transport = httpx.MockTransport(handler)
            http = httpx.AsyncClient if is_async else httpx.Client
            kwargs["http_client"] = http(transport=transport)
        kwargs.setdefault("admin_key", ADMIN_KEY)
        made.append((Awaited if is_async else RecordClient)(*args, **kwargs))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(connect, server):
    return connect(server.url)


def test_a_run_is_listed_read_and_assembled(client, server):
    server.submit(KEY, [1, 2], [3, 4])
    server.submit(KEY, [1, 2, 3, 4, 5], [6])

    (listed,) = client.keys()
    records = client.get("0")
    (experience,) = client.experiences("0/task")

    assert (listed.key, listed.records, listed.pending) == (KEY, 2, 0)
    assert [list(each.response_ids) for each in records] == [[3, 4], [6]]
    assert records[1].parent == records[0].id
    assert list(experience.tokens) == [1, 2, 3, 4, 5, 6]
    assert list(experience.action_mask) == [True, True, False, True]


def test_a_generation_in_flight_is_pending(client, server):
    generation = server.recorder.start(KEY)

    (listed,) = client.keys("0")
    with client.drain("0") as drained:
        pass

    assert (listed.records, listed.pending, drained.pending) == (0, 1, 1)
    generation.drop("test")
    with client.drain("0") as drained:
        assert drained.pending == 0


def test_a_turn_that_has_just_finished_is_drained_and_not_pending(client, server):
    for run in range(50):
        server.submit(RecordKey("0", "task", run), list(range(1000)), [1])
    with client.drain("0") as drained:
        assert (len(drained.records), drained.pending) == (50, 0)


def test_a_drain_waits_for_a_generation_in_flight(client, server):
    generation = server.recorder.start(KEY)
    turn = Turn(key=KEY, prompt_ids=[1], response_ids=[2], finish_reason=FinishReason.STOP)
    threading.Timer(0.3, generation.finish, [turn]).start()

    with client.drain("0", wait_s=10) as drained:
        assert (len(drained.records), drained.pending) == (1, 0)


def test_rewards_and_info_reach_the_experience(client, server):
    server.submit(KEY, [1], [2, 3])

    updated = client.update_reward(
        KEY, np.float32(0.5), info={"note": None}, token_level_reward=np.float32([1, 2])
    )

    assert updated == 1
    (experience,) = client.experiences(KEY)
    assert (experience.reward, experience.info) == (0.5, {"note": None})
    assert list(experience.token_level_reward) == [1, 2]


def test_a_reward_by_record_id_reaches_only_that_record(client, server):
    server.submit(KEY, [1], [2], id="first")
    server.submit(KEY, [1, 2, 3], [4], id="second")

    assert client.update_reward("0/task/0", 1.0, record_ids=["first", "unknown"]) == 1
    assert [each.reward for each in client.get("0")] == [1.0, None]


def test_a_reward_for_a_key_without_records_updates_nothing(client):
    assert client.update_reward("0/unknown/7", 1.0) == 0


@pytest.mark.parametrize("text", ["0/eval_short/1/0", "a%2Fb/c&d=e+f/g#h?i;j:k/3", "~/!/0"])
def test_a_key_travels_unchanged(client, server, text):
    key = RecordKey.parse(text)
    server.submit(key, [1], [2])
    server.submit(RecordKey.parse("other/task/0"), [1], [2])

    assert client.update_reward(text, 2.0) == 1
    assert [each.key for each in client.get(text)] == [key]
    assert client.overwrite(text, client.get(key)) == 1
    assert client.delete(key) == 1
    assert [each.key.text for each in client.keys("")] == ["other/task/0"]


def test_a_prefix_matches_whole_components(client, server):
    for text in ("1/task/0", "10/task/0"):
        server.submit(RecordKey.parse(text), [1], [2])
    assert [str(each.key) for each in client.get(KeyPrefix("1"))] == ["1/task/0"]


def test_a_drain_is_acknowledged_when_its_block_ends_well(client, server):
    server.submit(KEY, [1], [2])

    with client.drain("0", lease_s=60) as drained:
        assert len(drained.experiences) == 1
        assert drained.experiences is drained.experiences
        assert client.get("0") == []
    server.clock.now += 61

    assert client.get("0") == []
    assert server.store.stats().counters["acknowledged"] == 1


def test_records_come_back_with_their_rewards_when_the_block_raises(client, server):
    server.submit(KEY, [1], [2])
    client.update_reward(KEY, 1.0)

    with (
        pytest.raises(RuntimeError, match="the trainer died"),
        client.drain("0", lease_s=60) as drained,
    ):
        raise RuntimeError("the trainer died")

    assert len(drained.records) == 1
    assert client.get("0") == []
    server.clock.now += 61
    (record,) = client.get("0")
    assert record.reward == 1.0


def test_a_lease_is_acknowledged_by_hand_once_or_twice(client, server):
    server.submit(KEY, [1], [2])

    drained = client.lease("0")

    assert client.ack(drained) == 1
    assert client.ack(drained) == 0


def test_a_lease_is_acknowledged_from_another_process(client, connect, server):
    server.submit(KEY, [1], [2])
    drained = pickle.loads(pickle.dumps(client.lease("0")))
    assert connect(server.url).ack(drained) == 1


def test_acknowledging_too_late_is_an_error(client, server):
    server.submit(KEY, [1], [2])

    with (
        pytest.raises(LeaseError, match=r"/records/ack: answered 404: lease .* has run out"),
        client.drain("0", lease_s=60),
    ):
        server.clock.now += 61

    assert len(client.get("0")) == 1


def test_a_superseded_retry_is_told_apart(client, server):
    server.submit(KEY, [1], [2], finish_reason=FinishReason.ABORT, id="aborted", created_at=1.0)
    server.submit(KEY, [1], [2, 3], id="kept", created_at=2.0, attempt=1)

    with client.drain("0") as drained:
        assert [each.eid.suffix for each in drained.experiences] == ["kept"]
        assert [each.id for each in drained.superseded] == ["aborted"]


def test_the_remaining_routes(client, server):
    server.submit(KEY, [1], [2])

    assert client.flush() is True
    client.set_version("step-7")
    assert server.version == "step-7"
    client.block("0/task")
    server.submit(KEY, [1], [2])
    (stats,) = client.stats().values()
    assert stats.recorder.dropped == {"blocked": 1}
    assert list(client.stats()) == [server.url]
    server.clock.now += 10
    assert client.sweep(20) == 0
    assert client.sweep(5) == 1


def test_a_large_drain_arrives_whole(client, server):
    count, length = 40, 100_000
    tokens = np.arange(length, dtype=np.int32)
    for run in range(count):
        key = RecordKey("0", "task", run)
        record = Record(
            id=f"{run}",
            key=key,
            prompt_ids=tokens,
            response_ids=tokens + run,
            logprobs=np.full(length, -run, np.float32),
            finish_reason=FinishReason.STOP,
        )
        server.store.add(record)

    with client.drain("0") as drained:
        assert sum(each.response_ids.nbytes for each in drained.records) == count * length * 4
        assert [each.eid.run for each in drained.experiences] == list(range(count))
        np.testing.assert_array_equal(drained.records[-1].response_ids, tokens + count - 1)


# Several servers


@pytest.fixture
def both(connect, server, second_server):
    return connect([server.url, second_server.url + "/v1"])


def test_one_run_over_two_servers_assembles_as_one(both, server, second_server):
    server.submit(KEY, [1, 2], [3], finished_at=1.0)
    second_server.submit(KEY, [1, 2, 3, 4], [5], finished_at=2.0)
    server.submit(KEY, [1, 2, 3, 4, 5, 6], [7], finished_at=3.0)

    (listed,) = both.keys("0")
    assert (listed.records, listed.rewarded) == (3, 0)
    assert both.update_reward(KEY, 1.0) == 3
    with both.drain("0") as drained:
        (experience,) = drained.experiences
        assert list(experience.tokens) == [1, 2, 3, 4, 5, 6, 7]
        assert [turn.reward for turn in experience.turns] == [1.0, 1.0, 1.0]
        assert {lease.url for lease in drained.leases} == {server.url, second_server.url}

    acknowledged = [each.store.stats().counters["acknowledged"] for each in (server, second_server)]
    assert acknowledged == [2, 1]
    assert list(both.stats()) == [server.url, second_server.url]


def test_keys_of_several_servers_are_merged(both, server, second_server):
    server.submit(KEY, [1], [2])
    server.recorder.flush()
    server.clock.now += 5
    generation = second_server.recorder.start(KEY)
    second_server.submit(RecordKey.parse("0/another/0"), [1], [2])

    other, shared = both.keys()

    assert (str(other.key), other.records) == ("0/another/0", 1)
    assert (shared.key, shared.records, shared.pending, shared.age_s) == (KEY, 1, 1, 5.0)
    generation.drop("test")


def test_what_concerns_a_key_or_prefix_reaches_every_server(both, server, second_server):
    for each in (server, second_server):
        each.submit(KEY, [1], [2])
    assert both.flush() is True
    both.set_version("2")
    assert (server.version, second_server.version) == ("2", "2")
    both.block("1")
    assert both.delete("0") == 2
    for each in (server, second_server):
        each.submit(RecordKey.parse("1/task/0"), [1], [2])
        each.recorder.flush()
    assert both.keys("1") == []


def test_overwriting_leaves_the_key_on_one_server_and_longer_keys_alone(
    both, server, second_server
):
    longer = RecordKey.parse("0/task/0/more/0")
    server.submit(KEY, [1], [2], finished_at=1.0)
    second_server.submit(KEY, [1, 2, 3], [4], finished_at=2.0)
    second_server.submit(longer, [1], [2])
    records = [each.model_copy(update={"reward": 3.0}) for each in both.get(KEY) if each.key == KEY]

    assert both.overwrite(KEY, records) == 2

    assert [each.records for each in both.keys("")] == [2, 1]
    assert {each.key for each in second_server.store.get(KeyPrefix())} == {longer}
    (experience,) = assemble(each for each in both.get(KEY) if each.key == KEY)
    assert (list(experience.tokens), experience.reward) == ([1, 2, 3, 4], 3.0)


def test_an_overwrite_that_is_refused_changes_nothing_anywhere(both, server, second_server):
    for each in (server, second_server):
        each.submit(KEY, [1], [2])
    foreign = both.get(KEY)[0].model_copy(update={"key": RecordKey.parse("0/other/0")})

    with pytest.raises(BadRequestError, match="0/other/0"):
        both.overwrite(KEY, [foreign])

    assert [each.records for each in both.keys("")] == [2]


def test_a_drain_with_one_server_down_loses_nothing(connect, server):
    server.submit(KEY, [1], [2])
    down = unused_url()
    client = connect([server.url, down], retries=0)

    with pytest.raises(ServerUnreachableError) as caught, client.drain("0", lease_s=60):
        pytest.fail("the block must not run")

    assert "1 of 2 servers failed" in str(caught.value)
    assert f"POST {down}/records/drain" in str(caught.value)
    assert "comes back when their leases end, in 60 s" in str(caught.value)
    server.clock.now += 61
    assert len(connect(server.url).get("0")) == 1


def test_every_server_that_fails_is_named(connect):
    urls = [unused_url(), unused_url()]
    with pytest.raises(ServerUnreachableError) as caught:
        connect(urls, retries=0).keys()
    assert all(url in str(caught.value) for url in urls)
    assert "can be repeated" not in str(caught.value)


def test_several_servers_are_asked_at_once(both, server, second_server):
    generations = [each.recorder.start(KEY) for each in (server, second_server)]
    started = time.monotonic()

    with both.drain("0", wait_s=1.5) as drained:
        assert drained.pending == 2

    assert 1.5 <= time.monotonic() - started < 2.9  # one after the other they would take 3
    for each in generations:
        each.drop("test")


# Errors


def unused_url():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


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


def test_a_corrupt_or_headless_drain_is_a_fault(connect):
    blob, headers = encode_records([]), {"content-type": MEDIA_TYPE}
    for content in (blob[:-3], blob):
        with pytest.raises(ServerFaultError, match="not what /records answers"):
            connect(
                "http://host",
                handler=lambda request, c=content: httpx.Response(200, content=c, headers=headers),
            ).lease("0")


# Retries


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("recorder_core.client.servers._FIRST_PAUSE_S", 0.01)


class Flaky:
    """Fails each call a few times, then answers; counts the attempts."""

    def __init__(self, failures, fault):
        self.attempts = 0
        self._failures = failures
        self._fault = fault

    def __call__(self, request):
        self.attempts += 1
        if self.attempts <= self._failures:
            if isinstance(self._fault, int):
                return httpx.Response(self._fault, html="<html>")
            raise self._fault("broken", request=request)
        reply = {"updated": 1, "records": 1, "flushed": True}
        if request.url.path.endswith("/drain"):
            headers = {"x-record-lease": "a", "x-record-pending": "0"}
            return httpx.Response(200, content=encode_records([]), headers=headers)
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


@pytest.mark.parametrize("fault", [*FAULTS, httpx.ReadTimeout])
def test_a_drain_is_never_sent_again(quick, connect, fault):
    handler = Flaky(1, fault)
    with pytest.raises(ClientError):
        connect("http://host", handler=handler).lease("0")
    assert handler.attempts == 1


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


# Set-up


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


def test_both_clients_have_the_same_surface():
    def surface(kind):
        return {
            name: list(inspect.signature(value).parameters.items())
            for name, value in vars(kind).items()
            if callable(value) and not name.startswith("_")
        }

    assert surface(RecordClient) == surface(AsyncRecordClient)


def test_the_async_client_drains_as_documented(server):
    async def main():
        async with AsyncRecordClient(server.url, admin_key=ADMIN_KEY) as client:
            async with client.drain("0") as drained:
                assert len(drained.records) == 1
            counts = [client.update_reward(KEY, 1.0) for _ in range(150)]
            assert sum(await asyncio.gather(*counts)) == 0

    server.submit(KEY, [1], [2])
    asyncio.run(main())


def test_the_rest_of_the_package_does_without_httpx():
    code = "import recorder_core, sys; assert not {'httpx', 'fastapi', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
