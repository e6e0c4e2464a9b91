"""Weights that change while a generation runs: which tokens came from which, checked by both."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.sglang_server import SGLangServer
from recorder_core import FinishReason, Record, VersionSpan
from recorder_core.client import RecordClient
from sglang_recorder import compat
from tests.models import tiny_qwen3
from tests.sglang.apis import PROMPT_IDS, generate, only, post, streaming
from tests.sglang.conftest import ADMIN_KEY

pytestmark = pytest.mark.server
FreshKey = Callable[[], str]

TOKENS = 400
LONG = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}


FLUSHES_WHILE_RETRACTED = Version("0.5.21")
"""Before, a scheduler that is asked to flush its cache ends if generations wait for their turn."""


class Checkpoint:
    """A model on disk and in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def misses(self, record: Record) -> np.ndarray[Any, Any]:
        """How far each recorded logprob is from what these weights give for the whole text."""
        ids = torch.tensor([[*record.prompt_ids.tolist(), *record.response_ids.tolist()]])
        with torch.inference_mode():
            logits = self.model(ids).logits[0].float()[len(record.prompt_ids) - 1 : -1]
        chosen = torch.tensor(record.response_ids.tolist())[:, None]
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
        return np.abs(record.logprobs - expected)


@pytest.fixture(scope="module")
def old() -> Checkpoint:
    return Checkpoint(tiny_qwen3())


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory, old: Checkpoint) -> Checkpoint:
    """The same model with its layers' weights shaken."""
    folder = tmp_path_factory.mktemp("models") / "new"
    model = AutoModelForCausalLM.from_pretrained(old.folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.5 * parameter.std() * noise
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(old.folder).save_pretrained(folder)
    return Checkpoint(folder)


def call(server: SGLangServer, path: str, **body: Any) -> dict[str, Any]:
    response = post(server, path, body, ADMIN_KEY)
    assert response.status_code == 200, response.text
    return response.json()


def load(server: SGLangServer, checkpoint: Checkpoint, version: str, **fields: Any) -> None:
    path = str(checkpoint.folder)
    body = {"model_path": path, "weight_version": version, **fields}
    assert call(server, "/update_weights_from_disk", **body)["success"]


@pytest.fixture(autouse=True)
def original_weights(recording_server: SGLangServer, old: Checkpoint) -> Iterator[None]:
    """Every test begins with the old weights, and leaves them behind."""
    load(recording_server, old, "old")
    yield
    call(recording_server, "/continue_generation")
    load(recording_server, old, "default")


def interrupted(server: SGLangServer, key: str, mode: str, update: Callable[[], None]) -> list[int]:
    """A generation that is paused in its middle while `update` runs; the ids its client saw."""
    body = {"input_ids": PROMPT_IDS, "sampling_params": LONG}
    changed, seen = False, []
    with streaming(server, "/generate", body, key) as chunks:
        for chunk in chunks:
            # The last chunk of an abort may hold its last token alone.
            seen = max(seen, chunk["output_ids"], key=len)
            if len(seen) >= 20 and not changed:
                call(server, "/pause_generation", mode=mode)
                update()
                call(server, "/continue_generation")
                changed = True
    assert changed
    return seen


def boundary(record: Record, version: Version) -> int:
    """Where the record says that the weights changed."""
    first, second = record.versions
    assert (first.start, first.version) == (0, "old")
    assert (second.start, second.end, second.version) == (first.end, TOKENS, "new")
    exact = compat.reports_spans(version)
    assert ("version_boundary_approximate" in record.flags) == (not exact)
    return first.end


def test_retracted_generations_go_on_with_the_new_weights_from_the_boundary_on(
    recording_server: SGLangServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    engine_version: Version,
    old: Checkpoint,
    new: Checkpoint,
) -> None:
    key = fresh_key()
    flush = engine_version >= FLUSHES_WHILE_RETRACTED
    interrupted(
        recording_server,
        key,
        "retract",
        lambda: load(recording_server, new, "new", flush_cache=flush),
    )
    record = only(record_client.get(key))
    at = boundary(record, engine_version)
    if not flush:
        # What follows may stand on the old weights' cache, which is marked.
        assert "stale_prefix_cache" in record.flags
        assert old.misses(record)[: at - 4].max() < 1e-3
        assert old.misses(record)[at + 4 :].mean() > 0.1
        return
    assert old.misses(record)[:at].max() < 1e-3
    assert new.misses(record)[at:].max() < 1e-3
    assert min(old.misses(record)[at:].mean(), new.misses(record)[:at].mean()) > 0.1
    assert record.flags == ()
    [experience] = record_client.experiences(key)
    assert experience.model_version == "old"
    assert [span.version for span in experience.model_versions] == ["old", "new"]


def test_a_switch_in_place_is_marked_as_what_it_is(
    recording_server: SGLangServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    engine_version: Version,
    old: Checkpoint,
    new: Checkpoint,
) -> None:
    key, later, clean = fresh_key(), fresh_key(), fresh_key()
    interrupted(
        recording_server,
        key,
        "in_place",
        lambda: load(recording_server, new, "new", flush_cache=False),
    )
    record = only(record_client.get(key))
    at = boundary(record, engine_version)
    assert old.misses(record)[: at - 4].max() < 1e-3
    # New weights on the old ones' KV cache: neither checkpoint says these.
    assert min(old.misses(record)[at + 4 :].mean(), new.misses(record)[at + 4 :].mean()) > 0.02
    assert "in_place_weight_update" in record.flags

    # Its cache outlives it.
    prompt = [*PROMPT_IDS, *record.response_ids.tolist()]
    generate(recording_server, later, input_ids=prompt, **{**LONG, "max_new_tokens": 20})
    stale = only(record_client.get(later))
    assert stale.cached_tokens > 0
    assert "stale_prefix_cache" in stale.flags
    assert new.misses(stale).mean() > 0.02
    assert call_flush(recording_server)
    generate(recording_server, clean, input_ids=prompt, **{**LONG, "max_new_tokens": 20})
    fresh = only(record_client.get(clean))
    assert fresh.flags == ()
    assert new.misses(fresh).max() < 1e-3


def call_flush(server: SGLangServer) -> bool:
    return post(server, "/flush_cache", {}, ADMIN_KEY).status_code == 200


def test_a_pause_that_aborts_ends_the_generation_under_the_old_weights(
    recording_server: SGLangServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    old: Checkpoint,
    new: Checkpoint,
) -> None:
    key, later = fresh_key(), fresh_key()
    seen = interrupted(recording_server, key, "abort", lambda: load(recording_server, new, "new"))
    record = only(record_client.get(key))
    assert record.finish_reason is FinishReason.ABORT
    count = len(record.response_ids)
    assert 20 <= count < TOKENS
    assert record.response_ids.tolist()[: len(seen)] == seen[:count]
    assert record.versions == (VersionSpan(0, count, "old"),)
    assert old.misses(record).max() < 1e-3
    assert record.flags == ()

    generate(recording_server, later, **{**LONG, "max_new_tokens": 10})
    record = only(record_client.get(later))
    assert record.versions == (VersionSpan(0, 10, "new"),)
    assert new.misses(record).max() < 1e-3


def test_turns_under_different_weights_keep_their_versions_in_one_trajectory(
    recording_server: SGLangServer, record_client: RecordClient, fresh_key: FreshKey
) -> None:
    key, fields = fresh_key(), {"max_new_tokens": 6, "ignore_eos": True}
    [output] = generate(recording_server, key, **fields)
    record_client.set_version("5")
    generate(recording_server, key, input_ids=[*PROMPT_IDS, *output["output_ids"], 9], **fields)

    [experience] = record_client.experiences(key)
    spans = [(each.start, each.end, each.version) for each in experience.model_versions]
    assert spans == [(0, 6, "old"), (7, 13, "5")]


def test_weights_broadcast_over_gloo_while_generating(
    recording_server: SGLangServer,
    record_client: RecordClient,
    fresh_key: FreshKey,
    engine_version: Version,
    old: Checkpoint,
    new: Checkpoint,
) -> None:
    key, later = fresh_key(), fresh_key()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = trainer_group(recording_server, port)
    weights = dict(new.model.named_parameters())
    sessions = engine_version >= Version("0.5.21")
    flush = engine_version >= FLUSHES_WHILE_RETRACTED

    def update() -> None:
        if sessions:
            call(recording_server, "/begin_weight_update")
        sender = threading.Thread(target=broadcast, args=(weights, group))
        sender.start()
        names = list(weights)
        reply = call(
            recording_server,
            "/update_weights_from_distributed",
            names=names,
            dtypes=["float32"] * len(names),
            shapes=[list(weights[name].shape) for name in names],
            group_name="trainer",
            weight_version="new",
            flush_cache=flush,
        )
        sender.join()
        assert reply["success"], reply
        if sessions:
            call(recording_server, "/end_weight_update")

    interrupted(recording_server, key, "retract", update)
    record = only(record_client.get(key))
    at = boundary(record, engine_version)
    assert old.misses(record)[: at - 4].max() < 1e-3
    assert old.misses(record)[at + 4 :].mean() > 0.1
    if flush:
        assert old.misses(record)[:at].max() < 1e-3
        assert new.misses(record)[at:].max() < 1e-3
    assert call_flush(recording_server)
    generate(recording_server, later, **{**LONG, "max_new_tokens": 10})
    assert new.misses(only(record_client.get(later))).max() < 1e-3


def trainer_group(server: SGLangServer, port: int) -> Any:
    """A process group of this process, as the trainer, and the server."""
    from sglang.srt.utils import init_custom_process_group

    joined: list[Any] = []
    join = threading.Thread(
        target=lambda: joined.append(
            init_custom_process_group(
                backend="gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                world_size=2,
                rank=0,
                group_name="trainer",
                timeout=timedelta(seconds=60),
            )
        )
    )
    join.start()
    call(
        server,
        "/init_weights_update_group",
        master_address="127.0.0.1",
        master_port=port,
        rank_offset=1,
        world_size=2,
        group_name="trainer",
        backend="gloo",
    )
    join.join()
    return joined[0]


def broadcast(weights: dict[str, torch.Tensor], group: Any) -> None:
    for tensor in weights.values():
        torch.distributed.broadcast(tensor.detach().contiguous(), src=0, group=group)
