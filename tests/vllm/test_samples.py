"""What counts as a sample of a client's, and what vLLM samples besides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from examples.vllm_server import VLLMServer
from recorder_core.client import RecordClient
from tests.vllm.apis import PROMPT, Request, ask, chat, completions, only, send, settle

pytestmark = pytest.mark.server
Keys = Callable[[], str]

SCORE = Request(
    "/generative_scoring",
    {"query": "Is it?", "items": ["One", "Two"], "label_token_ids": [20, 21]},
)
# What vLLM itself makes of ids: of beams, samples of one request, scores.
INTERNAL = ["search-beam-3", "0_chatcmpl-1", "generative-scoring-1-0", "cmpl-1-0-beam-0", "0", "1"]


def dropped(client: RecordClient) -> Counter[str]:
    settle(client)
    return Counter(client.stats()[client.urls[0]].recorder.dropped)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_echo_without_tokens_is_no_sample(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys, stream: bool
) -> None:
    """The engine samples a token for it that nobody is shown: no part of the finished run.

    Of one prompt: vLLM's workers die of logprobs of two prompts in a step beside adapters, on a
    CPU. M2.
    """
    key = fresh_key()
    first = ask(recording_server, key, completions(max_tokens=4))
    run = [*first.prompt_ids, *first.samples[0].ids]
    before = dropped(record_client)
    scored = Request(
        "/v1/completions", {"prompt": run, "max_tokens": 0, "echo": True, "logprobs": 0}
    )
    reply = ask(recording_server, key, scored, stream=stream)

    assert sorted(reply.samples) == [0]
    assert len(reply.samples[0].logprobs) == len(run)  # of the prompt's tokens, and no more
    assert dropped(record_client) - before == Counter(no_sample=1)
    (experience,) = record_client.experiences(key)
    assert experience.tokens.tolist() == run


def test_an_echo_with_tokens_is_a_sample(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    key = fresh_key()
    body = send(recording_server, key, completions(max_tokens=1, echo=True)).json()
    record = only(record_client.get(key))
    (choice,) = body["choices"]
    assert record.response_ids.tolist() == choice["token_ids"]


def test_a_score_is_no_sample(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    """M2."""
    key = fresh_key()
    before = dropped(record_client)
    assert send(recording_server, key, SCORE).status_code == 200
    assert dropped(record_client) - before == Counter(no_sample=2)
    assert record_client.get(key) == []


@pytest.mark.parametrize("name", INTERNAL)
@pytest.mark.parametrize("request_", [chat(max_tokens=2), completions(max_tokens=2)])
def test_an_id_that_a_client_chose_decides_nothing(
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: Keys,
    request_: Request,
    name: str,
) -> None:
    """M3."""
    key = fresh_key()
    before = dropped(record_client)
    reply = httpx.post(
        recording_server.base_url + request_.path,
        json={"model": "model", **request_.body},
        headers={"Authorization": f"Bearer {key}", "X-Request-Id": name},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text
    assert name in only(record_client.get(key)).request_id
    assert dropped(record_client) == before


def test_samples_between_a_beam_searchs_steps_are_recorded(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    """M3."""
    searched, sampled = fresh_key(), fresh_key()
    searching: dict[str, Any] = {"use_beam_search": True, "n": 2, "temperature": 0}
    before = dropped(record_client)
    # One request of two prompts: its searches take turns.
    search = completions([PROMPT, f"{PROMPT} Again."], max_tokens=3, **searching)
    for _ in range(2):
        assert send(recording_server, searched, search).status_code == 200
        ask(recording_server, sampled, completions(max_tokens=3))
    assert dropped(record_client) - before == Counter(beam_search=20)
    assert record_client.get(searched) == []
    assert len(record_client.get(sampled)) == 2
