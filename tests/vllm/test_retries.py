"""A request that the real SDK sends again is trained once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from openai import OpenAI

from examples.vllm_server import VLLMServer
from recorder_core import FinishReason, Forest
from recorder_core.client import RecordClient
from tests.vllm.apis import LONG, leave_after, settle

pytestmark = pytest.mark.server

TIMED_OUT, ANSWER_LOST = "timed_out", "answer_lost"


class FirstAnswerLost(httpx.HTTPTransport):
    """The first request runs into a timeout, or its answer is lost on the way; later ones work."""

    def __init__(self, server: VLLMServer, how: str) -> None:
        super().__init__()
        self.server = server
        self.how = how
        self.retry_counts: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.retry_counts.append(request.headers["x-stainless-retry-count"])
        if len(self.retry_counts) > 1:
            return super().handle_request(request)
        if self.how == TIMED_OUT:
            leave_after(self.server, 5, lambda: self._hold(request))
            raise httpx.ReadTimeout("the answer takes too long")
        super().handle_request(request).read()
        raise httpx.RemoteProtocolError("the proxy went away")

    def _hold(self, request: httpx.Request) -> HTTPConnection:
        """The same request, but so long that it cannot be over when we leave."""
        body = {**json.loads(request.read()), **LONG}
        headers = {"Authorization": request.headers["authorization"]}
        headers["x-stainless-retry-count"] = request.headers["x-stainless-retry-count"]
        headers["Content-Type"] = "application/json"
        connection = HTTPConnection("127.0.0.1", self.server.port)
        connection.request("POST", request.url.path, json.dumps(body), headers)
        return connection


@pytest.fixture(params=[TIMED_OUT, ANSWER_LOST])
def transport(
    request: pytest.FixtureRequest, recording_server: VLLMServer
) -> Iterator[FirstAnswerLost]:
    with FirstAnswerLost(recording_server, request.param) as transport:
        yield transport


def ask_openai(base_url: str, key: str, http: httpx.Client, **fields: Any) -> str:
    client = OpenAI(base_url=f"{base_url}/v1", api_key=key, http_client=http)
    reply = client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": "Once."}],
        max_tokens=20,
        **fields,
    )
    return reply.choices[0].message.content


def test_a_request_that_the_sdk_sends_again_is_trained_once_unless_both_were_delivered(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: Callable[[], str],
    transport: FirstAnswerLost,
) -> None:
    """M1."""
    key = fresh_key()
    before = record_client.stats()[recording_server.base_url].recorder
    with httpx.Client(transport=transport, timeout=60) as http:
        text = ask_openai(recording_server.base_url, key, http)
    settle(record_client)
    assert transport.retry_counts == ["0", "1"]

    lost, kept = sorted(record_client.get(key), key=lambda record: record.attempt)
    assert (lost.attempt, kept.attempt) == (0, 1)
    assert kept.response_text == text
    timed_out = transport.how == TIMED_OUT
    assert (lost.finish_reason is FinishReason.ABORT) == timed_out
    assert (lost.delivered, kept.delivered) == (not timed_out, True)
    after = record_client.stats()[recording_server.base_url].recorder
    assert after.superseded == before.superseded + timed_out
    forest = Forest(record_client.get(key))
    # What was sent to its end is not taken back by a count: the server cannot see a proxy lose it.
    assert [record.id for record in forest.superseded] == [lost.id] * timed_out
    trained = [turn.record_id for each in forest.experiences() for turn in each.turns]
    assert trained == ([kept.id] if timed_out else [lost.id, kept.id])


@pytest.mark.parametrize("counts", [[0, 1, 2, 3], [0, 0, 1, 1], [3, 2, 1]])
def test_retry_counts_un_train_nothing_that_was_answered(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: Callable[[], str],
    counts: list[int],
) -> None:
    """An agent may send any. M1."""
    key = fresh_key()
    before = record_client.stats()[recording_server.base_url].recorder
    for count in counts:
        response = httpx.post(
            f"{recording_server.base_url}/v1/chat/completions",
            headers={"authorization": f"Bearer {key}", "x-stainless-retry-count": str(count)},
            json={
                "model": recording_server.name,
                "messages": [{"role": "user", "content": "Once."}],
                "max_tokens": 4,
                "n": 2,
            },
            timeout=60,
        )
        assert response.status_code == 200, response.text
    settle(record_client)
    records = record_client.get(key)
    assert [record.delivered for record in records] == [True] * (2 * len(counts))
    assert {record.model for record in records} == {recording_server.name}
    assert len(record_client.experiences(key)) == 2 * len(counts)
    after = record_client.stats()[recording_server.base_url].recorder
    assert after.superseded == before.superseded
    assert after.flagged.get("retry_unclear", 0) == before.flagged.get("retry_unclear", 0)
