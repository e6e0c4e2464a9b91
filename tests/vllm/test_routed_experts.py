"""Which experts routed each token, as the router of transformers' model chooses them."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from packaging.version import Version
from transformers import AutoModelForCausalLM

from examples.vllm_server import VLLMServer
from recorder_core import Experience
from recorder_core.client import RecordClient
from tests.models import tiny_qwen3, tiny_qwen3_moe
from tests.vllm.apis import Request, ask, chat, completions, generate, only, send
from tests.vllm.conftest import ADMIN_KEY, ENV, SERVING

pytestmark = [
    pytest.mark.server,
    # The CPU builds before it return none, and those after it need Triton for them.
    pytest.mark.skipif(
        Version(Version(vllm.__version__).base_version) != Version("0.30.0"),
        reason="only vLLM 0.30.0 returns routed experts on a CPU",
    ),
]
FreshKey = Callable[[], str]
LAYERS, TOP_K = 4, 2


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def moe_server(log_folder: Path) -> Iterator[VLLMServer]:
    args = ["--enable-recording", "--recording-routed-experts", *SERVING]
    with VLLMServer(tiny_qwen3_moe(), *args, env=ENV, log=log_folder / "moe.log") as server:
        yield server


@pytest.fixture(scope="module")
def moe_client(moe_server: VLLMServer) -> Iterator[RecordClient]:
    with RecordClient(moe_server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


def chosen_by_router(model: Any, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[length - 1, layers, top_k], the experts of a token in ascending order."""
    with torch.inference_mode():
        output = model(torch.tensor([tokens.tolist()]), output_router_logits=True)
    layers = [each.topk(TOP_K, dim=-1).indices for each in output.router_logits]
    return torch.stack(layers, dim=1).sort(-1).values.numpy()[:-1]


def assert_routed_as(model: Any, experience: Experience) -> None:
    routed = experience.routed_experts
    assert routed.start == 0
    assert routed.valid_ranges == ((0, len(experience.tokens) - 1),)
    assert routed.data.shape == (len(experience.tokens) - 1, LAYERS, TOP_K)
    assert routed.data.dtype == np.uint8
    expected = chosen_by_router(model, experience.tokens)
    np.testing.assert_array_equal(np.sort(routed.data, axis=-1), expected)
    assert len(np.unique(routed.data)) > 4


@pytest.mark.parametrize("api", [chat, completions, generate])
def test_every_token_has_the_experts_of_the_router(
    moe_server: VLLMServer,
    moe_client: RecordClient,
    fresh_key: FreshKey,
    model: Any,
    api: Callable[..., Request],
) -> None:
    key = fresh_key()
    ask(moe_server, key, api(max_tokens=20, seed=1, temperature=1.0))
    [experience] = moe_client.experiences(key)
    assert_routed_as(model, experience)


def test_samples_of_one_prompt_have_rows_of_their_own(
    moe_server: VLLMServer, moe_client: RecordClient, fresh_key: FreshKey, model: Any
) -> None:
    key = fresh_key()
    ask(moe_server, key, chat(max_tokens=20, seed=1, temperature=1.0, n=2), stream=True)
    experiences = moe_client.experiences(key)
    assert len(experiences) == 2
    for experience in experiences:
        assert_routed_as(model, experience)


def test_rows_of_a_cached_prompt_are_there(
    moe_server: VLLMServer, moe_client: RecordClient, fresh_key: FreshKey, model: Any
) -> None:
    request = chat("A long story. " * 80, max_tokens=8, seed=1, temperature=1.0)
    ask(moe_server, fresh_key(), request)
    key = fresh_key()
    ask(moe_server, key, request)
    assert only(moe_client.get(key)).cached_tokens > 0
    [experience] = moe_client.experiences(key)
    assert_routed_as(model, experience)


def test_a_later_turn_stores_new_rows_only_and_is_whole_when_assembled(
    moe_server: VLLMServer, moe_client: RecordClient, fresh_key: FreshKey, model: Any
) -> None:
    key = fresh_key()
    tokens = tuple(range(5, 205))  # long enough for the second turn to find it in the cache
    for _ in range(2):
        reply = ask(moe_server, key, generate(tokens, max_tokens=10, seed=1))
        tokens = (*tokens, *reply.samples[0].ids, 300, 301)

    first, second = sorted(moe_client.get(key), key=lambda record: record.created_at)
    assert second.parent == first.id
    assert (first.routed_experts.start, first.routed_experts.end) == (0, 209)
    assert (second.routed_experts.start, second.routed_experts.end) == (209, 221)
    [experience] = moe_client.experiences(key)
    assert_routed_as(model, experience)


def test_rows_end_where_a_stop_string_cut_the_response(
    moe_server: VLLMServer, moe_client: RecordClient, fresh_key: FreshKey, model: Any
) -> None:
    key = fresh_key()
    digits = {"allowed_token_ids": [20, 21, 22], "stop": ["10", "21", "02"], "seed": 1}
    ask(moe_server, key, chat(max_tokens=40, **digits))
    record = only(moe_client.get(key))
    assert record.stop_reason in digits["stop"]
    [experience] = moe_client.experiences(key)
    assert_routed_as(model, experience)


def routed_of(body: dict[str, Any]) -> Any:
    [choice] = body["choices"]
    return choice.get("routed_experts")


def test_replies_do_not_show_what_only_the_recorder_asked_for(
    moe_server: VLLMServer, fresh_key: FreshKey
) -> None:
    for api in (chat, completions, generate):
        for key in (fresh_key(), "EMPTY"):
            assert routed_of(send(moe_server, key, api(max_tokens=4)).json()) is None


def test_replies_show_what_the_engine_was_asked_for(log_folder: Path, fresh_key: FreshKey) -> None:
    args = ["--enable-recording", "--recording-routed-experts", "--enable-return-routed-experts"]
    args += SERVING
    with (
        VLLMServer(tiny_qwen3_moe(), *args, env=ENV, log=log_folder / "moe-shown.log") as server,
        RecordClient(server.base_url, admin_key=ADMIN_KEY) as client,
    ):
        for api in (chat, generate):
            key = fresh_key()
            shown = routed_of(send(server, key, api(max_tokens=4)).json())
            rows = np.load(io.BytesIO(base64.b64decode(shown)))
            recorded = only(client.get(key)).routed_experts
            np.testing.assert_array_equal(recorded.data, rows)


def test_a_dense_model_with_the_flag_is_refused_at_start(log_folder: Path) -> None:
    args = ["--enable-recording", "--recording-routed-experts", *SERVING]
    server = VLLMServer(tiny_qwen3(), *args, env=ENV, log=log_folder / "dense.log")
    with pytest.raises(RuntimeError, match="ended with"), server:
        pass
    assert (
        "--recording-routed-experts: the model has no experts; leave the flag out" in server.log()
    )
