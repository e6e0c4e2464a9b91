"""Servers started another way: with defaults of their own, as half of a pair, by others."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packaging.version import Version
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from examples.sglang_server import SGLangServer
from recorder_core.client import RecordClient
from recorder_core.errors import UnsupportedEngineError
from recorder_core.records import BIASED, FORCED_TOKENS
from sglang_recorder import compat
from tests.models import tiny_lora, tiny_qwen3, tiny_qwen3_moe
from tests.sglang.apis import PROMPT_IDS, chat, counters, generate, only, post
from tests.sglang.conftest import ADMIN_KEY

pytestmark = pytest.mark.server
FreshKey = Callable[[], str]

SAMPLED = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 1.0}
PREFERRED = {"presence_penalty": 0.5}
NO_PREFILL = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
"""What SGLang's own probes of a decode server say: no prefill server takes part."""


class Dictated(CustomLogitProcessor):
    """Leaves one token, in whatever the request says."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for row, given in enumerate(custom_param_list or []):
            logits[row] = float("-inf")
            logits[row, given["dictated"]] = 0.0
        return logits


# Not known where it is unpickled: it is sent as a whole.
Dictated.__module__ = "__main__"


@pytest.fixture(scope="module")
def shaping_server(
    tmp_path_factory: pytest.TempPathFactory, log_folder: Path
) -> Iterator[SGLangServer]:
    """A server whose defaults shape what is sampled, with an adapter."""
    model = tmp_path_factory.mktemp("models") / "opinionated"
    shutil.copytree(tiny_qwen3(), model)
    generation = model / "generation_config.json"
    own = {"repetition_penalty": 1.2, "top_k": 50}
    generation.write_text(json.dumps({**json.loads(generation.read_text()), **own}))
    args = [
        *["--enable-recording", "--dtype", "float32", "--enable-custom-logit-processor"],
        *["--preferred-sampling-params", json.dumps(PREFERRED), "--recording-admin-key", ADMIN_KEY],
        *["--enable-lora", "--lora-backend", "torch_native", "--lora-paths"],
        *[f"tiny={tiny_lora()}", "--max-lora-rank", "4"],
    ]
    with SGLangServer(model, *args, log=log_folder / "shaping.log") as server:
        yield server


@pytest.fixture(scope="module")
def shaping_client(shaping_server: SGLangServer) -> Iterator[RecordClient]:
    with RecordClient(shaping_server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


def test_a_servers_and_a_models_defaults_are_recorded_as_the_requests_own(
    shaping_server: SGLangServer, shaping_client: RecordClient, fresh_key: FreshKey
) -> None:
    """`--preferred-sampling-params`, and the model's generation_config.json in OpenAI's APIs.

    M7.
    """
    native, openai = fresh_key(), fresh_key()
    generate(shaping_server, native, **SAMPLED)
    post(shaping_server, "/v1/chat/completions", chat(max_tokens=4), openai)
    record = only(shaping_client.get(native))
    assert record.sampling.presence_penalty == 0.5
    assert record.sampling.repetition_penalty is None
    assert record.flags == (BIASED,)
    record = only(shaping_client.get(openai))
    assert record.sampling.repetition_penalty == 1.2
    assert record.sampling.top_k == 50
    assert record.flags == (BIASED,)


def test_what_a_custom_processor_may_have_forced_is_flagged(
    shaping_server: SGLangServer, shaping_client: RecordClient, fresh_key: FreshKey
) -> None:
    """A token that had to come has logprob 0, which says nothing of the model.

    M6.
    """
    key = fresh_key()
    body = {
        "input_ids": PROMPT_IDS,
        "sampling_params": {**SAMPLED, "custom_params": {"dictated": 7, "thinking_budget": 3}},
        "custom_logit_processor": Dictated.to_str(),
    }
    response = post(shaping_server, "/generate", body, key)
    assert response.status_code == 200, response.text
    record = only(shaping_client.get(key))
    assert record.response_ids.tolist() == [7] * 8
    np.testing.assert_allclose(record.logprobs, 0.0, atol=1e-6)
    assert record.flags == (BIASED, FORCED_TOKENS)
    assert record.sampling.thinking_token_budget == 3


def test_an_adapter_that_was_loaded_anew_has_another_label(
    shaping_server: SGLangServer, shaping_client: RecordClient, fresh_key: FreshKey
) -> None:
    """M10."""

    def labels(adapter: str | None) -> set[tuple[str | None, str]]:
        key = fresh_key()
        body = {"input_ids": PROMPT_IDS, "sampling_params": SAMPLED, "lora_path": adapter}
        response = post(shaping_server, "/generate", body, key)
        assert response.status_code == 200, response.text
        record = only(shaping_client.get(key))
        return {(record.adapter, span.version) for span in record.versions}

    def call(path: str, **body: Any) -> None:
        response = post(shaping_server, path, body)
        assert response.json()["success"], response.text

    assert labels("tiny") == {("tiny", "default")}
    call("/unload_lora_adapter", lora_name="tiny")
    call("/load_lora_adapter", lora_name="tiny", lora_path=str(tiny_lora()))
    assert labels("tiny") == {("tiny", "default+1")}
    assert labels(None) == {(None, "default")}
    call("/load_lora_adapter", lora_name="another", lora_path=str(tiny_lora()))
    assert labels("another") == {("another", "default")}
    shaping_client.set_version("told")
    assert labels("tiny") == {("tiny", "told")}


@pytest.fixture(scope="module")
def decode_server(log_folder: Path, engine_version: Version) -> Iterator[SGLangServer]:
    """The second half of a prefill/decode pair; nothing comes from the first."""
    # Its own choice wants 10 GB of free memory at start.
    retraction = ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    args = [
        *(retraction if engine_version >= Version("0.5.19") else []),
        *["--enable-recording", "--recording-routed-experts", "--dtype", "float32"],
        *["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake"],
        *["--recording-admin-key", ADMIN_KEY],
    ]
    with SGLangServer(tiny_qwen3_moe(), *args, log=log_folder / "decode.log") as server:
        yield server


@pytest.fixture(scope="module")
def decode_client(decode_server: SGLangServer) -> Iterator[RecordClient]:
    with RecordClient(decode_server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


def test_the_token_that_the_prefill_server_sampled_has_no_logprob_unless_the_client_asked(
    decode_server: SGLangServer, decode_client: RecordClient, fresh_key: FreshKey
) -> None:
    """Only the client's own request reaches both halves.

    M4.
    """
    key = fresh_key()
    body = {"input_ids": PROMPT_IDS, "sampling_params": SAMPLED, **NO_PREFILL}
    response = post(decode_server, "/generate", body, key)
    assert response.status_code == 200, response.text
    record = only(decode_client.get(key))
    assert record.response_ids.tolist() == response.json()["output_ids"]
    assert np.isnan(record.logprobs).tolist() == [True] + [False] * 7
    assert "logprobs_length_mismatch" not in record.flags
    [experience] = decode_client.experiences(key)
    assert experience.logprobs_valid.tolist() == [False] + [True] * 7
    assert counters(decode_client).errors == 0


def test_rows_of_experts_that_were_not_computed_here_are_not_valid(
    decode_server: SGLangServer, decode_client: RecordClient, fresh_key: FreshKey
) -> None:
    """The prompt was routed on the prefill server: its rows hold what was there before.

    M15.
    """
    key, prompt = fresh_key(), list(range(20, 60))
    body = {"input_ids": prompt, "sampling_params": SAMPLED, **NO_PREFILL}
    post(decode_server, "/generate", body, key)
    record = only(decode_client.get(key))
    routed = record.routed_experts
    assert routed.data.shape[0] == len(prompt) + 8 - 1
    assert routed.valid_ranges == ((len(prompt), len(prompt) + 7),)


def test_a_prefill_engine_is_refused_by_install_too() -> None:
    """M4."""
    arguments = SimpleNamespace(disaggregation_mode="prefill")
    with pytest.raises(UnsupportedEngineError, match="give the flag to the decode server"):
        compat.check_engine(arguments)


class OwnLauncher(SGLangServer):
    """The same server, started by a launcher that is not SGLang's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        launcher = self.command.index("sglang.launch_server")
        self.command[launcher] = "tests.sglang.own_launcher"


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_a_launcher_that_makes_its_arguments_itself_records(
    fresh_key: FreshKey, log_folder: Path, engine_version: Version, how: str
) -> None:
    """Ended as by an operator, it says what nobody has drained.

    E5, S13.
    """
    flags = {"flag": ["--enable-recording"], "environment": []}[how]
    env = {"RECORDER_ADMIN_KEY": ADMIN_KEY}
    if how == "environment":
        env["SGLANG_ENABLE_RECORDING"] = "1"
    log = log_folder / f"own-{how}.log"
    with (
        OwnLauncher(tiny_qwen3(), *flags, env=env, log=log) as server,
        RecordClient(server.base_url, admin_key=ADMIN_KEY) as client,
    ):
        key = fresh_key()
        [output] = generate(server, key, **SAMPLED)
        assert only(client.get(key)).response_ids.tolist() == output["output_ids"]
        os.kill(server.pid, signal.SIGTERM)
        server.wait(60)
    # Older releases kill themselves once their requests have ended.
    if engine_version >= Version("0.5.19"):
        assert server.log().count("1 records were not drained, 0 of them leased") == 1
