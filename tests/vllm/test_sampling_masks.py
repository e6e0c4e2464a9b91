"""What truncation left of the vocabulary for each token, where `--return-sampling-mask` is given.

A stand-in: vLLM takes the masks in a model runner that no CPU has. Here `sampling_mask_stand_in`
takes them, in the CPU's runner, and vLLM's check for the other runner is passed over. Everything
from the scheduler on is vLLM's own: how masks are cut up, sent, streamed and shown. So these tests
say that what the engine gives is recorded, and nothing about its kernel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM
from vllm.config import ModelConfig

from examples.vllm_server import VLLMServer
from recorder_core import Experience, Record, SamplingMask
from recorder_core.client import RecordClient
from recorder_core.recorder import Recorder
from tests.models import tiny_qwen3
from tests.vllm import sampling_mask_stand_in
from tests.vllm.apis import (
    Request,
    ask,
    by_sample,
    chat,
    completions,
    generate,
    only,
    send,
    streaming,
    wait_until,
)
from tests.vllm.conftest import ADMIN_KEY, AS_UNTESTED, ENV, PACED, SERVING
from vllm_recorder.sampling_masks import SamplingMaskChunks

returned = pytest.mark.skipif(
    not hasattr(ModelConfig, "return_sampling_mask"), reason="vLLM returns masks since 0.28"
)
FreshKey = Callable[[], str]
TEMPERATURE = 0.8
SAMPLED: dict[str, Any] = {"temperature": TEMPERATURE, "seed": 1, "max_tokens": 20}


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def server(log_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """As an untested release: the check at start has to ask for what vLLM then wants, too."""
    folder = tmp_path_factory.mktemp("plugin")
    sampling_mask_stand_in.make_plugin(folder)
    env = {**ENV, "PYTHONPATH": os.pathsep.join([str(folder), ENV["PYTHONPATH"]])}
    # vLLM refuses logits processors of others beside the masks.
    args = [each for each in SERVING if each not in PACED]
    args += ["--enable-recording", "--return-sampling-mask"]
    args += ["--logprobs-mode", "processed_logprobs"]
    server = VLLMServer(tiny_qwen3(), *args, env=env, log=log_folder / "masks.log")
    server.command[:1] = [sys.executable, "-c", AS_UNTESTED]
    with server:
        yield server


@pytest.fixture(scope="module")
def client(server: VLLMServer) -> Iterator[RecordClient]:
    with RecordClient(server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


def mask_of(record: Record) -> SamplingMask:
    assert record.sampling_mask is not None
    assert record.flags == ()
    return record.sampling_mask


def assert_drawn_from(model: Any, experience: Experience, most: int) -> None:
    """The ids are the likeliest of transformers' model, and the logprobs are taken over them."""
    mask, logprobs = experience.sampling_mask, experience.logprobs
    assert mask is not None
    assert logprobs is not None
    assert 0 < mask.counts.min() <= mask.counts.max() <= most
    with torch.inference_mode():
        logits = model(torch.tensor([experience.tokens.tolist()])).logits[0] / TEMPERATURE
    rows = logits[experience.prompt_length - 1 : -1]
    sampled = experience.tokens[experience.prompt_length :].tolist()
    for row, token, logprob, ids in zip(rows, sampled, logprobs, mask.tolist(), strict=True):
        assert sorted(ids) == sorted(row.topk(len(ids)).indices.tolist())
        assert token in ids
        expected = row[token] - row[ids].logsumexp(0)
        assert logprob == pytest.approx(expected.item(), abs=1e-3)


@returned
@pytest.mark.server
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", [chat, completions, generate])
def test_each_token_has_the_ids_that_top_k_left(
    server: VLLMServer,
    client: RecordClient,
    fresh_key: FreshKey,
    model: Any,
    api: Callable[..., Request],
    stream: bool,
) -> None:
    """M13."""
    key = fresh_key()
    ask(server, key, api(top_k=5, **SAMPLED), stream=stream)
    (experience,) = client.experiences(key)
    assert_drawn_from(model, experience, most=5)
    assert experience.sampling_mask is not None
    assert experience.sampling_mask.counts.tolist() == [5] * experience.response_length


@returned
@pytest.mark.server
@pytest.mark.parametrize("narrowed", [{"top_p": 0.6}, {"min_p": 0.1}], ids=str)
def test_each_token_has_as_many_ids_as_were_left(
    server: VLLMServer,
    client: RecordClient,
    fresh_key: FreshKey,
    model: Any,
    narrowed: dict[str, float],
) -> None:
    """M13."""
    key = fresh_key()
    ask(server, key, chat(top_k=30, **narrowed, **SAMPLED))
    (experience,) = client.experiences(key)
    assert_drawn_from(model, experience, most=30)
    assert experience.sampling_mask is not None
    assert len(set(experience.sampling_mask.counts.tolist())) > 3


@returned
@pytest.mark.server
def test_replies_show_the_masks_that_are_recorded(
    server: VLLMServer, client: RecordClient, fresh_key: FreshKey, engine_version: Version
) -> None:
    """The same ones as without a record key, whole and, where vLLM streams them, streamed.

    M13.
    """
    request = generate(top_k=30, top_p=0.6, **SAMPLED)
    whole, streamed = fresh_key(), fresh_key()
    [choice] = send(server, whole, request).json()["choices"]
    [unrecorded] = send(server, None, request).json()["choices"]
    with streaming(server, streamed, request) as chunks:
        pieces = [each for chunk in chunks for each in chunk["choices"]]

    shown = choice["sampling_mask"]
    assert len(shown) == len(choice["token_ids"]) > 0
    assert choice == unrecorded
    in_stream = [ids for each in pieces for ids in each.get("sampling_mask") or ()]
    assert in_stream == (shown if engine_version >= Version("0.32") else [])
    for key in (whole, streamed):
        assert mask_of(only(client.get(key))).tolist() == shown


@returned
@pytest.mark.server
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_samples_of_one_prompt_have_masks_of_their_own(
    server: VLLMServer, client: RecordClient, fresh_key: FreshKey, model: Any, stream: bool
) -> None:
    """M13."""
    key = fresh_key()
    ask(server, key, chat(n=2, top_k=30, top_p=0.6, **SAMPLED), stream=stream)
    first, second = by_sample(client.get(key)).values()
    assert mask_of(first) != mask_of(second)
    for experience in client.experiences(key):
        assert_drawn_from(model, experience, most=30)


@returned
@pytest.mark.server
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_masks_end_where_a_stop_string_cut_the_response(
    server: VLLMServer, client: RecordClient, fresh_key: FreshKey, stream: bool
) -> None:
    """M13."""
    key = fresh_key()
    digits = {"allowed_token_ids": [20, 21, 22], "stop": ["10", "21", "02"], "top_k": 30}
    ask(server, key, chat(**digits, **{**SAMPLED, "max_tokens": 40}), stream=stream)
    record = only(client.get(key))
    assert record.stop_reason in digits["stop"]
    assert record.sampling_mask is not None
    assert record.sampling_mask.tolist() == [[20, 21, 22]] * record.response_count


@returned
@pytest.mark.server
def test_what_the_client_put_between_two_turns_has_no_ids(
    server: VLLMServer, client: RecordClient, fresh_key: FreshKey
) -> None:
    """M13."""
    key = fresh_key()
    tokens = (5, 300, 7, 8)
    for _ in range(2):
        sampled = ask(server, key, generate(tokens, top_k=5, **SAMPLED)).samples[0].ids
        tokens = (*tokens, *sampled, 300, 301)
    (experience,) = client.experiences(key)
    assert experience.sampling_mask is not None
    assert experience.action_mask is not None
    assert (experience.sampling_mask.counts > 0).tolist() == experience.action_mask.tolist()


@returned
@pytest.mark.server
def test_a_client_that_goes_leaves_the_masks_of_what_it_got(
    server: VLLMServer, client: RecordClient, fresh_key: FreshKey
) -> None:
    """M13."""
    key = fresh_key()
    request = chat(top_k=5, **{**SAMPLED, "max_tokens": 7000}, ignore_eos=True)
    with streaming(server, key, request) as chunks:
        for _ in range(5):
            next(chunks)
    wait_until(lambda: bool(client.get(key)))
    record = only(client.get(key))
    assert record.finish_reason.value == "abort"
    assert mask_of(record).counts.tolist() == [5] * record.response_count


class Chunk:
    """As vLLM's `SamplingMaskLists`."""

    def __init__(self, token_ids: Any, offsets: Any = None) -> None:
        self.token_ids = token_ids
        self.offsets = offsets


ONE = Chunk(np.array([7, 8], np.int32))
TWO = Chunk(np.array([1, 2, 3], np.int32), np.array([0, 1, 3]))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.close()


def test_masks_stay_when_vllm_clears_what_it_has_streamed(recorder: Recorder) -> None:
    """M13."""
    chunks = SamplingMaskChunks(recorder)
    chunks.append(ONE)
    chunks.clear()
    chunks.append(TWO)
    assert list(chunks) == [TWO]
    assert chunks.joined(3).tolist() == [[7, 8], [1], [2, 3]]
    assert chunks.joined(2).tolist() == [[7, 8], [1]]


@pytest.mark.parametrize("broken", [Chunk(["no id"]), Chunk(ONE.token_ids, np.array([0, 1]))])
def test_a_mask_that_cannot_be_read_is_vllms_all_the_same(
    recorder: Recorder, broken: Chunk
) -> None:
    """It is counted, and the record's mask is short: it is flagged.

    M13.
    """
    chunks = SamplingMaskChunks(recorder)
    chunks.append(ONE)
    chunks.append(broken)
    assert list(chunks) == [ONE, broken]
    assert recorder.stats().errors == 1
    assert chunks.joined(2).counts.tolist() == [2]
