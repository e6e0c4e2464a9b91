"""Two API servers, which vLLM starts by itself, in front of two engine cores; and two hosts."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import vllm
from packaging.version import Version

from examples.vllm_server import VLLMServer
from recorder_core.client import RecordClient
from tests.models import tiny_qwen3
from tests.vllm.apis import only, settle
from tests.vllm.conftest import ADMIN_KEY, ENV

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        Version(vllm.__version__) >= Version("0.33"),
        reason="on a CPU this vLLM wants a memory node for each engine",
    ),
]

Keys = Callable[[], str]
ENGINES = (0, 1)


@pytest.fixture(scope="module")
def server(log_folder: Path) -> Iterator[VLLMServer]:
    args = ["--enable-recording", "--dtype", "float32", "--max-model-len", "2048"]
    args += ["--data-parallel-size", "2", "--enforce-eager"]
    env = {**ENV, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": None}  # refused with several API servers
    with VLLMServer(tiny_qwen3(), *args, env=env, log=log_folder / "two.log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: VLLMServer) -> Iterator[RecordClient]:
    with RecordClient(server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


def complete(server: VLLMServer, key: str, engine: int, prompt: Any, **fields: Any) -> Any:
    """A completion by one of the engines."""
    body = {"model": server.name, "prompt": prompt, "return_token_ids": True, **fields}
    headers = {"Authorization": f"Bearer {key}", "X-data-parallel-rank": str(engine)}
    response = httpx.post(
        f"{server.base_url}/v1/completions", json=body, headers=headers, timeout=60
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def served(server: VLLMServer) -> list[int]:
    """Requests that each engine has finished."""
    text = httpx.get(f"{server.base_url}/metrics").text
    line = re.compile(r'^vllm:request_success_total\{.*engine="(\d)".*\} (\S+)$', re.MULTILINE)
    counts = dict.fromkeys(map(str, ENGINES), 0)
    for engine, count in line.findall(text):
        counts[engine] += int(float(count))
    return list(counts.values())


def check_logprobs(server: VLLMServer, client: RecordClient, engine: int, keys: Keys) -> None:
    """An engine's recorded logprobs are those that it gives a client that asks."""
    silent, asking = keys(), keys()
    sampling = {"max_tokens": 24, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    before = served(server)
    complete(server, silent, engine, "Hello", **sampling)
    shown = complete(server, asking, engine, "Hello", **sampling, logprobs=1)
    assert served(server)[engine] == before[engine] + 2
    record = only(client.get(silent))
    assert record.response_ids.tolist() == shown["token_ids"]
    expected = np.array(shown["logprobs"]["token_logprobs"], np.float32)
    np.testing.assert_array_equal(record.logprobs, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_sends_its_own_column(
    server: VLLMServer, client: RecordClient, fresh_key: Keys, engine: int
) -> None:
    check_logprobs(server, client, engine, fresh_key)
    [stats] = client.stats().values()
    assert stats.recorder.engine == {"logprobs": "a column per step"}


def test_a_run_that_both_engines_served_is_one_trajectory(
    server: VLLMServer, client: RecordClient, fresh_key: Keys
) -> None:
    key = fresh_key()
    first = complete(server, key, 0, [5, 300, 7], max_tokens=6, ignore_eos=True)
    history = [5, 300, 7, *first["token_ids"], 11]
    second = complete(server, key, 1, history, max_tokens=6, ignore_eos=True)
    [experience] = client.experiences(key)
    assert experience.tokens.tolist() == [*history, *second["token_ids"]]
    assert len(experience.turns) == 2
    assert experience.action_mask.sum() == 12


async def test_what_both_engines_serve_at_once_is_all_recorded(
    server: VLLMServer, client: RecordClient, fresh_key: Keys
) -> None:
    keys = [fresh_key() for _ in range(32)]
    body = {"model": server.name, "prompt": "Hello", "max_tokens": 16, "ignore_eos": True}
    before = served(server)

    async def ask(http: httpx.AsyncClient, number: int, key: str) -> str:
        headers = {"Authorization": f"Bearer {key}"}
        request = http.build_request(
            "POST", "/v1/completions", json={**body, "seed": number}, headers=headers
        )
        return str((await http.send(request)).json()["choices"][0]["text"])

    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as http:
        texts = await asyncio.gather(*(ask(http, *each) for each in enumerate(keys)))
    settle(client)
    assert min(np.subtract(served(server), before)) > 0
    for key, text in zip(keys, texts, strict=True):
        record = only(client.get(key))
        assert record.response_text == text
        assert len(record.logprobs) == 16
        assert not record.flags
    [stats] = client.stats().values()
    counters = stats.recorder
    assert (counters.pending, counters.dropped, counters.errors) == (0, {}, 0)
    assert counters.started == counters.recorded


def test_both_engines_take_a_label(
    server: VLLMServer, client: RecordClient, fresh_key: Keys
) -> None:
    client.set_version("43")
    for engine in ENGINES:
        key = fresh_key()
        complete(server, key, engine, "Hello", max_tokens=4)
        assert {span.version for span in only(client.get(key)).versions} == {"43"}


@pytest.fixture(scope="module")
def serving_node(log_folder: Path) -> Iterator[VLLMServer]:
    """One of two nodes; the other runs an engine core alone, in a vLLM without our plugin."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    args = ["--dtype", "float32", "--data-parallel-size", "2", "--data-parallel-size-local", "1"]
    args += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port]
    headless = [*args, "--headless", "--data-parallel-start-rank", "1"]
    env = {**ENV, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": None}
    log = log_folder / "headless.log"
    other = VLLMServer(tiny_qwen3(), *headless, env={**env, "VLLM_PLUGINS": "none"}, log=log)
    args += ["--enable-recording", "--api-server-count", "1"]
    other.launch()
    try:
        with VLLMServer(tiny_qwen3(), *args, env=env, log=log_folder / "node.log") as serving:
            yield serving
    finally:
        other.stop()


def test_an_engine_on_a_node_without_the_plugin_is_recorded_where_it_is_served(
    serving_node: VLLMServer, fresh_key: Keys
) -> None:
    with RecordClient(serving_node.base_url, admin_key=ADMIN_KEY) as client:
        for engine in ENGINES:
            check_logprobs(serving_node, client, engine, fresh_key)
        [stats] = client.stats().values()
        assert stats.recorder.engine["logprobs"].startswith("an object per token")
