"""Logprobs that nobody asked for come in one column per step, or as vLLM sends them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import vllm
from packaging.version import Version
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

import vllm_recorder
from examples.vllm_server import ENVIRONMENT
from recorder_core import FinishReason, Record, Recorder
from recorder_core.records import BIASED
from tests.models import round_trip_ids, tiny_qwen3
from tests.records import whole_prompts
from vllm_recorder import column

ENGINE = {"dtype": "float32", "enforce_eager": True}
# On a CPU vLLM 0.30 cannot verify what was speculated: that takes Triton.
SPECULATES = Version(vllm.__version__).release[:2] != (0, 30)
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SPECULATION = {**NGRAM, "num_speculative_tokens": 4} if SPECULATES else None
# In few words, so that n-grams are found again and several tokens are accepted in a step.
PROMPTS = ["0101010101010101", "0123401234012340", "9999999999999999"]


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv(column.SWITCH, raising=False)
        yield


@pytest.fixture(scope="module")
def llm(environment: None) -> Iterator[LLM]:
    """An engine whose core runs in this process, step by step: each run is like every other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        engine = LLM(
            str(tiny_qwen3()),
            **ENGINE,
            seed=0,
            enable_prefix_caching=False,
            max_model_len=512,
            num_gpu_blocks_override=6,  # of 128 tokens: four requests fill more
            disable_log_stats=False,  # which counts preemptions
            speculative_config=SPECULATION,
        )
    yield engine
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()


@pytest.fixture(scope="module")
def digits() -> dict[str, Any]:
    """Parameters under which every token is a digit."""
    return {"temperature": 1.0, "seed": 3, "allowed_token_ids": round_trip_ids(tiny_qwen3())}


@pytest.fixture
def recorder(llm: LLM) -> Iterator[Recorder]:
    """A new recorder on the engine, for one test."""
    yield vllm_recorder.install(llm)
    vllm_recorder.uninstall(llm)


@pytest.fixture
def columns(llm: LLM, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> column.Columns:
    """The engine's, in use again after the test."""
    found: column.Columns = llm.llm_engine._recorder_columns
    assert found.fallback == ""
    monkeypatch.setattr(found, "fallback", "")
    return found


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of each column that arrives, the number of each token's request."""
    seen: list[list[int]] = []
    put_aside = column.Columns.put_aside

    def spy(self: column.Columns, arrived: bytes) -> None:
        seen.append(np.frombuffer(arrived, np.int32).reshape(3, -1)[0].tolist())
        put_aside(self, arrived)

    monkeypatch.setattr(column.Columns, "put_aside", spy)
    return seen


def generate(llm: LLM, key: str | None, *, prompts: list[Any] = PROMPTS, **params: Any) -> Any:
    """Generate, recorded under a key or not at all."""
    recording = vllm_recorder.record_key(key) if key else vllm_recorder.skip_recording()
    with recording:
        return llm.generate(prompts, SamplingParams(**params), use_tqdm=False)


def records_of(recorder: Recorder, prefix: str = "") -> dict[tuple[Any, ...], Record]:
    """The records by what makes them one of a kind here."""
    assert recorder.flush(10)
    records = recorder.get(prefix)
    prompts = whole_prompts(records)
    found = {(*prompts[record.id], record.sample_index): record for record in records}
    assert len(found) == len(records)
    return found


def shown(outputs: list[RequestOutput]) -> dict[tuple[Any, ...], Any]:
    """The ids and logprobs that a client sees which asked for them."""
    found = {}
    for output in outputs:
        for sample in output.outputs:
            pairs = zip(sample.logprobs, sample.token_ids, strict=True)
            logprobs = np.array([at[token].logprob for at, token in pairs], np.float32)
            key = (*output.prompt_token_ids, sample.index)
            found[key] = (list(sample.token_ids), logprobs)
    return found


def assert_exact(records: dict[tuple[Any, ...], Record], outputs: list[RequestOutput]) -> None:
    """Records are, bit by bit, what their twins' client was shown."""
    expected = shown(outputs)
    assert records.keys() == expected.keys()
    for key, record in records.items():
        ids, logprobs = expected[key]
        assert record.response_ids.tolist() == ids
        assert record.logprobs.tobytes() == logprobs.tobytes()
        assert record.flags == ()


def assert_scored(
    llm: LLM, records: dict[tuple[Any, ...], Record], outputs: list[RequestOutput]
) -> None:
    """Records hold their outputs' ids, and the logprobs that the model gives to just these.

    Sampling among speculated tokens is not the same twice: there are no twins to ask.
    """
    samples = {
        (*output.prompt_token_ids, sample.index): list(sample.token_ids)
        for output in outputs
        for sample in output.outputs
    }
    assert {key: record.response_ids.tolist() for key, record in records.items()} == samples
    assert_logprobs(llm, records)


def assert_logprobs(llm: LLM, records: dict[tuple[Any, ...], Record]) -> None:
    """Records hold the logprobs that the model gives to just their ids."""
    whole = [
        {"prompt_token_ids": [*prompt, *record.response_ids.tolist()]}
        for (*prompt, _), record in records.items()
    ]
    scoring = {"max_tokens": 1, "prompt_logprobs": 0}
    for ((*prompt, _), record), scored in zip(
        records.items(), generate(llm, None, prompts=whole, **scoring), strict=True
    ):
        start = len(prompt)
        pairs = zip(scored.prompt_logprobs[start:], record.response_ids.tolist(), strict=True)
        expected = [at[token].logprob for at, token in pairs]
        np.testing.assert_allclose(record.logprobs, expected, atol=1e-3)
        assert record.flags == (BIASED,)


def replies(outputs: list[RequestOutput]) -> list[Any]:
    """What a user gets, without request ids and times."""
    return [(each.prompt_token_ids, each.outputs, each.finished) for each in outputs]


def preemptions(llm: LLM) -> int:
    return sum(each.value for each in llm.get_metrics() if each.name == "vllm:num_preemptions")


def test_a_step_sends_one_column_with_several_tokens_of_each_request(
    llm: LLM, columns: column.Columns, recorder: Recorder, numbers: list[list[int]]
) -> None:
    params = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    outputs = generate(llm, "0/columns/0", **params)

    assert sum(map(len, numbers)) == 3 * 60
    accepted = any(len(set(each)) < len(each) for each in numbers)
    assert accepted == SPECULATES
    assert len(numbers) < (60 if SPECULATES else 64)  # steps: at most one a token
    assert recorder.stats().recorder.engine == {"logprobs": "a column per step"}
    assert_exact(records_of(recorder), generate(llm, None, **params, logprobs=1))
    assert outputs[0].outputs[0].logprobs is None


@pytest.mark.parametrize("included", [False, True])
def test_what_a_stop_string_cuts_off_among_several_samples(
    llm: LLM, recorder: Recorder, digits: dict[str, Any], included: bool
) -> None:
    params = {**digits, "max_tokens": 100, "n": 3, "include_stop_str_in_output": included}
    params["stop"] = ["01", "72", "345"]  # of several tokens each
    outputs = generate(llm, "1/stop/0", **params)

    records = records_of(recorder)
    assert len(records) == 9
    assert {record.stop_reason for record in records.values()} & set(params["stop"])
    assert_scored(llm, records, outputs)
    texts = [sample.text for output in outputs for sample in output.outputs]
    assert sorted(texts) == sorted(record.response_text for record in records.values())


def test_preempted_requests_keep_their_logprobs(
    llm: LLM, recorder: Recorder, digits: dict[str, Any], numbers: list[list[int]]
) -> None:
    prompts = [f"{number:04}" * 20 for number in range(4)]
    params = {**digits, "max_tokens": 150, "prompts": prompts}
    before = preemptions(llm)
    outputs = generate(llm, "2/preempted/0", **params)

    assert preemptions(llm) > before
    assert sum(map(len, numbers)) == 4 * 150
    assert_scored(llm, records_of(recorder), outputs)


def test_a_client_that_asks_is_served_beside_those_that_do_not(
    llm: LLM, columns: column.Columns, recorder: Recorder, numbers: list[list[int]]
) -> None:
    params = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    without = generate(llm, None, **params, logprobs=2)

    def asking(prompt: int, logprobs: int | None) -> SamplingParams:
        key = {"record_key": f"3/mixed/{prompt}"} if prompt else None
        return SamplingParams(**params, logprobs=logprobs, extra_args=key)

    # Not recorded and asking; recorded and asking; recorded and not.
    each = [asking(0, 2), asking(1, 2), asking(2, None)]
    outputs = llm.generate(PROMPTS, each, use_tqdm=False)

    assert replies(outputs[:2]) == replies(without[:2])
    assert outputs[2].outputs[0].logprobs is None
    assert sum(map(len, numbers)) == 20
    assert_exact(records_of(recorder), without[1:])
    assert columns.fallback == ""


@pytest.mark.parametrize("key", [None, "4/forged/0"], ids=["unrecorded", "recorded"])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_client_cannot_set_the_mark(
    llm: LLM, recorder: Recorder, key: str | None, logprobs: int | None
) -> None:
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": logprobs}
    without = generate(llm, None, **params)
    for value in ("column", ["column"], 1, {"column": True}):
        forged = generate(llm, key, **params, extra_args={"vllm_recorder": value})
        assert replies(forged) == replies(without)


def fail(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("a fault of the recorder")


@pytest.mark.parametrize(
    ("owner", "name", "errors"),
    [
        (column.Step, "append_column", 0),
        (column.Columns, "put_aside", 1),
        (column.Columns, "_gather", 1),
    ],
    ids=["in the engine core", "in the API server", "on the recorder's thread"],
)
def test_a_fault_at_either_end_costs_logprobs_only(
    llm: LLM,
    columns: column.Columns,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    errors: int,
) -> None:
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    without = generate(llm, None, **params)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        outputs = generate(llm, "5/fault/0", **params)
        assert recorder.flush(10)

    assert replies(outputs) == replies(without)
    for record in records_of(recorder).values():
        assert record.logprobs is None
        assert record.flags == ("logprobs_length_mismatch",)
    stats = recorder.stats().recorder
    assert (stats.started, stats.recorded) == (3, 3)
    assert bool(stats.errors) == bool(errors)
    # The next generation has them again.
    generate(llm, "5/fault/1", **params)
    assert_exact(records_of(recorder, "5/fault/1"), generate(llm, None, **params, logprobs=1))


def test_one_lost_step_is_not_made_up_for_by_what_a_stop_string_cuts_off(
    llm: LLM,
    columns: column.Columns,
    recorder: Recorder,
    digits: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_aside, steps = column.Columns.put_aside, 0

    def forgetful(self: column.Columns, arrived: bytes) -> None:
        nonlocal steps
        steps += 1
        if steps != 2:
            put_aside(self, arrived)

    monkeypatch.setattr(column.Columns, "put_aside", forgetful)
    generate(llm, "6/lost/0", **digits, n=3, max_tokens=200, stop=["01", "72", "345"])
    records = records_of(recorder)
    # Not all run in that step: there is memory for six.
    lost = {key: record for key, record in records.items() if record.logprobs is None}
    assert len(lost) >= 3
    assert {record.flags for record in lost.values()} == {(BIASED, "logprobs_length_mismatch")}
    if kept := {key: records[key] for key in records.keys() - lost.keys()}:
        assert_logprobs(llm, kept)


def test_what_is_put_aside_is_bounded_and_given_out_exactly(
    llm: LLM,
    columns: column.Columns,
    recorder: Recorder,
    digits: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of generations that take longer than there is room, others of which end in between."""
    monkeypatch.setattr(column, "ASIDE_BYTES", 300)
    columns._give_out()  # what other tests left
    give_out, most = column.Columns._give_out, 0

    def spy(self: column.Columns) -> None:
        nonlocal most
        most = max(most, self._aside_bytes)
        give_out(self)

    monkeypatch.setattr(column.Columns, "_give_out", spy)
    prompts = [f"{number:04}" * 5 for number in range(6)]
    limits = [30, 60, 90, 120, 150, 180]
    each = [SamplingParams(**digits, max_tokens=limit) for limit in limits]
    with vllm_recorder.record_key("6/aside/0"):
        outputs = llm.generate(prompts, each, use_tqdm=False)

    assert 300 < most < 1000
    assert_scored(llm, records_of(recorder), outputs)


def test_steps_that_came_as_vllm_sends_them_are_put_in_between(
    llm: LLM,
    columns: column.Columns,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    of, steps = column.Step.of, 0

    def now_and_then(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps % 3 == 0:
            fail()
        return of(*args)

    monkeypatch.setattr(column.Step, "of", now_and_then)
    generate(llm, "6/between/0", **params)
    assert steps > 6
    assert_exact(records_of(recorder), generate(llm, None, **params, logprobs=1))


def test_a_core_that_sends_no_columns_is_noticed_and_costs_nothing(
    llm: LLM,
    columns: column.Columns,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    monkeypatch.setattr(column.Step, "of", fail)
    for run in range(2):
        generate(llm, f"7/none/{run}", **params)

    assert columns.fallback == "the engine core sends none"
    how = recorder.stats().recorder.engine["logprobs"]
    assert how == "an object per token: the engine core sends none"
    said = [each for each in caplog.records if "one object per token" in each.getMessage()]
    assert len(said) == 1
    twins = generate(llm, None, **params, logprobs=1)
    for run in range(2):
        assert_exact(records_of(recorder, f"7/none/{run}"), twins)


class OwnScheduler(Scheduler):
    """Of another's making: it looks up the request of every output."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for each in outputs.values():
            for output in each.outputs:
                assert output.request_id in self.requests or output.finished
        return outputs


def test_another_scheduler_than_vllms_is_left_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = vars(OwnScheduler)["update_from_output"]
    column.instrument(OwnScheduler)
    assert vars(OwnScheduler)["update_from_output"] is own

    engine = llm.llm_engine
    monkeypatch.setattr(engine.vllm_config.scheduler_config, "scheduler_cls", OwnScheduler)
    found = column.Columns(engine, Recorder())
    assert found.fallback == "the scheduler is a OwnScheduler, not vLLM's"
    assert not found.mark(SamplingParams())
    assert found.fallback in caplog.text


def test_columns_can_be_switched_off(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(column.SWITCH, "0")
    get_output = llm.llm_engine.engine_core.get_output
    found = column.Columns(llm.llm_engine, Recorder())
    assert found.fallback == "RECORDER_VLLM_COLUMN is 0"
    assert not found.mark(SamplingParams())
    assert llm.llm_engine.engine_core.get_output == get_output


def test_requests_in_flight_when_the_hook_goes_keep_their_logprobs(llm: LLM) -> None:
    engine, params = llm.llm_engine, {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    recorder = vllm_recorder.install(llm)
    with vllm_recorder.record_key("8/flight/0"):
        engine.add_request("flight", PROMPTS[0], SamplingParams(**params))
    engine.step()
    vllm_recorder.uninstall(llm)
    while engine.has_unfinished_requests():
        engine.step()
    assert_exact(
        records_of(recorder), generate(llm, None, **params, prompts=PROMPTS[:1], logprobs=1)
    )


async def test_a_core_that_is_killed_in_the_middle_of_a_step_ends_only_what_it_ran(
    environment: None, numbers: list[list[int]]
) -> None:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(str(tiny_qwen3()), **ENGINE, max_model_len=1024)
    )
    recorder = vllm_recorder.install(engine)

    async def run(key: str, count: int) -> RequestOutput:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        with vllm_recorder.record_key(key):
            async for output in engine.generate(PROMPTS[0], params, key):
                last = output
        return last

    try:
        # Before the first, vLLM's loop was waiting already when the hook was put there.
        first, second = await run("9/killed/0", 12), await run("9/killed/1", 12)
        assert len(numbers) >= 12
        assert all(each == numbers[-1] for each in numbers[-12:])
        running = [asyncio.create_task(run(f"9/killed/{2 + n}", 900)) for n in range(4)]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in running)
        for process in engine.engine_core.resources.engine_manager.processes:
            process.kill()
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, EngineDeadError)
    finally:
        engine.shutdown()
    records = [
        record for record in recorder.get("9") if record.finish_reason is FinishReason.LENGTH
    ]
    for record, output in zip(records, (first, second), strict=True):
        assert record.response_ids.tolist() == list(output.outputs[0].token_ids)
        assert len(record.logprobs) == 12
        assert record.flags == ()
    stats = recorder.stats().recorder
    assert stats.started == 6
    assert stats.recorded + sum(stats.dropped.values()) + stats.pending == 6
