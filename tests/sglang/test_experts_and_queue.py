"""Routed experts and the waiting queue, on a mixture of experts that serves two at a time."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.sglang_server import SGLangServer
from recorder_core import FinishReason, Record
from recorder_core.client import RecordClient
from tests.models import tiny_qwen3_moe_wide
from tests.sglang.apis import (
    PROMPT_IDS,
    by_sample,
    counters,
    generate,
    only,
    post,
    settle,
    streaming,
    wait_until,
)
from tests.sglang.conftest import ENGINE_KEY

pytestmark = pytest.mark.server
FreshKey = Callable[[], str]
LAYERS, TOP_K = 4, 2


@pytest.fixture(scope="module")
def moe() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe_wide(), dtype=torch.float32).eval()


def routing(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """The router's choice for each token but the last: [length - 1, layers, top_k], sorted."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    chosen = torch.stack([each.topk(TOP_K, dim=-1).indices for each in logits], dim=1)
    return np.sort(chosen[:-1].numpy(), axis=-1)


def sorted_experts(record: Record) -> np.ndarray[Any, Any]:
    assert record.routed_experts is not None
    return np.sort(record.routed_experts.data, axis=-1)


def keyed(key: str) -> str:
    return f"{ENGINE_KEY}:{key}"


def test_routed_experts_are_the_routers_own_with_a_cached_prefix_and_two_samples(
    moe_server: SGLangServer, moe_client: RecordClient, fresh_key: FreshKey, moe: Any
) -> None:
    first, second = fresh_key(), fresh_key()
    prompt = list(range(20, 80))
    fields = {"input_ids": prompt, "max_new_tokens": 10, "ignore_eos": True, "n": 2}
    outputs = generate(moe_server, keyed(first), **fields)
    generate(moe_server, keyed(second), **fields)
    assert all("routed_experts" not in output["meta_info"] for output in outputs)

    for record in [*by_sample(moe_client.get(first)), *by_sample(moe_client.get(second))]:
        ids = [*prompt, *record.response_ids.tolist()]
        assert record.routed_experts.data.shape == (len(ids) - 1, LAYERS, TOP_K)
        assert record.routed_experts.data.dtype == np.uint16
        assert record.routed_experts.data.max() > 255  # of 300 experts
        np.testing.assert_array_equal(sorted_experts(record), routing(moe, ids))
        assert record.cached_tokens > 0


def test_a_client_that_asks_for_routed_experts_gets_those_that_are_recorded(
    moe_server: SGLangServer, moe_client: RecordClient, fresh_key: FreshKey
) -> None:
    key = fresh_key()
    [output] = generate(
        moe_server, keyed(key), return_routed_experts=True, max_new_tokens=4, ignore_eos=True
    )
    shown = np.frombuffer(
        base64.b64decode(output["meta_info"]["routed_experts"]), dtype=np.int32
    ).reshape(-1, LAYERS, TOP_K)
    np.testing.assert_array_equal(only(moe_client.get(key)).routed_experts.data, shown)


def test_a_stream_of_increments_is_recorded_with_logprobs_before_temperature(
    moe_server: SGLangServer, moe_client: RecordClient, fresh_key: FreshKey, moe: Any
) -> None:
    key = fresh_key()
    sampling = {"max_new_tokens": 21, "ignore_eos": True, "temperature": 0.5}
    body = {"input_ids": PROMPT_IDS, "return_logprob": True, "sampling_params": sampling}
    ids: list[int] = []
    values: list[float] = []
    text, sizes = "", set()
    with streaming(moe_server, "/generate", body, keyed(key)) as chunks:
        for chunk in chunks:
            sizes.add(len(chunk["output_ids"]))
            ids += chunk["output_ids"]
            text += chunk["text"]
            values += [each[0] for each in chunk["meta_info"]["output_token_logprobs"]]
    assert max(sizes) < 21  # no chunk has it all

    record = only(moe_client.get(key))
    assert record.response_ids.tolist() == ids
    assert record.response_text == text
    np.testing.assert_array_equal(record.logprobs, np.array(values, dtype=np.float32))
    assert record.sampling.logprobs_mode == "original_logprobs"
    with torch.inference_mode():
        logits = moe(torch.tensor([[*PROMPT_IDS, *ids]])).logits[0, len(PROMPT_IDS) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
    np.testing.assert_allclose(record.logprobs, expected, atol=1e-4)


def test_turns_of_a_conversation_have_one_row_per_token(
    moe_server: SGLangServer, moe_client: RecordClient, fresh_key: FreshKey, moe: Any
) -> None:
    key = fresh_key()
    fields = {"max_new_tokens": 6, "ignore_eos": True}
    [output] = generate(moe_server, keyed(key), **fields)
    longer = [*PROMPT_IDS, *output["output_ids"], 9, 10, 11]
    generate(moe_server, keyed(key), input_ids=longer, **fields)

    [experience] = moe_client.experiences(key)
    tokens = experience.tokens.tolist()
    routed = experience.routed_experts
    assert (routed.start, len(routed.data)) == (0, len(tokens) - 1)
    assert routed.valid_ranges == ((0, len(tokens) - 1),)
    np.testing.assert_array_equal(np.sort(routed.data, axis=-1), routing(moe, tokens))


def test_a_request_aborted_in_the_queue_leaves_a_count_and_no_record(
    moe_server: SGLangServer, moe_client: RecordClient, fresh_key: FreshKey
) -> None:
    running, queued = [fresh_key(), fresh_key()], fresh_key()
    before = counters(moe_client)
    body = {"input_ids": PROMPT_IDS, "sampling_params": {"max_new_tokens": 1500}}
    body["sampling_params"]["ignore_eos"] = True

    def occupy(key: str, started: threading.Event, leave: threading.Event) -> None:
        with streaming(moe_server, "/generate", body, keyed(key)) as chunks:
            for _ in chunks:
                started.set()
                if leave.is_set():
                    break

    started, leave = [threading.Event(), threading.Event()], threading.Event()
    threads = [
        threading.Thread(target=occupy, args=(*each, leave))
        for each in zip(running, started, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        assert all(each.wait(30) for each in started)  # both places are taken
        waiting = threading.Thread(
            target=post,
            args=(moe_server, "/generate", {**body, "rid": "queued"}, keyed(queued)),
        )
        waiting.start()
        wait_until(lambda: any(each.pending for each in moe_client.keys(queued)))
        assert post(moe_server, "/abort_request", {"rid": "queued"}, ENGINE_KEY).is_success
        wait_until(lambda: counters(moe_client).dropped != before.dropped)
        waiting.join(30)
    finally:
        leave.set()
        for thread in threads:
            thread.join()
    with httpx.Client(base_url=moe_server.base_url) as http:
        headers = {"authorization": f"Bearer {ENGINE_KEY}"}
        http.post("/abort_request", json={"abort_all": True}, headers=headers)
    settle(moe_client)

    after = counters(moe_client)
    assert moe_client.get(queued) == []
    assert after.dropped.get("empty", 0) == before.dropped.get("empty", 0) + 1
    assert after.started == before.started + 3
    assert after.recorded == before.recorded + 2
    for key in running:
        record = only(moe_client.get(key))
        assert record.finish_reason is FinishReason.ABORT or "client_disconnected" in record.flags
