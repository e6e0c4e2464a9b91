"""Engines in this process: `install()` on `LLM` and `AsyncLLM`, keys given in Python."""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from packaging.version import Version
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.openai.api_server import build_app, init_app_state
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

import vllm_recorder
from examples.vllm_server import ENVIRONMENT
from recorder_core import FinishReason, Record, Recorder
from recorder_core.stores import MemoryStore
from tests.models import tiny_qwen3
from tests.records import whole_prompts
from vllm_recorder import hook, plugin

PROMPTS = [
    "Subject to the terms of this License",
    "0123456789",
    "You may reproduce and distribute copies of the Work",
]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "max_tokens": 12, "ignore_eos": True}
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024}


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def llm(environment: None) -> Iterator[LLM]:
    engine = LLM(str(tiny_qwen3()), **ENGINE)
    yield engine
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()


@pytest.fixture
def recorder(llm: LLM) -> Iterator[Recorder]:
    """A new recorder on the engine, for one test."""
    yield vllm_recorder.install(llm)
    vllm_recorder.uninstall(llm)


def records_of(recorder: Recorder, prefix: str = "") -> list[Record]:
    assert recorder.flush(10)
    return recorder.get(prefix)


def replies(outputs: list[RequestOutput]) -> list[Any]:
    """What a user gets, without request ids and times."""
    return [
        (each.prompt, each.prompt_token_ids, each.prompt_logprobs, each.outputs, each.finished)
        for each in outputs
    ]


def generate(llm: LLM, prompts: list[str], **params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(**params), use_tqdm=False)


def one_by_one(llm: LLM, **params: Any) -> list[RequestOutput]:
    """As `generate`; how prompts share steps, and so the last bits, is a matter of timing."""
    return [each for prompt in PROMPTS for each in generate(llm, [prompt], **params)]


def test_nothing_is_patched_until_an_engine_is_installed(llm: LLM) -> None:
    processor = llm.llm_engine.output_processor
    assert "add_request" not in vars(processor)
    assert OutputProcessor.add_request.__module__ == "vllm.v1.engine.output_processor"
    assert RequestState._new_completion_output.__module__ == "vllm.v1.engine.output_processor"


def test_install_and_uninstall_are_idempotent(llm: LLM) -> None:
    processor, engine = llm.llm_engine.output_processor, llm.llm_engine
    first = vllm_recorder.install(llm)
    try:
        assert vllm_recorder.install(llm).recorder is first.recorder
        assert vllm_recorder.install(engine).recorder is first.recorder
        with vllm_recorder.record_key("0/install/0"):
            generate(llm, PROMPTS[:1], **GREEDY)
        assert len(records_of(first)) == 1  # installed twice, recorded once
    finally:
        vllm_recorder.uninstall(llm)
    vllm_recorder.uninstall(llm)
    assert processor.add_request.__func__ is OutputProcessor.add_request
    assert engine.set_weight_version.__func__ is type(engine).set_weight_version
    with vllm_recorder.record_key("0/install/0"):
        generate(llm, PROMPTS[:1], **GREEDY)
    assert first.stats().recorder.started == 1
    second = vllm_recorder.install(llm)
    vllm_recorder.uninstall(llm)
    assert second.recorder is not first.recorder


def test_a_generation_is_recorded_under_the_key_in_force(llm: LLM, recorder: Recorder) -> None:
    with vllm_recorder.record_key("3/sort/1") as key:
        (output,) = generate(llm, PROMPTS[:1], **SAMPLED)
    (record,) = records_of(recorder)
    assert record.key == key
    assert record.parent is None
    assert record.prompt_ids.tolist() == list(output.prompt_token_ids)
    assert record.response_ids.tolist() == list(output.outputs[0].token_ids)
    assert record.prompt_text == PROMPTS[0]
    assert record.response_text == output.outputs[0].text
    assert record.finish_reason is FinishReason.LENGTH
    assert record.stop_reason is None
    assert record.versions == ((0, 12, "default"),)
    assert record.sampling.temperature == 1.0
    assert record.sampling.top_p == 0.9
    assert record.sampling.seed == 7
    assert record.sampling.logprobs_mode == "raw_logprobs"
    assert 0 < record.created_at <= record.finished_at
    assert record.flags == ()


def test_requests_of_one_batch_have_keys_of_their_own(llm: LLM, recorder: Recorder) -> None:
    params = [
        SamplingParams(**GREEDY, extra_args={"record_key": f"4/task-{i}/{i}"}) for i in range(2)
    ]
    outputs = llm.generate(PROMPTS, [*params, SamplingParams(**GREEDY)], use_tqdm=False)
    for i in range(2):
        (record,) = records_of(recorder, f"4/task-{i}")
        assert str(record.key) == f"4/task-{i}/{i}"
        assert record.prompt_ids.tolist() == list(outputs[i].prompt_token_ids)
        assert record.response_ids.tolist() == list(outputs[i].outputs[0].token_ids)
    stats = recorder.stats().recorder
    assert (stats.started, stats.recorded, stats.unkeyed) == (2, 2, {"missing": 1})


def test_generations_sampled_alike_share_what_says_so(llm: LLM, recorder: Recorder) -> None:
    """M7."""
    shaped = {**GREEDY, "logit_bias": {300: 2.0}, "bad_words": ["!"]}
    with vllm_recorder.record_key("22/alike/0"):
        for params in (GREEDY, shaped):
            generate(llm, PROMPTS[:2], **params)
    plain, again, biased, too = (record.sampling for record in records_of(recorder))
    assert plain is again
    assert biased is too
    assert (biased.logit_bias, biased.bad_words) == ({300: 2.0}, ("!",))
    assert plain.logit_bias is None


def test_each_of_n_samples_is_a_record(llm: LLM, recorder: Recorder) -> None:
    with vllm_recorder.record_key("5/n/0"):
        (output,) = generate(llm, PROMPTS[:1], **SAMPLED, n=3)
    records = sorted(records_of(recorder), key=lambda record: record.sample_index)
    assert [record.sample_index for record in records] == [0, 1, 2]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
    for record, sample in zip(records, output.outputs, strict=True):
        assert record.response_ids.tolist() == list(sample.token_ids)
        assert record.response_text == sample.text
        assert record.parent is None
    assert recorder.stats().recorder.roots == 3


def test_a_second_turn_continues_the_first(llm: LLM, recorder: Recorder) -> None:
    with vllm_recorder.record_key("6/turns/0"):
        (first,) = generate(llm, PROMPTS[:1], **GREEDY)
        history = [*first.prompt_token_ids, *first.outputs[0].token_ids, 40, 41, 42]
        second = llm.generate(
            {"prompt_token_ids": history}, SamplingParams(**GREEDY), use_tqdm=False
        )[0]
    root, turn = records_of(recorder)
    assert turn.parent == root.id
    assert turn.prompt_ids.tolist() == [40, 41, 42]
    assert turn.response_ids.tolist() == list(second.outputs[0].token_ids)


def test_generations_without_a_key_are_counted_by_reason(llm: LLM, recorder: Recorder) -> None:
    with vllm_recorder.record_key("7/skip/0"):
        with vllm_recorder.skip_recording():
            generate(llm, PROMPTS[:2], **GREEDY)
        generate(llm, PROMPTS[:1], **GREEDY)
    generate(llm, PROMPTS[:1], **GREEDY)
    for text in ("EMPTY", "a/b", "a//x"):
        generate(llm, PROMPTS[:1], **GREEDY, extra_args={"record_key": text})
    assert [str(record.key) for record in records_of(recorder)] == ["7/skip/0"]
    stats = recorder.stats().recorder
    assert stats.unkeyed == {"skipped": 2, "missing": 1, "not_a_key": 1, "malformed": 2}
    assert (stats.started, stats.recorded, stats.dropped, stats.pending) == (1, 1, {}, 0)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("asked", [0, 5])
def test_logprobs_are_those_that_a_client_gets_bit_by_bit(
    llm: LLM, recorder: Recorder, params: dict[str, Any], asked: int
) -> None:
    with vllm_recorder.record_key("8/silent/0"):
        outputs = one_by_one(llm, **params)
    with vllm_recorder.record_key("8/asking/0"):
        twins = one_by_one(llm, **params, logprobs=asked)
    silent, asking = (records_of(recorder, f"8/{name}") for name in ("silent", "asking"))
    prompts = whole_prompts([*silent, *asking])
    by_prompt = {tuple(prompts[record.id]): record for record in silent}
    twins_by_prompt = {tuple(prompts[record.id]): record for record in asking}
    for output, twin in zip(outputs, twins, strict=True):
        sample = twin.outputs[0]
        assert output.outputs[0].logprobs is None
        assert output.outputs[0].token_ids == sample.token_ids
        pairs = zip(sample.logprobs, sample.token_ids, strict=True)
        expected = np.array([at[token].logprob for at, token in pairs], dtype=np.float32)
        prompt = tuple(output.prompt_token_ids)
        assert by_prompt[prompt].logprobs.tobytes() == expected.tobytes()
        assert twins_by_prompt[prompt].logprobs.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "params",
    [GREEDY, {**SAMPLED, "n": 2}, {**SAMPLED, "logprobs": 2, "prompt_logprobs": 1}],
    ids=["greedy", "sampled-n2", "with-logprobs"],
)
def test_outputs_are_the_same_with_and_without_recording(llm: LLM, params: dict[str, Any]) -> None:
    without = one_by_one(llm, **params)
    recorder = vllm_recorder.install(llm)
    try:
        with vllm_recorder.record_key("9/same/0"):
            recorded = one_by_one(llm, **params)
    finally:
        vllm_recorder.uninstall(llm)
    assert replies(recorded) == replies(without)
    assert len(records_of(recorder)) == len(PROMPTS) * params.get("n", 1)
    if "logprobs" not in params:
        sample = recorded[0].outputs[0]
        assert (sample.logprobs, sample.cumulative_logprob) == (None, None)


def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_ids(
    llm: LLM, recorder: Recorder
) -> None:
    text = generate(llm, PROMPTS[1:2], **GREEDY)[0].outputs[0].text
    stop = text[4:6]  # spans tokens: most are one character each
    assert text.index(stop) > 0
    params = {**GREEDY, "stop": [stop]}
    vllm_recorder.uninstall(llm)
    without = generate(llm, PROMPTS[1:2], **params)
    vllm_recorder.install(llm, recorder.recorder)
    with vllm_recorder.record_key("10/stop/0"):
        (output,) = generate(llm, PROMPTS[1:2], **params)
    assert replies([output]) == replies(without)
    sample = output.outputs[0]
    (record,) = records_of(recorder)
    assert record.response_ids.tolist() == list(sample.token_ids)
    assert len(record.logprobs) == len(sample.token_ids) < 12
    assert record.response_text == sample.text == text[: text.index(stop)]
    assert record.finish_reason is FinishReason.STOP
    assert record.stop_reason == stop


def test_a_version_set_between_generations_names_the_weights(llm: LLM, recorder: Recorder) -> None:
    with vllm_recorder.record_key("11/version/0"):
        generate(llm, PROMPTS[:1], **GREEDY)
        llm.llm_engine.set_weight_version("step-1")
        try:
            generate(llm, PROMPTS[1:2], **GREEDY)
        finally:
            llm.llm_engine.set_weight_version("default")
    records = records_of(recorder)
    assert [record.versions for record in records] == [((0, 12, "default"),), ((0, 12, "step-1"),)]


def test_the_steps_of_a_beam_search_are_counted_and_not_recorded(
    llm: LLM, recorder: Recorder
) -> None:
    """M3."""
    params = BeamSearchParams(beam_width=2, max_tokens=3, temperature=0.0)
    with vllm_recorder.record_key("20/beams/0"):
        llm.beam_search([{"prompt": PROMPTS[0]}], params)
        (output,) = generate(llm, PROMPTS[:1], **GREEDY)
    (record,) = records_of(recorder)
    assert record.response_ids.tolist() == list(output.outputs[0].token_ids)
    stats = recorder.stats().recorder
    assert (stats.started, stats.dropped) == (6, {"beam_search": 5})


@pytest.mark.parametrize("n", [1, 2])
def test_an_abort_keeps_the_tokens_so_far_where_nobody_waits_for_them(
    llm: LLM, recorder: Recorder, n: int
) -> None:
    """S9."""
    engine = llm.llm_engine
    params = SamplingParams(**{**SAMPLED, "max_tokens": 400}, n=n)
    with vllm_recorder.record_key("21/abort/0"):
        engine.add_request("mine", PROMPTS[0], params)
    outputs: list[RequestOutput] = []
    while not outputs or any(len(each.token_ids) < 5 for each in outputs[-1].outputs):
        outputs += engine.step()
    engine.abort_request(["mine"])
    while engine.has_unfinished_requests():
        engine.step()
    records = sorted(records_of(recorder), key=lambda record: record.sample_index)
    assert [record.finish_reason for record in records] == [FinishReason.ABORT] * n
    for record in records:
        assert 5 <= len(record.response_ids) < 400
        assert len(record.logprobs) == len(record.response_ids)
        assert not np.isnan(record.logprobs).any()
    assert records[-1].response_ids[:5].tolist() == list(outputs[-1].outputs[-1].token_ids)[:5]
    stats = recorder.stats().recorder
    assert (stats.started, stats.recorded, stats.dropped, stats.pending) == (n, n, {}, 0)


class BrokenStore(MemoryStore):
    """Fails at every record."""

    def add(self, record: Record) -> Any:
        raise OSError(f"no room for {record.id}")


def test_a_store_that_raises_costs_records_only(llm: LLM) -> None:
    without = generate(llm, PROMPTS, **GREEDY)
    recorder = vllm_recorder.install(llm, Recorder(BrokenStore()))
    try:
        with vllm_recorder.record_key("12/store/0"):
            outputs = generate(llm, PROMPTS, **GREEDY)
    finally:
        vllm_recorder.uninstall(llm)
    assert replies(outputs) == replies(without)
    assert records_of(recorder) == []
    stats = recorder.stats().recorder
    assert (stats.started, stats.recorded, stats.dropped) == (3, 0, {"error": 3})
    assert (stats.pending, stats.errors) == (0, 3)


@pytest.mark.parametrize(
    ("owner", "name", "started"),
    [
        (hook.Recording, "_turn", 3),
        (hook.Recording, "__init__", 3),
        (hook, "copy", 3),
        (hook, "current_identity", 0),
    ],
    ids=["at its end", "at its start", "half taken over", "before it has a key"],
)
def test_a_fault_in_the_hook_costs_records_only(
    llm: LLM,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
    started: int,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a fault of the recorder")

    with vllm_recorder.skip_recording():
        without = generate(llm, PROMPTS, **GREEDY)
    with monkeypatch.context() as patch, vllm_recorder.record_key("13/hook/0"):
        patch.setattr(owner, name, fail)
        outputs = generate(llm, PROMPTS, **GREEDY)
    assert replies(outputs) == replies(without)
    assert records_of(recorder) == []
    stats = recorder.stats().recorder
    assert stats.errors == 3
    assert (stats.started, stats.recorded, stats.pending) == (started, 0, 0)
    assert stats.dropped == ({"error": started} if started else {})
    # Once a minute at most, with the request and the reason.
    assert len([each for each in caplog.records if "request " in each.getMessage()]) == 1
    assert "a fault of the recorder" in caplog.text
    # The next generation is recorded again.
    with vllm_recorder.record_key("13/hook/1"):
        generate(llm, PROMPTS[:1], **GREEDY)
    assert len(records_of(recorder)) == 1


class Unwritable:
    """An array that takes no logprob."""

    def append(self, value: float) -> None:
        raise RuntimeError("a fault of the recorder")

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> float:
        raise IndexError(index)


def test_a_logprob_that_cannot_be_kept_costs_the_logprobs_only(
    llm: LLM, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with vllm_recorder.skip_recording():
        without = generate(llm, PROMPTS[:1], **GREEDY)
    with monkeypatch.context() as patch, vllm_recorder.record_key("18/logprobs/0"):
        patch.setattr(llm.llm_engine._recorder_columns, "fallback", "turned off for this test")
        patch.setattr(hook, "array", lambda code: Unwritable())
        outputs = generate(llm, PROMPTS[:1], **GREEDY)
    assert replies(outputs) == replies(without)
    (record,) = records_of(recorder)
    assert record.response_ids.tolist() == list(outputs[0].outputs[0].token_ids)
    assert record.logprobs is None
    assert record.flags == ("logprobs_length_mismatch",)
    assert recorder.stats().recorder.errors == 12  # one a token


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def async_llm(environment: None) -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(tiny_qwen3()), **ENGINE))
    yield engine
    engine.shutdown()


async def last_output(engine: AsyncLLM, prompt: str, request: str, **params: Any) -> RequestOutput:
    async for output in engine.generate(prompt, SamplingParams(**params), request):
        last = output
    return last


@pytest.mark.asyncio(loop_scope="module")
async def test_concurrent_tasks_keep_their_keys_apart(
    async_llm: AsyncLLM, engine_version: Version
) -> None:
    recorder = vllm_recorder.install(async_llm)

    async def episode(number: int) -> RequestOutput:
        with vllm_recorder.record_key(f"14/task/{number}"):
            prompt = f"{PROMPTS[number % 3]} {number}"
            return await last_output(async_llm, prompt, f"request-{number}", **SAMPLED)

    try:
        outputs = await asyncio.gather(*(episode(number) for number in range(16)))
    finally:
        vllm_recorder.uninstall(async_llm)
    for number, output in enumerate(outputs):
        (record,) = records_of(recorder, f"14/task/{number}")
        assert record.prompt_ids.tolist() == list(output.prompt_token_ids)
        assert record.response_ids.tolist() == list(output.outputs[0].token_ids)
        assert record.request_id.startswith(f"request-{number}")
        # Before 0.32 an AsyncLLM tells its label only to who can wait for it.
        known = ((0, 12, "default"),) if engine_version >= Version("0.32.0") else ()
        assert record.versions == known
    assert recorder.stats().recorder.recorded == 16


def parsed(*more: str) -> argparse.Namespace:
    """What vLLM's own parser makes of a framework's command line."""
    plugin.register()
    parser = make_arg_parser(FlexibleArgumentParser())
    return parser.parse_args(["--model", str(tiny_qwen3()), *more])


@pytest.mark.asyncio(loop_scope="module")
async def test_a_frameworks_own_launcher_records_where_its_arguments_say_so(
    async_llm: AsyncLLM,
) -> None:
    """E5."""
    # An engine that was made without vLLM's `from_cli_args`.
    args = parsed("--enable-recording", "--recording-admin-key", "its-own")
    tasks = await async_llm.get_supported_tasks()
    app = build_app(args, tasks, async_llm.model_config)
    await init_app_state(async_llm, app.state, args, tasks)
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            request = {"model": model, "prompt": PROMPTS[0], "max_tokens": 4}
            headers = {"Authorization": "Bearer 21/framework/0"}
            reply = await client.post("/v1/completions", json=request, headers=headers)
            assert reply.status_code == 200, reply.text
            headers = {"Authorization": "Bearer its-own"}
            held = await client.get("/records/keys", params={"prefix": "21"}, headers=headers)
        assert [each["key"] for each in held.json()] == ["21/framework/0"]
    finally:
        vllm_recorder.uninstall(async_llm)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_frameworks_own_launcher_is_refused_aloud(async_llm: AsyncLLM) -> None:
    """E5."""
    tasks = await async_llm.get_supported_tasks()
    several = parsed("--enable-recording", "--api-server-count", "2")
    with pytest.raises(SystemExit, match="use `vllm serve`, or --api-server-count 1"):
        build_app(several, tasks, async_llm.model_config)
    experts = parsed("--enable-recording", "--recording-routed-experts")
    app = build_app(experts, tasks, async_llm.model_config)
    with pytest.raises(SystemExit, match="the engine was made without it"):
        await init_app_state(async_llm, app.state, experts, tasks)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_frameworks_own_launcher_without_the_flag_is_left_alone(
    async_llm: AsyncLLM,
) -> None:
    tasks = await async_llm.get_supported_tasks()
    args = parsed()
    app = build_app(args, tasks, async_llm.model_config)
    await init_app_state(async_llm, app.state, args, tasks)
    assert not any(getattr(route, "path", "").startswith("/records") for route in app.routes)
    assert "add_request" not in vars(async_llm.output_processor)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_label_set_in_the_middle_of_a_generation_splits_it(
    async_llm: AsyncLLM, engine_version: Version
) -> None:
    recorder = vllm_recorder.install(async_llm)
    try:
        with vllm_recorder.record_key("17/version/0"):
            params = SamplingParams(**{**GREEDY, "max_tokens": 300})
            before = 0
            async for output in async_llm.generate(PROMPTS[0], params, "labelled"):
                arrived = len(output.outputs[0].token_ids)
                if arrived >= 10 and not before:
                    before = arrived
                    await async_llm.update_weight_version("step-1")
            await last_output(async_llm, PROMPTS[1], "after", **GREEDY)
    finally:
        vllm_recorder.uninstall(async_llm)
        await async_llm.update_weight_version("default")
    across, after = records_of(recorder)
    assert after.versions == ((0, 12, "step-1"),)
    assert after.flags == ()
    *earlier, (start, end, version) = across.versions
    assert (end, version) == (300, "step-1")
    assert before <= start < 300
    if engine_version >= Version("0.32.0"):
        assert earlier == [(0, start, "default")]
        assert across.flags == ()
    else:
        assert earlier == []  # unknown, and not guessed
        assert across.flags == ("version_boundary_approximate",)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_abort_keeps_the_tokens_so_far(async_llm: AsyncLLM) -> None:
    long = {**GREEDY, "max_tokens": 400}
    whole = (await last_output(async_llm, PROMPTS[0], "whole", **long)).outputs[0].token_ids
    recorder = vllm_recorder.install(async_llm)
    try:
        with vllm_recorder.record_key("15/abort/0"):
            stream = async_llm.generate(PROMPTS[0], SamplingParams(**long), "aborted")
            async for output in stream:
                if len(output.outputs[0].token_ids) >= 5:
                    delivered = list(output.outputs[0].token_ids)
                    break
            await stream.aclose()
        (record,) = records_of(recorder)
    finally:
        vllm_recorder.uninstall(async_llm)
    assert record.finish_reason is FinishReason.ABORT
    count = len(record.response_ids)
    assert len(delivered) <= count < 400
    assert record.response_ids.tolist() == list(whole[:count])
    assert len(record.logprobs) == count
    assert not np.isnan(record.logprobs).any()
    stats = recorder.stats().recorder
    assert (stats.started, stats.recorded, stats.pending) == (1, 1, 0)


@pytest.mark.asyncio(loop_scope="module")
async def test_aborted_generations_are_dropped_where_asked(async_llm: AsyncLLM) -> None:
    recorder = vllm_recorder.install(async_llm, Recorder(aborted="drop"))
    try:
        with vllm_recorder.record_key("16/drop/0"):
            params = SamplingParams(**{**GREEDY, "max_tokens": 400})
            stream = async_llm.generate(PROMPTS[0], params, "dropped")
            async for _ in stream:
                break
            await stream.aclose()
            kept = await last_output(async_llm, PROMPTS[0], "kept", **GREEDY)
    finally:
        vllm_recorder.uninstall(async_llm)
    (record,) = records_of(recorder)
    assert record.response_ids.tolist() == list(kept.outputs[0].token_ids)
    stats = recorder.stats().recorder
    assert (stats.started, stats.recorded, stats.dropped) == (2, 1, {"aborted": 1})


@pytest.mark.asyncio(loop_scope="module")
async def test_a_session_of_streamed_input_is_counted_once_and_not_recorded(
    async_llm: AsyncLLM,
) -> None:
    """S8."""
    recorder = vllm_recorder.install(async_llm)
    params = SamplingParams(**GREEDY, output_kind=RequestOutputKind.DELTA)

    async def chunks() -> AsyncIterator[StreamingInput]:
        for prompt in PROMPTS:
            yield StreamingInput(prompt)
            await asyncio.sleep(0.2)  # for the one before to be answered

    try:
        with vllm_recorder.record_key("18/session/0"):
            tokens = [
                token
                async for output in async_llm.generate(chunks(), params, "session")
                for token in output.outputs[0].token_ids
            ]
    finally:
        vllm_recorder.uninstall(async_llm)
    assert len(tokens) >= 12
    assert records_of(recorder) == []
    stats = recorder.stats().recorder
    assert (stats.started, stats.dropped, stats.pending) == (1, {"streaming_input": 1}, 0)
    assert stats.errors == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_generations_that_a_fault_of_the_engine_ends_keep_their_tokens(
    async_llm: AsyncLLM,
) -> None:
    """S9."""
    recorder = vllm_recorder.install(async_llm)
    try:
        with vllm_recorder.record_key("19/fault/0"):
            params = SamplingParams(**{**GREEDY, "max_tokens": 400})
            stream = async_llm.generate(PROMPTS[0], params, "faulty")
            arrived: list[int] = []
            while len(arrived) < 5:
                arrived = list((await anext(stream)).outputs[0].token_ids)
            async_llm.output_processor.propagate_error(OSError("out of paper"))
            with pytest.raises(EngineGenerateError):
                await anext(stream)
        (record,) = records_of(recorder)
    finally:
        vllm_recorder.uninstall(async_llm)
    assert record.finish_reason is FinishReason.ERROR
    assert record.response_ids[: len(arrived)].tolist() == arrived
    assert len(record.logprobs) == len(record.response_ids) < 400
    stats = recorder.stats().recorder
    assert (stats.started, stats.recorded, stats.pending, stats.errors) == (1, 1, 0, 0)
