"""A request that the real SDK sends again is trained once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from openai import OpenAI

from examples.vllm_server import VLLMServer
from recorder_core import FinishReason, Forest
from recorder_core.client import RecordClient
from tests.vllm.apis import leave_after, settle

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
        connection = HTTPConnection("127.0.0.1", self.server.port)
        connection.request("POST", request.url.path, request.read(), dict(request.headers))
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
        max_tokens=500,
        extra_body={"ignore_eos": True},
        **fields,
    )
    return reply.choices[0].message.content


def test_a_request_that_the_sdk_sends_again_is_one_trajectory(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: Callable[[], str],
    transport: FirstAnswerLost,
) -> None:
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
    after = record_client.stats()[recording_server.base_url].recorder
    assert after.superseded == before.superseded + 1
    forest = Forest(record_client.get(key))
    assert [record.id for record in forest.superseded] == [lost.id]
    [experience] = forest.experiences()
    assert [turn.record_id for turn in experience.turns] == [kept.id]


def test_samples_of_a_request_sent_again_replace_their_own(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: Callable[[], str],
) -> None:
    key = fresh_key()
    with (
        FirstAnswerLost(recording_server, ANSWER_LOST) as transport,
        httpx.Client(transport=transport, timeout=60) as http,
    ):
        ask_openai(recording_server.base_url, key, http, n=2)

    forest = Forest(record_client.get(key))
    assert sorted((r.attempt, r.sample_index) for r in forest.superseded) == [(0, 0), (0, 1)]
    assert [turn.attempt for each in forest.experiences() for turn in each.turns] == [1, 1]
