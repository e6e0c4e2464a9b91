"""What SGLang's APIs are asked and what they show, and how a record is compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np

from examples.sglang_server import SGLangServer
from recorder_core import Record, RecorderStats
from recorder_core.client import RecordClient
from recorder_core.records import BIASED, CONSTRAINED
from tests.streams import events

PROMPT = "Say it in numbers."
PROMPT_IDS = [5, 300, 7, 8, 44, 91]


def post(
    server: SGLangServer, path: str, body: dict[str, Any], key: str | None = None, **headers: str
) -> httpx.Response:
    """Send a request with a bearer token, and read the whole answer."""
    sent = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=server.base_url, timeout=120) as http:
        return http.post(path, json=body, headers={**sent, **headers})


@contextmanager
def streaming(
    server: SGLangServer, path: str, body: dict[str, Any], key: str
) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a streamed answer; the client goes away when the block ends."""
    headers = {"authorization": f"Bearer {key}"}
    with (
        httpx.Client(base_url=server.base_url, timeout=120) as http,
        http.stream("POST", path, json={**body, "stream": True}, headers=headers) as response,
    ):
        assert response.status_code == 200, response.read()
        yield events(response)


def generate(
    server: SGLangServer, key: str, *, stream: bool = False, **fields: Any
) -> list[dict[str, Any]]:
    """Ask `/generate`; its outputs, in their order.

    Fields other than those of the request itself are sampling parameters.
    """
    names = ("text", "input_ids", "return_logprob", "top_logprobs_num", "return_routed_experts")
    body = {name: fields.pop(name) for name in names if name in fields}
    if "text" not in body:
        body.setdefault("input_ids", PROMPT_IDS)
    body["sampling_params"] = fields
    if not stream:
        response = post(server, "/generate", body, key)
        assert response.status_code == 200, response.text
        found = response.json()
        return found if isinstance(found, list) else [found]
    last: dict[int, dict[str, Any]] = {}
    with streaming(server, "/generate", body, key) as chunks:
        for chunk in chunks:
            last[chunk.get("index", 0)] = chunk
    return [last[index] for index in sorted(last)]


def chat(content: str = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"model": "model", "messages": [{"role": "user", "content": content}], **fields}


def completion(prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"model": "model", "prompt": prompt, **fields}


def shown_ids(output: dict[str, Any]) -> list[int]:
    return [each[1] for each in output["meta_info"]["output_token_logprobs"]]


def shown_logprobs(output: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Logprobs as the engine has them: JSON shows each exactly."""
    values = [each[0] for each in output["meta_info"]["output_token_logprobs"]]
    return np.array(values, dtype=np.float32)


def only(records: list[Record]) -> Record:
    """The one record of a key."""
    assert len(records) == 1, records
    return records[0]


def by_sample(records: list[Record]) -> list[Record]:
    """The records of one request, by their sample index, each of which occurs once."""
    found = {record.sample_index: record for record in records}
    assert sorted(found) == list(range(len(records))), records
    return [found[index] for index in sorted(found)]


def assert_recorded(record: Record, output: dict[str, Any]) -> None:
    """A record is what `/generate` showed with `return_logprob`, bit by bit."""
    about = output["meta_info"]
    assert record.prompt_end == about["prompt_tokens"]
    assert record.response_ids.tolist() == shown_ids(output) == output["output_ids"]
    assert len(record.response_ids) == about["completion_tokens"]
    assert record.logprobs is not None
    np.testing.assert_array_equal(record.logprobs, shown_logprobs(output))
    assert record.response_text == output["text"]
    assert record.finish_reason.value == about["finish_reason"]["type"]
    assert record.cached_tokens == about["cached_tokens"]
    # The request's own doing aside.
    assert set(record.flags) <= {BIASED, CONSTRAINED}


def counters(client: RecordClient) -> RecorderStats:
    [stats] = client.stats().values()
    return stats.recorder


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for what the server does in its own time, e.g. noticing that a client has gone."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def settle(client: RecordClient) -> None:
    """Wait until no generation is in flight."""
    wait_until(lambda: counters(client).pending == 0)
