"""Ways of serving beside the plain one: engines that share a request, and tokens alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from examples.vllm_server import VLLMServer
from recorder_core.client import RecordClient
from tests.models import tiny_qwen3
from tests.vllm.apis import Request, ask, assert_recorded, generate, only, settle
from tests.vllm.conftest import ADMIN_KEY, ENV

pytestmark = pytest.mark.server
Keys = Callable[[], str]

PREFILL = {"kv_transfer_params": {"do_remote_decode": True}}


@pytest.fixture(scope="module")
def server(log_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """One of a pair of engines, either of which prefills or decodes; it serves tokens alone."""
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path_factory.mktemp("kv"))},
    }
    args = ["--enable-recording", "--dtype", "float32", "--tokens-only"]
    args += ["--kv-transfer-config", json.dumps(transfer)]
    with VLLMServer(tiny_qwen3(), *args, env=ENV, log=log_folder / "tokens.log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: VLLMServer) -> Iterator[RecordClient]:
    with RecordClient(server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


def test_tokens_alone_are_recorded(
    server: VLLMServer, client: RecordClient, fresh_key: Keys
) -> None:
    """M4."""
    key, silent = fresh_key(), fresh_key()
    request = generate(max_tokens=8, seed=3, logprobs=0)
    reply = ask(server, key, request)
    record = only(client.get(key))
    assert_recorded(record, reply.prompt_ids, reply.samples[0])
    ask(server, silent, generate(max_tokens=8, seed=3))
    hidden = only(client.get(silent))
    assert hidden.response_ids.tolist() == record.response_ids.tolist()
    assert hidden.logprobs.tolist() == record.logprobs.tolist()


def test_a_prefill_for_another_engine_is_no_sample(
    server: VLLMServer, client: RecordClient, fresh_key: Keys, engine_version: Version
) -> None:
    """M4."""
    if engine_version < Version("0.32"):
        pytest.skip("this vLLM's token API does not hand transfer parameters on")
    key = fresh_key()
    before = client.stats()[server.base_url].recorder.dropped.get("prefill", 0)
    ask(server, key, generate(max_tokens=1).updated(**PREFILL))
    settle(client)
    assert client.get(key) == []
    assert client.stats()[server.base_url].recorder.dropped["prefill"] == before + 1
    decoded: Request = generate(max_tokens=4).updated(
        kv_transfer_params={"do_remote_prefill": True}
    )
    ask(server, key, decoded)
    assert len(only(client.get(key)).response_ids) == 4


def test_without_a_pair_no_parameter_of_a_client_makes_a_prefill(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    """M4."""
    key = fresh_key()
    reply = ask(recording_server, key, generate(max_tokens=4).updated(**PREFILL))
    assert only(record_client.get(key)).response_ids.tolist() == reply.samples[0].ids
