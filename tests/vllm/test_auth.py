"""Keys: the engine's own, the record key beside it, and the admin key of `/records`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import anthropic
import httpx
import pytest
from openai import AuthenticationError, OpenAI

from examples.vllm_server import VLLMServer
from recorder_core import Record
from recorder_core.client import RecordClient
from recorder_core.stores import StoreStats
from tests.vllm.apis import PROMPT, chat, only, send
from tests.vllm.conftest import ADMIN_KEY, ENGINE_KEY

pytestmark = pytest.mark.server
FreshKey = Callable[[], str]

MESSAGES = [{"role": "user", "content": PROMPT}]


def ask_openai(server: VLLMServer, api_key: str, **fields: dict[str, str]) -> str:
    client = OpenAI(base_url=f"{server.base_url}/v1", api_key=api_key, max_retries=0)
    reply = client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=6, **fields)
    return reply.choices[0].message.content


def ask_anthropic(server: VLLMServer, **credentials: str) -> str:
    client = anthropic.Anthropic(base_url=server.base_url, max_retries=0, **credentials)
    return client.messages.create(model="model", messages=MESSAGES, max_tokens=6).content[0].text


def test_an_openai_client_sends_both_keys_as_one(
    keyed_server: VLLMServer, keyed_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    text = ask_openai(keyed_server, f"{ENGINE_KEY}:{key}")
    assert only(keyed_client.get(key)).response_text == text


def test_an_anthropic_client_sends_both_keys_as_one(
    keyed_server: VLLMServer, keyed_client: RecordClient, fresh_key: FreshKey
) -> None:
    as_key, as_token = fresh_key(), fresh_key()
    first = ask_anthropic(keyed_server, api_key=f"{ENGINE_KEY}:{as_key}")
    second = ask_anthropic(keyed_server, auth_token=f"{ENGINE_KEY}:{as_token}")
    assert only(keyed_client.get(as_key)).response_text == first
    assert only(keyed_client.get(as_token)).response_text == second


def test_the_record_key_goes_in_a_header_beside_the_engines_key(
    keyed_server: VLLMServer, keyed_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    text = ask_openai(keyed_server, ENGINE_KEY, extra_headers={"X-Record-Key": key})
    assert only(keyed_client.get(key)).response_text == text


def test_the_engines_key_before_the_record_key_in_its_header_is_left_out(
    keyed_server: VLLMServer, keyed_client: RecordClient, fresh_key: FreshKey
) -> None:
    """E17."""
    key = fresh_key()
    named = {"X-Record-Key": f"{ENGINE_KEY}:{key}"}
    text = ask_openai(keyed_server, ENGINE_KEY, extra_headers=named)
    assert only(keyed_client.get(key)).response_text == text
    assert [str(each.key) for each in keyed_client.keys("") if ENGINE_KEY in str(each.key)] == []


def test_a_record_key_counts_behind_a_credential_that_is_none(
    keyed_server: VLLMServer, keyed_client: RecordClient, fresh_key: FreshKey
) -> None:
    """E4."""
    key = fresh_key()
    text = ask_openai(keyed_server, ENGINE_KEY, extra_headers={"x-api-key": key})
    assert only(keyed_client.get(key)).response_text == text


def test_of_two_bearers_neither_says_whose_a_request_is(
    keyed_server: VLLMServer, keyed_client: RecordClient, fresh_key: FreshKey
) -> None:
    """Nor do they open `/records`. E16."""
    key = fresh_key()
    tokens = [ENGINE_KEY, f"{ENGINE_KEY}:{key}", ADMIN_KEY]
    for first, second in itertools.permutations(tokens, 2):
        headers = [("Authorization", f"Bearer {each}") for each in (first, second)]
        body = {"model": "model", "messages": MESSAGES, "max_tokens": 2}
        served = httpx.post(
            f"{keyed_server.base_url}/v1/chat/completions", json=body, headers=headers
        )
        assert served.status_code == (200 if first == ENGINE_KEY else 401)
        refused = httpx.get(f"{keyed_server.base_url}/records/stats", headers=headers)
        assert refused.status_code == 400
        assert "send one" in refused.json()["detail"]
    assert keyed_client.get(key) == []


def test_the_engines_key_alone_is_served_and_not_recorded(
    keyed_server: VLLMServer, keyed_client: RecordClient
) -> None:
    before = keyed_client.stats()[keyed_server.base_url].recorder
    assert ask_openai(keyed_server, ENGINE_KEY)
    after = keyed_client.stats()[keyed_server.base_url].recorder
    assert after.started == before.started
    assert after.unkeyed["not_a_key"] == before.unkeyed.get("not_a_key", 0) + 1


@pytest.mark.parametrize(
    "credential",
    [
        "{key}",
        "wrong:{key}",
        ENGINE_KEY[:-1] + ":{key}",
        ENGINE_KEY + "{key}",
        ENGINE_KEY + "x:{key}",
        "{key}:" + ENGINE_KEY,
        ":{key}",
        ADMIN_KEY,
        "",
    ],
)
def test_without_the_engines_key_the_answer_is_the_engines_own_refusal(
    keyed_server: VLLMServer,
    keyed_client: RecordClient,
    fresh_key: FreshKey,
    credential: str,
) -> None:
    key = fresh_key()
    before = keyed_client.stats()[keyed_server.base_url].recorder
    response = send(keyed_server, credential.format(key=key), chat(max_tokens=2))
    assert response.status_code == 401
    assert response.json() == {"error": "Unauthorized"}
    named = httpx.post(
        f"{keyed_server.base_url}/v1/chat/completions",
        json={"model": "model", "messages": MESSAGES},
        headers={"X-Record-Key": key},
    )
    assert (named.status_code, named.content) == (401, response.content)
    assert keyed_client.stats()[keyed_server.base_url].recorder == before


def test_the_sdk_sees_a_plain_record_key_refused(
    keyed_server: VLLMServer, fresh_key: FreshKey
) -> None:
    with pytest.raises(AuthenticationError):
        ask_openai(keyed_server, fresh_key())


@pytest.fixture(params=["recording_server", "keyed_server"])
def server(request: pytest.FixtureRequest) -> VLLMServer:
    return request.getfixturevalue(request.param)


def stored_at(admin: RecordClient, server: VLLMServer) -> StoreStats:
    """What the server's store holds, whenever it is asked."""
    return replace(admin.stats()[server.base_url].store, oldest_age_s=None)


@pytest.mark.parametrize(
    "credential", ["{key}", ENGINE_KEY, ENGINE_KEY + ":{key}", ADMIN_KEY + ":{key}", None]
)
def test_an_agent_reads_and_writes_no_records(
    server: VLLMServer, fresh_key: FreshKey, credential: str | None
) -> None:
    key = fresh_key()
    generate = chat(max_tokens=3)
    assert send(server, f"{ENGINE_KEY}:{key}", generate).status_code == 200
    assert send(server, key, generate).status_code in (200, 401)
    with RecordClient(server.base_url, admin_key=ADMIN_KEY) as admin:
        before: list[Record] = admin.get(key)
        stored = stored_at(admin, server)
        routes = httpx.get(f"{server.base_url}/openapi.json").json()["paths"]
        asked = 0
        for path in (path for path in routes if path.startswith("/records")):
            for method in routes[path]:
                headers = {"X-Record-Key": key, "x-api-key": ADMIN_KEY}
                if credential is not None:
                    headers["Authorization"] = f"Bearer {credential.format(key=key)}"
                response = httpx.request(
                    method,
                    server.base_url + path,
                    params={"prefix": key, "key": key},
                    headers=headers,
                    **({} if method == "get" else {"json": {"key": key, "reward": 1.0}}),
                )
                assert response.status_code == 401, (method, path)
                assert "record" not in response.headers.get("x-record-lease", "")
                assert len(response.content) < 200
                asked += 1
        assert asked >= 11
        assert admin.get(key) == before
        assert stored_at(admin, server) == stored
        if before:
            assert admin.update_reward(key, 0.5) == len(before)
            assert [run.reward for run in admin.runs(key)] == [0.5]
