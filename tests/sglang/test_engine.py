"""`sgl.Engine` in this process, with a scheduler that takes requests back now and then."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import sglang
from fastapi import FastAPI, Request
from sglang.srt.managers.io_struct import GenerateReqInput

import sglang_recorder
from recorder_core import FinishReason, Record, Recorder
from recorder_core.errors import UnsupportedEngineError
from recorder_core.options import RecordingOptions
from recorder_core.server import IdentityMiddleware
from sglang_recorder import generation, hook, hook_points, sampling, server
from sglang_recorder.checking import Check
from tests.models import tiny_qwen3
from tests.sglang.apis import assert_recorded, by_sample, only
from tests.sglang.conftest import PACED

pytestmark = pytest.mark.server

FIELDS = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0.0}
PROMPTS = ["Hello", "The sea is", "Once"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    others = set(psutil.Process().children())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (PACED | {"SGLANG_TEST_RETRACT": "1"}).items():
            patch.setenv(name, value)
        made = sglang.Engine(
            model_path=str(tiny_qwen3()),
            device="cpu",
            attention_backend="torch_native",
            disable_cuda_graph=True,
            mem_fraction_static=0.3,
            max_total_tokens=20000,
            context_length=2048,
            sleep_on_idle=True,
            dtype="float32",
            log_level="error",
        )
    its_own = set(psutil.Process().children()) - others
    yield made
    # Its shutdown() would end every child of this process, the other tests' servers too; and its
    # watchdog would end this process when its children end.
    made.tokenizer_manager._subprocess_watchdog.stop()
    for child in its_own:
        child.kill()


@pytest.fixture
def recorder(engine: Any) -> Iterator[Recorder]:
    """The recorder of the engine, which records during the test."""
    yield sglang_recorder.install(engine)
    sglang_recorder.uninstall(engine)


def records_of(recorder: Recorder, prefix: str) -> list[Record]:
    assert recorder.flush(10)
    return recorder.get(prefix)


def test_generations_in_a_block_are_recorded_under_its_key(engine: Any, recorder: Recorder) -> None:
    assert sglang_recorder.install(engine).recorder is recorder.recorder
    with sglang_recorder.record_key("1/block/0"):
        outputs = engine.generate(PROMPTS, FIELDS, return_logprob=True)
        with sglang_recorder.skip_recording():
            engine.generate(PROMPTS, FIELDS)
    engine.generate(PROMPTS, FIELDS)
    records = by_sample(records_of(recorder, "1"))
    assert [record.prompt_text for record in records] == PROMPTS
    for record, output in zip(records, outputs, strict=True):
        assert_recorded(record, output)


def test_streams_and_concurrent_tasks_keep_their_keys(engine: Any, recorder: Recorder) -> None:
    with sglang_recorder.record_key("2/stream/0"):
        *_, last = engine.generate(PROMPTS[0], FIELDS, stream=True)
    assert only(records_of(recorder, "2/stream")).response_text == last["text"]

    async def episode(number: int) -> dict[str, Any]:
        with sglang_recorder.record_key(f"2/task/{number}"):
            return await engine.async_generate(PROMPTS[number % 3], FIELDS)

    async def episodes() -> list[dict[str, Any]]:
        return await asyncio.gather(*(episode(number) for number in range(9)))

    outputs = engine.loop.run_until_complete(episodes())
    for number, output in enumerate(outputs):
        record = only(records_of(recorder, f"2/task/{number}"))
        assert record.response_ids.tolist() == output["output_ids"]


def test_a_retracted_generation_is_recorded_once_and_whole(engine: Any, recorder: Recorder) -> None:
    fields = {**FIELDS, "max_new_tokens": 30, "temperature": 1.0}
    with sglang_recorder.record_key("3/retracted/0"):
        outputs = engine.generate(PROMPTS * 2, fields, return_logprob=True)
    about = [output["meta_info"] for output in outputs]
    # Two names, in older releases and newer ones.
    assert any(each.get("num_retractions") or each.get("total_retractions") for each in about)
    for record, output in zip(by_sample(records_of(recorder, "3")), outputs, strict=True):
        assert_recorded(record, output)
        assert len(record.response_ids) == 30


def test_after_uninstall_nothing_is_recorded(engine: Any, recorder: Recorder) -> None:
    sglang_recorder.uninstall(engine)
    before = recorder.stats().recorder
    with sglang_recorder.record_key("4/off/0"):
        [output] = engine.generate(PROMPTS[:1], FIELDS)
    assert len(output["output_ids"]) == 8
    assert recorder.stats().recorder == before


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (generation.Generation, "extend"),
        (generation.Generation, "turn"),
        (hook.Hook, "_start"),
        (hook, "_refusal"),
        (sampling.Sampler, "draws"),
    ],
)
def test_a_fault_in_the_hook_costs_records_and_no_reply(
    engine: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a fault of the recorder")

    expected = [output["output_ids"] for output in engine.generate(PROMPTS, FIELDS)]
    before = recorder.stats().recorder
    with monkeypatch.context() as patch, sglang_recorder.record_key("5/fault/0"):
        patch.setattr(owner, name, fail)
        outputs = engine.generate(PROMPTS, FIELDS)
    assert [output["output_ids"] for output in outputs] == expected
    assert records_of(recorder, "5") == []
    after = recorder.stats().recorder
    assert after.errors == before.errors + 3
    assert after.pending == 0
    assert after.started - before.started == sum(after.dropped.values()) - sum(
        before.dropped.values()
    )
    with sglang_recorder.record_key("6/after/0"):
        engine.generate(PROMPTS[0], FIELDS)
    assert len(records_of(recorder, "6")) >= 1


def test_logprobs_of_other_tokens_are_flagged_and_not_kept(
    engine: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = generation.Generation.extend_logprobs

    def extend_by_another(self: Any, values: Any, ids: Any) -> None:
        extend(self, values, ids)
        self.logprob_ids[-1] += 1

    before = recorder.stats().recorder.flagged.get("logprobs_length_mismatch", 0)
    with monkeypatch.context() as patch, sglang_recorder.record_key("8/other/0"):
        patch.setattr(generation.Generation, "extend_logprobs", extend_by_another)
        output = engine.generate(PROMPTS[0], FIELDS)
    record = only(records_of(recorder, "8"))
    assert record.response_ids.tolist() == output["output_ids"]
    assert record.logprobs is None
    assert record.flags == ("logprobs_length_mismatch",)
    assert recorder.stats().recorder.flagged["logprobs_length_mismatch"] == before + 1


def test_an_abort_of_a_running_generation_keeps_its_tokens(engine: Any, recorder: Recorder) -> None:
    async def aborted() -> list[int]:
        with sglang_recorder.record_key("7/abort/0"):
            stream = await engine.async_generate(
                PROMPTS[0], {**FIELDS, "max_new_tokens": 1500}, stream=True
            )
            seen: list[int] = []
            async for output in stream:
                engine.tokenizer_manager.abort_request(output["meta_info"]["id"])
                # The last chunk of an abort may hold its last token alone.
                seen = max(seen, output["output_ids"], key=len)
        return seen

    seen = engine.loop.run_until_complete(aborted())
    record = only(records_of(recorder, "7"))
    assert record.finish_reason is FinishReason.ABORT
    assert 1 <= len(record.response_ids) < 1500
    assert record.response_ids.tolist()[: len(seen)] == seen[: len(record.response_ids)]


def test_routed_experts_of_a_dense_model_are_refused(engine: Any) -> None:
    options = RecordingOptions(enabled=True, routed_experts=True)
    manager = engine.tokenizer_manager
    with pytest.raises(UnsupportedEngineError, match="no experts; leave the flag out"):
        server.check_model(options, manager.model_config, manager.server_args)


@pytest.mark.parametrize("secret", [None, "a secret of at least 32 characters"])
def test_a_generation_that_yields_no_record_fails_the_check_at_start(
    engine: Any, recorder: Recorder, secret: str | None
) -> None:
    app, installed = FastAPI(), hook_points.install(engine)

    @app.post("/generate")
    async def generate(request: Request) -> Any:
        # As SGLang's own, with nothing before it that reads keys.
        asked = GenerateReqInput(**await request.json())
        return await anext(engine.tokenizer_manager.generate_request(asked, request))

    run, arguments = engine.loop.run_until_complete, engine.server_args
    before = recorder.stats().recorder.started
    with pytest.raises(UnsupportedEngineError, match=r"answered with the tokens \[.+\].* \[\]"):
        run(Check(installed, app, secret).run(arguments))
    run(Check(installed, IdentityMiddleware(app, secret=secret), secret).run(arguments))
    assert installed.probe is None
    assert recorder.stats().recorder.started == before


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"give install\(\) an sgl\.Engine"):
        sglang_recorder.install(os)
