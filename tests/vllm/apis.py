"""What each of vLLM's APIs is asked and what it shows, streamed or not, in one form."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from examples.vllm_server import VLLMServer
from recorder_core import Record
from recorder_core.client import RecordClient
from recorder_core.records import BIASED, CONSTRAINED
from tests.streams import events

PROMPT = "Say it in numbers."
LONG: dict[str, Any] = {"max_tokens": 7000, "ignore_eos": True}
"""A minute and more, as it is paced: for clients that do not wait for the end."""


@dataclass
class Request:
    """A request to one API."""

    path: str
    body: dict[str, Any]

    def updated(self, **fields: Any) -> Request:
        return Request(self.path, {**self.body, **fields})


def chat(content: str = PROMPT, *, logprobs: int | None = None, **fields: Any) -> Request:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    if logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": logprobs}
    return Request("/v1/chat/completions", {"return_token_ids": True, **body})


def completions(prompt: Any = PROMPT, **fields: Any) -> Request:
    return Request("/v1/completions", {"prompt": prompt, "return_token_ids": True, **fields})


def generate(token_ids: tuple[int, ...] = (5, 300, 7, 8), **fields: Any) -> Request:
    body = {"token_ids": list(token_ids), "sampling_params": fields}
    return Request("/inference/v1/generate", body)


def responses(content: str = PROMPT, *, logprobs: int | None = None, **fields: Any) -> Request:
    body = {"input": content, "enable_response_messages": True, **fields}
    body["max_output_tokens"] = body.pop("max_tokens", 16)
    if logprobs is not None:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": logprobs}
    return Request("/v1/responses", body)


@dataclass
class Sample:
    """One completion, as the client sees it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    calls: str = ""
    """Names and arguments of the tool calls, as they arrive."""
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        shown = choice.get("delta") or choice.get("message") or choice
        self.text += shown.get("content") or shown.get("text") or ""
        for call in shown.get("tool_calls") or ():
            function = call["function"]
            self.calls += (function.get("name") or "") + (function.get("arguments") or "")
        self.ids += choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        self.logprobs += logprobs.get("token_logprobs") or []
        self.logprobs += [each["logprob"] for each in logprobs.get("content") or ()]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


@dataclass
class Reply:
    """Everything that came back for one request."""

    prompt_ids: list[int] = field(default_factory=list)
    samples: dict[int, Sample] = field(default_factory=dict)
    completion_tokens: int = 0

    def add(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise AssertionError(chunk)
        for each in (chunk, *chunk["choices"]):
            self.prompt_ids = each.get("prompt_token_ids") or self.prompt_ids
        for choice in chunk["choices"]:
            self.samples.setdefault(choice["index"], Sample()).add(choice)
        self.completion_tokens = (chunk.get("usage") or {}).get("completion_tokens", 0)


def _arguments(server: VLLMServer, key: str | None, request: Request) -> dict[str, Any]:
    return {
        "url": server.base_url + request.path,
        "json": {"model": "model", **request.body},
        "headers": {"authorization": f"Bearer {key}"} if key else {},
    }


# One for all tests: making a client takes longer than a short generation.
_http = httpx.Client(timeout=60)


def send(server: VLLMServer, key: str | None, request: Request) -> httpx.Response:
    """Send a request, and read the whole answer."""
    return _http.post(**_arguments(server, key, request))


@contextmanager
def streaming(server: VLLMServer, key: str, request: Request) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a streamed answer; the client goes away when the block ends."""
    streamed = request.updated(stream=True, stream_options={"include_usage": True})
    with _http.stream("POST", **_arguments(server, key, streamed)) as response:
        assert response.status_code == 200, response.read()
        yield events(response)


def hold(
    server: VLLMServer, key: str, request: Request, **headers: str
) -> http.client.HTTPConnection:
    """Send a request and do not read its answer: `close` the connection to leave."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps({"model": "model", **request.body})
    headers |= {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", request.path, body, headers)
    return connection


def load(server: VLLMServer) -> tuple[int, int, int]:
    """What the engine runs, what it has queued, and how many tokens it ever sampled."""
    lines = _http.get(f"{server.base_url}/metrics").text.splitlines()
    running, waiting, sampled = (
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))
        for name in ("num_requests_running", "num_requests_waiting", "generation_tokens_total")
    )
    return int(running), int(waiting), int(sampled)


def leave_after(
    server: VLLMServer, tokens: int, start: Callable[[], http.client.HTTPConnection]
) -> None:
    """Hold a request, and leave once the engine has sampled so many tokens.

    Not by a timeout: on a busy machine any length of it may be too short or too long.
    """
    before = load(server)[2]
    connection = start()
    wait_until(lambda: load(server)[2] >= before + tokens)
    connection.close()


def ask(server: VLLMServer, key: str, request: Request, *, stream: bool = False) -> Reply:
    """Ask for one or several completions, and read them all."""
    reply = Reply(prompt_ids=request.body.get("token_ids", []))
    if stream:
        with streaming(server, key, request) as chunks:
            for chunk in chunks:
                reply.add(chunk)
    else:
        response = send(server, key, request)
        assert response.status_code == 200, response.text
        reply.add(response.json())
    return reply


def only(records: list[Record]) -> Record:
    """The one record of a key."""
    assert len(records) == 1, records
    return records[0]


def by_sample(records: list[Record]) -> dict[int, Record]:
    """The records of one request by their sample index, each of which occurs once."""
    found = {record.sample_index: record for record in records}
    assert len(found) == len(records), records
    return found


def float32(values: list[float]) -> np.ndarray[Any, Any]:
    """Logprobs as the engine has them: JSON shows each exactly."""
    return np.array(values, dtype=np.float32)


def assert_recorded(record: Record, prompt_ids: list[int], sample: Sample) -> None:
    """A root record is what its client saw, bit by bit.

    Of a prompt that another record holds, e.g. of the same request, it has what follows.
    """
    assert record.parent is None
    assert record.prompt_ids.tolist() == prompt_ids[record.start :]
    assert record.response_ids.tolist() == sample.ids
    assert record.logprobs is not None
    np.testing.assert_array_equal(record.logprobs, float32(sample.logprobs))
    assert record.finish_reason.value == sample.finish_reason
    # The request's own doing aside.
    assert set(record.flags) <= {BIASED, CONSTRAINED}


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for what the server does in its own time, e.g. noticing that a client has gone."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def settle(client: RecordClient) -> None:
    """Wait until no generation is in flight."""
    wait_until(lambda: not any(stats.recorder.pending for stats in client.stats().values()))
