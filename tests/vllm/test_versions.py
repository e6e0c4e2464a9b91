"""Which weights sampled which tokens: labels, spans, and what the weights themselves say."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from packaging.version import Version

from examples.vllm_server import VLLMServer
from recorder_core import FinishReason, Record
from recorder_core.client import RecordClient
from tests.models import tiny_lora, tiny_qwen3
from tests.vllm.apis import LONG, PROMPT, ask, completions, only, settle, streaming
from tests.vllm.conftest import ADAPTER, ENGINE_KEY
from vllm_recorder.weights import WEIGHTS_CHANGED

Keys = Callable[[], str]

GREEDY = {"temperature": 0, "ignore_eos": True}
PER_TOKEN_SPANS = Version("0.32.0")
APPROXIMATE = ("version_boundary_approximate",)


def post(server: VLLMServer, path: str, *, json: Any = None, **params: str) -> None:
    """Call one of vLLM's own routes for trainers."""
    # Without certificates, which take longer to load than some generations last.
    reply = httpx.post(server.base_url + path, json=json, params=params, timeout=120, verify=False)
    assert reply.status_code == 200, reply.text


@pytest.fixture
def labels(record_client: RecordClient) -> Iterator[RecordClient]:
    """The label is `default` again afterwards."""
    yield record_client
    record_client.set_version("default")


def labelled_on_the_way(
    server: VLLMServer, key: str, changes: dict[int, Callable[[], None]], tokens: int
) -> list[int]:
    """Stream a generation, and call what is due once so many tokens have arrived.

    Returns:
        For each change, the tokens that had arrived before it.
    """
    arrived, before = 0, []
    request = completions(PROMPT, max_tokens=tokens, **GREEDY)
    with streaming(server, key, request) as chunks:
        for chunk in chunks:
            arrived += sum(len(choice["token_ids"]) for choice in chunk["choices"])
            for due in [each for each in changes if each <= arrived]:
                before.append(arrived)
                changes.pop(due)()
    assert arrived == tokens
    return before


def test_a_label_changed_in_the_middle_splits_the_generation_into_spans(
    recording_server: VLLMServer,
    labels: RecordClient,
    fresh_key: Keys,
    engine_version: Version,
) -> None:
    key, tokens = fresh_key(), 500
    labels.set_version("step-1")
    renamed = {"new_version": "step-3"}
    before = labelled_on_the_way(
        recording_server,
        key,
        {
            20: lambda: labels.set_version("step-2"),
            100: lambda: post(recording_server, "/update_weight_version", json=renamed),
        },
        tokens,
    )
    record = only(labels.get(key))
    assert [span.version for span in record.versions] == ["step-1", "step-2", "step-3"]
    starts, ends = [each.start for each in record.versions], [each.end for each in record.versions]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == tokens
    # What had arrived was sampled before the change.
    assert starts[1] >= before[0]
    assert starts[2] >= before[1]
    assert record.flags == (() if engine_version >= PER_TOKEN_SPANS else APPROXIMATE)
    (experience,) = labels.experiences(key)
    assert experience.model_version == "step-1"
    assert experience.model_version_range == ("step-1", "step-3")
    assert experience.model_versions == record.versions


def test_turns_under_different_weights_keep_their_spans(
    recording_server: VLLMServer, labels: RecordClient, fresh_key: Keys
) -> None:
    key = fresh_key()
    labels.set_version("step-3")
    request = completions(PROMPT, max_tokens=8, **GREEDY)
    first = ask(recording_server, key, request)
    labels.set_version("step-5")
    history = [*first.prompt_ids, *first.samples[0].ids, 20, 21, 22]
    ask(recording_server, key, completions(history, max_tokens=6, **GREEDY))
    root, turn = labels.get(key)
    assert turn.parent == root.id
    assert [root.versions, turn.versions] == [((0, 8, "step-3"),), ((0, 6, "step-5"),)]
    assert root.flags == turn.flags == ()
    (experience,) = labels.experiences(key)
    # Nobody sampled the three tokens in between.
    assert experience.model_versions == ((0, 8, "step-3"), (11, 17, "step-5"))
    assert experience.model_version == "step-3"
    assert experience.model_version_range == ("step-3", "step-5")


@pytest.mark.parametrize("how", ["pause", "abort_requests"])
def test_generations_aborted_for_new_weights_say_so(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys, how: str
) -> None:
    key = fresh_key()

    def abort() -> None:
        if how == "pause":
            post(recording_server, "/pause", mode="abort")
            post(recording_server, "/resume")
        else:
            post(recording_server, "/abort_requests", json={})

    arrived: list[int] = []
    reason = None
    request = completions(PROMPT, temperature=0, **LONG)
    with streaming(recording_server, key, request) as chunks:
        for chunk in chunks:
            for choice in chunk["choices"]:
                arrived += choice["token_ids"] or []
                reason = choice["finish_reason"] or reason
            if abort is not None and len(arrived) >= 20:
                abort()
                abort = None
    settle(record_client)
    record = only(record_client.get(key))
    assert reason == "abort"
    assert record.finish_reason is FinishReason.ABORT
    assert record.stop_reason is None
    assert 20 <= len(record.response_ids) < LONG["max_tokens"]
    assert record.response_ids.tolist() == arrived
    assert record.logprobs is not None
    assert not np.isnan(record.logprobs).any()
    # Served and recorded as before.
    ask(recording_server, key, completions(PROMPT, max_tokens=3, **GREEDY))
    assert len(record_client.get(key)) == 2


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after a step of training: all weights a little different."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(tiny_qwen3(), folder)
    file = folder / "model.safetensors"
    noise = torch.Generator().manual_seed(1)
    changed = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
        for name, tensor in load_file(file).items()
    }
    save_file(changed, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def reload_weights(
    keyed_server: VLLMServer, keyed_client: RecordClient, engine_version: Version
) -> Iterator[Callable[[Path, str], None]]:
    """Replaces the weights as a trainer does, who may tell no label; they are back afterwards.

    Of the server without adapters: older releases cannot reload weights below an adapter.
    """

    if engine_version < Version("0.30"):
        pytest.skip("this vLLM cannot reload the weights of a folder: it misses their names")

    def reload(folder: Path, version: str) -> None:
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        post(keyed_server, "/collective_rpc", json=rpc)
        if version:
            keyed_client.set_version(version)

    yield reload
    post(keyed_server, "/resume")
    settle(keyed_client)
    reload(tiny_qwen3(), "default")
    post(keyed_server, "/reset_prefix_cache")


class Reference:
    """The model as transformers computes it, in float32."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def after(self, ids: Sequence[int]) -> np.ndarray:
        """The logprobs of every token after each of `ids`."""
        with self._torch.no_grad():
            return self._model(self._torch.tensor([ids])).logits[0].log_softmax(-1).numpy()


def assert_sampled_by(reference: Reference, record: Record, start: int, end: int) -> None:
    """Given the tokens before, the reference picks the same tokens with the same logprobs."""
    prompt, response = record.prompt_ids.tolist(), record.response_ids.tolist()
    rows = reference.after([*prompt, *response[: end - 1]])[len(prompt) + start - 1 :]
    assert rows.argmax(-1).tolist() == response[start:end]
    picked = rows[np.arange(end - start), response[start:end]]
    np.testing.assert_allclose(record.logprobs[start:end], picked, atol=1e-3)


def test_spans_name_the_weights_that_sampled_the_tokens(
    keyed_server: VLLMServer,
    reload_weights: Callable[[Path, str], None],
    keyed_client: RecordClient,
    fresh_key: Keys,
    other_weights: Path,
    engine_version: Version,
) -> None:
    old, new = Reference(tiny_qwen3()), Reference(other_weights)
    before, across, after = fresh_key(), fresh_key(), fresh_key()
    request, tokens = completions(PROMPT, max_tokens=40, **GREEDY), 500
    ask(keyed_server, f"{ENGINE_KEY}:{before}", request)

    def new_weights() -> None:
        post(keyed_server, "/pause", mode="keep")
        reload_weights(other_weights, "step-1")
        post(keyed_server, "/resume")

    labelled_on_the_way(keyed_server, f"{ENGINE_KEY}:{across}", {30: new_weights}, tokens)
    post(keyed_server, "/reset_prefix_cache")
    ask(keyed_server, f"{ENGINE_KEY}:{after}", request)

    record = only(keyed_client.get(before))
    assert record.versions == ((0, 40, "default"),)
    assert_sampled_by(old, record, 0, 40)
    record = only(keyed_client.get(after))
    assert record.versions == ((0, 40, "step-1"),)
    assert_sampled_by(new, record, 0, 40)
    with pytest.raises(AssertionError):
        assert_sampled_by(old, record, 0, 40)  # the two can be told apart

    record = only(keyed_client.get(across))
    first, second = record.versions
    assert [first.version, second.version] == ["default", "step-1"]
    assert [first.start, first.end, second.end] == [0, second.start, tokens]
    assert_sampled_by(old, record, 0, first.end)
    # vLLM computes a generation that it kept anew with the weights that go on with it.
    assert_sampled_by(new, record, second.start, tokens)
    assert record.flags == (() if engine_version >= PER_TOKEN_SPANS else APPROXIMATE)


def test_weights_replaced_without_a_label_have_no_version(
    keyed_server: VLLMServer,
    reload_weights: Callable[[Path, str], None],
    keyed_client: RecordClient,
    fresh_key: Keys,
    other_weights: Path,
) -> None:
    """M10."""
    old = Reference(tiny_qwen3())
    run, across = fresh_key(), fresh_key()
    request = completions(PROMPT, max_tokens=8, **GREEDY)
    first = ask(keyed_server, f"{ENGINE_KEY}:{run}", request)
    changes = {30: lambda: reload_weights(other_weights, "")}
    (arrived,) = labelled_on_the_way(keyed_server, f"{ENGINE_KEY}:{across}", changes, 500)
    history = [*first.prompt_ids, *first.samples[0].ids, 20, 21, 22]
    ask(keyed_server, f"{ENGINE_KEY}:{run}", completions(history, max_tokens=8, **GREEDY))
    keyed_client.set_version("step-1")
    ask(keyed_server, f"{ENGINE_KEY}:{run}", request)

    before, unlabelled, labelled = keyed_client.get(run)
    assert (before.versions, before.flags) == (((0, 8, "default"),), ())
    assert (unlabelled.versions, unlabelled.flags) == ((), (WEIGHTS_CHANGED,))
    assert (labelled.versions, labelled.flags) == (((0, 8, "step-1"),), ())
    record = only(keyed_client.get(across))
    ((start, end, version),) = record.versions
    assert (start, version) == (0, "default")
    assert arrived <= end < 500
    assert WEIGHTS_CHANGED in record.flags
    assert_sampled_by(old, record, 0, end)
    with pytest.raises(AssertionError):
        assert_sampled_by(old, record, 0, end + 100)


def test_an_adapter_that_is_read_anew_has_no_version(
    recording_server: VLLMServer, labels: RecordClient, fresh_key: Keys
) -> None:
    """M10."""
    key, base = fresh_key(), fresh_key()
    request = completions(PROMPT, max_tokens=6, **GREEDY).updated(model=ADAPTER)
    ask(recording_server, key, request)
    anew = {"lora_name": ADAPTER, "lora_path": str(tiny_lora()), "load_inplace": True}
    post(recording_server, "/v1/load_lora_adapter", json=anew)
    ask(recording_server, key, request)
    ask(recording_server, base, completions(PROMPT, max_tokens=6, **GREEDY))
    labels.set_version("step-1")
    ask(recording_server, key, request)
    before, after, labelled = sorted(labels.get(key), key=lambda record: record.created_at)
    assert (before.versions, before.flags) == (((0, 6, "default"),), ())
    assert (after.versions, after.flags) == ((), (WEIGHTS_CHANGED,))
    assert (labelled.versions, labelled.flags) == (((0, 6, "step-1"),), ())
    assert only(labels.get(base)).versions == ((0, 6, "default"),)


def test_a_run_goes_on_under_the_next_version_of_its_adapter(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    """M11."""
    key = fresh_key()
    path: Any = PROMPT
    for version in (1, 2):
        name = f"policy-v{version}"
        loaded = {"lora_name": name, "lora_path": str(tiny_lora())}
        post(recording_server, "/v1/load_lora_adapter", json=loaded)
        request = completions(path, max_tokens=6, **GREEDY).updated(model=name)
        ask(recording_server, key, request)
        record = record_client.get(key)[0]
        path = [*record.prompt_ids.tolist(), *record.response_ids.tolist(), 5]
    (experience,) = record_client.experiences(prefix=key)
    assert experience.adapter == "policy"
    assert [span.version for span in experience.model_versions] == ["1", "2"]
    records = sorted(record_client.get(key), key=lambda record: record.created_at)
    assert [record.model for record in records] == ["policy-v1", "policy-v2"]


def test_what_only_looks_at_the_weights_changes_nothing(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    key = fresh_key()
    post(recording_server, "/collective_rpc", json={"method": "check_health"})
    ask(recording_server, key, completions(PROMPT, max_tokens=6, **GREEDY))
    assert only(record_client.get(key)).versions == ((0, 6, "default"),)
