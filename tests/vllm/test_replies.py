"""The engine's replies with recording on are those with recording off, byte for byte."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.vllm_server import VLLMServer
from recorder_core.client import RecordClient
from tests.models import tiny_qwen3
from tests.vllm.apis import PROMPT
from tests.vllm.conftest import ADMIN_KEY, ENV, SERVING, lora_arguments

pytestmark = pytest.mark.server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/inference/v1/generate"
# vLLM merges the chunks of a stream when its consumer lags: when is a matter of timing.
STREAM_TRIES = 8


@pytest.fixture(scope="module")
def plain_server(log_folder: Path) -> Iterator[VLLMServer]:
    """The recording server's twin, without recording."""
    args = [*SERVING, *lora_arguments()]
    with VLLMServer(tiny_qwen3(), *args, env=ENV, log=log_folder / "plain.log") as server:
        yield server


@dataclass(frozen=True)
class Asked:
    """A request, as it goes over the wire."""

    path: str
    body: Any = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)

    def content(self) -> bytes | None:
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        named = {"model": "model", **self.body} if isinstance(self.body, dict) else self.body
        return json.dumps(named).encode()


SAID = [{"role": "user", "content": PROMPT}]
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SEEDED = {"max_tokens": 10, "seed": 3, "temperature": 1.0}
TOKENS = {"token_ids": [5, 300, 7, 8]}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

REQUESTS = {
    "chat": Asked(CHAT, {"messages": SAID, **SEEDED}),
    "chat greedy": Asked(CHAT, {"messages": SAID, "max_tokens": 10, "temperature": 0}),
    "chat with logprobs": Asked(CHAT, {"messages": SAID, **SEEDED, "logprobs": True}),
    "chat with top 5": Asked(
        CHAT, {"messages": SAID, **SEEDED, "logprobs": True, "top_logprobs": 5}
    ),
    "chat with prompt logprobs": Asked(CHAT, {"messages": SAID, **SEEDED, "prompt_logprobs": 2}),
    "chat with token ids": Asked(CHAT, {"messages": SAID, **SEEDED, "return_token_ids": True}),
    "chat with chosen logprobs": Asked(
        CHAT, {"messages": SAID, **SEEDED, "logprobs": True, "logprob_token_ids": [5, 9]}
    ),
    "chat of two samples": Asked(CHAT, {"messages": SAID, **SEEDED, "n": 2}),
    "chat with a tool call": Asked(
        CHAT,
        {
            "messages": SAID,
            **SEEDED,
            "max_tokens": 90,
            "tools": [TOOL],
            "structured_outputs": {"choice": [CALL]},
        },
    ),
    "chat with a required tool": Asked(
        CHAT,
        {
            "messages": SAID,
            **SEEDED,
            "max_tokens": 90,
            "tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}],
            "tool_choice": "required",
        },
    ),
    "chat stopped by a string": Asked(
        CHAT, {"messages": SAID, **SEEDED, "allowed_token_ids": [20, 21], "stop": ["10", "01"]}
    ),
    "chat stopped by a token": Asked(
        CHAT, {"messages": SAID, **SEEDED, "min_tokens": 3, "logit_bias": {"2": 100}}
    ),
    "chat with an adapter": Asked(CHAT, {"messages": SAID, **SEEDED, "model": "tiny-lora"}),
    "completion": Asked(COMPLETIONS, {"prompt": PROMPT, **SEEDED}),
    "completion with logprobs": Asked(COMPLETIONS, {"prompt": PROMPT, **SEEDED, "logprobs": 3}),
    "completion of two prompts": Asked(COMPLETIONS, {"prompt": ["One.", "Two."], **SEEDED}),
    "completion with echo": Asked(
        COMPLETIONS, {"prompt": PROMPT, **SEEDED, "echo": True, "logprobs": 1}
    ),
    "beam search": Asked(
        COMPLETIONS,
        {"prompt": PROMPT, "max_tokens": 4, "use_beam_search": True, "n": 2, "temperature": 0},
    ),
    "tokens": Asked(GENERATE, {**TOKENS, "sampling_params": SEEDED}),
    "tokens with logprobs": Asked(
        GENERATE, {**TOKENS, "sampling_params": {**SEEDED, "logprobs": 2}}
    ),
    "response": Asked(
        RESPONSES,
        {"input": PROMPT, "max_output_tokens": 10, "seed": 3, "enable_response_messages": True},
    ),
    "message": Asked(MESSAGES, {"messages": SAID, "max_tokens": 10, "temperature": 0}),
    "score": Asked(
        "/generative_scoring",
        {"query": "Is it?", "items": ["One", "Two"], "label_token_ids": [20, 21]},
    ),
    "tokenize": Asked("/tokenize", {"prompt": PROMPT}),
    "error: no messages": Asked(CHAT, {"messages": []}),
    "error: no body": Asked(CHAT),
    "error: no JSON": Asked(CHAT, b'{"messages": ['),
    "error: a list": Asked(CHAT, [1, 2]),
    "error: another model": Asked(CHAT, {"messages": SAID, "model": "gpt-5"}),
    "error: temperature": Asked(CHAT, {"messages": SAID, "temperature": -1}),
    "error: too many logprobs": Asked(
        CHAT, {"messages": SAID, "logprobs": True, "top_logprobs": 500}
    ),
    "error: too long": Asked(COMPLETIONS, {"prompt": "and " * 9000, "max_tokens": 4}),
    "error: too many tokens": Asked(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 9000}),
    "error: no such token": Asked(GENERATE, {"token_ids": [99999], "sampling_params": SEEDED}),
    "error: message without a limit": Asked(MESSAGES, {"messages": SAID}),
    "error: no such response": Asked("/v1/responses/resp_none", method="GET"),
    "error: no such path": Asked("/v1/nothing", {}),
    "error: not this method": Asked(CHAT, method="DELETE"),
    "health": Asked("/health", method="GET"),
    "version": Asked("/version", method="GET"),
    "preflight": Asked(
        CHAT,
        method="OPTIONS",
        headers={"Origin": "http://a", "Access-Control-Request-Method": "POST"},
    ),
}
STREAMS = {
    "chat": Asked(CHAT, {"messages": SAID, **SEEDED, "stream": True}),
    "chat with usage": Asked(CHAT, {"messages": SAID, **SEEDED, **USAGE}),
    "chat with top 2": Asked(
        CHAT, {"messages": SAID, **SEEDED, **USAGE, "logprobs": True, "top_logprobs": 2}
    ),
    "chat with token ids": Asked(
        CHAT, {"messages": SAID, **SEEDED, **USAGE, "return_token_ids": True}
    ),
    "chat with a tool call": Asked(
        CHAT, {**REQUESTS["chat with a tool call"].body, "stream": True}
    ),
    "completion with logprobs": Asked(
        COMPLETIONS, {"prompt": PROMPT, **SEEDED, **USAGE, "logprobs": 1}
    ),
    "tokens": Asked(GENERATE, {**TOKENS, "sampling_params": SEEDED, **USAGE}),
    "response": Asked(RESPONSES, {"input": PROMPT, "max_output_tokens": 10, "seed": 3, **USAGE}),
    "message": Asked(
        MESSAGES, {"messages": SAID, "max_tokens": 10, "temperature": 0, "stream": True}
    ),
    "error: temperature": Asked(CHAT, {"messages": SAID, "temperature": -1, "stream": True}),
    "error: too long": Asked(COMPLETIONS, {"prompt": "and " * 9000, "stream": True}),
}

_IDS = rb"(?:chatcmpl|chatcmpl-tool|cmpl|resp|msg|generate-tokens|generative-scoring)[-_]"
# What differs from one request to the next, of whatever server.
_VOLATILE = [
    (re.compile(rb"\b(" + _IDS + rb")[0-9a-f]{8,}"), rb"\1ID"),
    (re.compile(rb'"(created|created_at|completed_at)": ?[0-9.]+'), rb'"\1":TIME'),
    (re.compile(rb'"(id|item_id|request_id)": ?"[0-9a-f]{8,}"'), rb'"\1":ID'),
    # Prompts that are computed in one step have other last digits than one after the other.
    (re.compile(rb'("score":0\.[0-9]{4})[0-9]+'), rb"\1"),
]


def reply(server: VLLMServer, asked: Asked, key: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body, without ids and times."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    response = httpx.request(
        asked.method,
        server.base_url + asked.path,
        content=asked.content(),
        headers={**headers, **asked.headers},
        timeout=60,
    )
    body = response.content
    for pattern, replacement in _VOLATILE:
        body = pattern.sub(replacement, body)
    shown = {name: value for name, value in response.headers.items() if name != "date"}
    if body != response.content:
        shown.pop("content-length", None)  # timestamps end in more or fewer digits
    return response.status_code, shown, body


WITHOUT_THE_FLAG = """
import sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

classes = AsyncLLM, OutputProcessor, RequestState, LogprobsProcessor
before = [dict(vars(each)) for each in classes]
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
args = parser.parse_args(["--model", sys.argv[1]])
AsyncEngineArgs.from_cli_args(args)
from vllm.plugins import load_endpoint_plugins

assert args.enable_recording is False
assert [each.name for each in load_endpoint_plugins(("generate",))] == ["recorder"]
assert [dict(vars(each)) for each in classes] == before
ours = {name for name in sys.modules if name.startswith(("vllm_recorder", "recorder_core.server"))}
assert ours == {"vllm_recorder", "vllm_recorder.plugin", "vllm_recorder.compat"}, ours
"""


@pytest.fixture(scope="module", autouse=True)
def _same_cache(recording_server: VLLMServer, plain_server: VLLMServer) -> None:
    """A prompt computed in part gives other last bits than one computed whole."""
    for server in (recording_server, plain_server):
        assert httpx.post(f"{server.base_url}/reset_prefix_cache").status_code == 200


@pytest.mark.parametrize("name", REQUESTS)
def test_a_reply_is_the_same_with_recording_on(
    recording_server: VLLMServer,
    plain_server: VLLMServer,
    fresh_key: Callable[[], str],
    name: str,
) -> None:
    asked, key = REQUESTS[name], fresh_key()
    off = reply(plain_server, asked, key)
    on = reply(recording_server, asked, key)
    assert on == off
    if name not in ("preflight", "chat with a required tool"):  # refused by some releases only
        assert (off[0] >= 400) == name.startswith("error")
    assert key.encode() not in off[2]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_the_same_with_recording_on(
    recording_server: VLLMServer,
    plain_server: VLLMServer,
    fresh_key: Callable[[], str],
    name: str,
) -> None:
    asked, key = STREAMS[name], fresh_key()
    off, on = [], []
    for _ in range(STREAM_TRIES):
        off.append(reply(plain_server, asked, key))
        on.append(reply(recording_server, asked, key))
        if any(each in off for each in on):
            break
    else:
        assert on[-1] == off[-1]
    assert (b"data: " in off[0][2]) == (not name.startswith("error"))


def test_requests_that_are_compared_are_recorded(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Callable[[], str]
) -> None:
    key = fresh_key()
    status, _, body = reply(recording_server, REQUESTS["chat"], key)
    assert status == 200
    [record] = record_client.get(key)
    assert (
        json.dumps(record.response_text)[1:-1].encode()
        in json.dumps(json.loads(body.replace(b"TIME", b"0"))).encode()
    )


def test_without_the_flag_there_are_no_records(
    plain_server: VLLMServer, fresh_key: Callable[[], str]
) -> None:
    key = fresh_key()
    assert reply(plain_server, REQUESTS["chat"], key)[0] == 200
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    for path in ("/records", "/records/keys", "/records/stats", "/records/drain"):
        for method in ("GET", "POST"):
            response = httpx.request(method, plain_server.base_url + path, headers=admin)
            assert response.status_code == 404
    assert "/records" not in httpx.get(f"{plain_server.base_url}/openapi.json").text
    assert "recorder_" not in httpx.get(f"{plain_server.base_url}/metrics").text


def test_without_the_flag_nothing_of_the_engine_is_patched() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_FLAG, str(tiny_qwen3())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
