"""Tinker: what recording costs a call of `sample`, and end to end on a local server, on and off."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from concurrent.futures import Future
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import numpy as np
import tinker
from tinker import types

from benchmarks.harness import Row, cpu_microseconds, main, no_gc, progress, row
from recorder_core import KeyPrefix, Recorder, RecordKey
from recorder_core.context import Identity, record_key
from recorder_core.records import Turn
from tests.models import tiny_qwen3_float32
from tests.tinker.servers import SkyRLServer
from tinker_recorder import TinkerRecorder
from tinker_recorder.futures import plain
from tinker_recorder.hook import Hook
from tinker_recorder.turns import Call, Weights, read_prompt

# Prompt and completion tokens of a call, the calls that are timed, and the target in µs.
SIZES = [(512, 256, 2000, 80.0), (4096, 1024, 500, None), (32768, 8192, 100, 2000.0)]
CALLS, CONCURRENT = 256, 64
WEIGHTS = Weights("tinker://model_x/sampler_weights/ss0_seq1")
PARAMS = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[])
_random = np.random.default_rng(0)


def prompt(tokens: int) -> types.ModelInput:
    return types.ModelInput.from_ints(_random.integers(0, 150_000, tokens).tolist())


def response(tokens: int) -> types.SampleResponse:
    """What the SDK makes of the server's reply."""
    fields: dict[str, Any] = {
        "stop_reason": "stop",
        "tokens_np": _random.integers(0, 150_000, tokens).astype(np.int32),
        "logprobs_np": -_random.random(tokens).astype(np.float32),
    }
    if "sequence_id" in {each.name for each in dataclasses.fields(types.SampledSequence)}:
        fields["sequence_id"] = "sequence-7"
    return types.SampleResponse(sequences=[types.SampledSequence(**fields)])


def path_times(prompt_tokens: int, tokens: int, count: int) -> tuple[list[float], list[float]]:
    """Microseconds of CPU of all that recording does for one call, on one thread.

    Returns:
        What is done up to the turn that the recorder is given, and what the recorder does with it.
    """
    recorder = Recorder()

    def read(identity: Identity, asked: types.ModelInput, answered: types.SampleResponse) -> None:
        call = Call(recorder, identity, 1, PARAMS, raises=False)
        call.prompt = read_prompt(asked)
        turns.extend(call._turns(answered, WEIGHTS, ()))

    turns: list[Turn] = []
    reading, storing = [], []
    # A key is parsed once for a run, by whoever starts the run.
    runs = [Identity(RecordKey("0", "t", number)) for number in range(count)]
    calls = [(each, prompt(prompt_tokens), response(tokens)) for each in runs]
    with no_gc():
        for each in calls:
            reading.append(cpu_microseconds(read, *each))
            storing.append(cpu_microseconds(recorder._record, turns.pop()))
    recorder.close()
    return reading, storing


class Client:
    """Stands for a sampling client: all that the hook wants of it is that its weights are known."""


def latencies(prompt_tokens: int, tokens: int, count: int) -> list[float]:
    """Microseconds from the SDK's response to the completion of the caller's future."""
    recorder = Recorder()
    hook = Hook(recorder, strict=False, raises=False)
    hook._active = True
    client = Client()
    hook._samplers._known[client] = WEIGHTS
    times = []
    with no_gc():
        for number in range(count):
            inner: Future[Any] = Future()
            answered = response(tokens)
            with record_key(RecordKey("0", "t", number)):
                outer = hook._sample(lambda *_: inner, client, prompt(prompt_tokens), 1, PARAMS)  # noqa: B023
            began = time.perf_counter_ns()
            inner.set_result(answered)
            outer.result()
            times.append((time.perf_counter_ns() - began) / 1000)
    recorder.close()
    return times


async def round_of_calls(client: Any) -> float:
    """Milliseconds per call of many at once."""
    gate = asyncio.Semaphore(CONCURRENT)
    asked = [prompt(16).chunks[0].tokens for _ in range(CALLS)]

    async def one(number: int) -> None:
        ids = [token % 500 for token in asked[number]]
        async with gate:
            with record_key(RecordKey("0", "e2e", number)):
                future = client.sample(types.ModelInput.from_ints(ids), 1, PARAMS)
                await asyncio.wrap_future(plain(future))

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(CALLS)))
    return (time.perf_counter() - began) * 1000 / CALLS


def end_to_end(rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds per call, off and on, taken in turn on one server."""
    model = tiny_qwen3_float32()
    off, on = [], []
    with SkyRLServer(model, sequence_ids=not tinker.__version__.startswith("0.25.")) as server:
        service = tinker.ServiceClient(base_url=server.base_url, api_key="tml-local")
        made = service.create_sampling_client(base_model=str(model))
        client = made.result() if isinstance(made, tinker.APIFuture) else made
        asyncio.run(round_of_calls(client))  # compiles
        recorder = TinkerRecorder()
        for _ in range(rounds):
            recorder.uninstrument()
            off.append(asyncio.run(round_of_calls(client)))
            recorder.instrument()
            on.append(asyncio.run(round_of_calls(client)))
            assert recorder.store.remove(KeyPrefix()) == CALLS
        recorder.close()
    return off, on


def measure(quick: bool) -> list[Row]:
    rows = []
    for prompt_tokens, tokens, count, target in SIZES:
        reading, storing = path_times(prompt_tokens, tokens, 20 if quick else count)
        name = f"record path, {prompt_tokens}/{tokens} tokens"
        both = [sum(each) for each in zip(reading, storing, strict=True)]
        rows.append(row(name, "µs CPU", both, target))
        rows.append(row(f"{name}, of which the recorder", "µs CPU", storing))
    for prompt_tokens, tokens, count, _ in SIZES:
        times = latencies(prompt_tokens, tokens, 20 if quick else count)
        rows.append(row(f"response to future, {prompt_tokens}/{tokens} tokens", "µs", times))
    progress("Starting a server …")
    off, on = end_to_end(1 if quick else 10)
    rows.append(row(f"a sample, {CONCURRENT} at once, recording off", "ms", off))
    rows.append(row(f"a sample, {CONCURRENT} at once, recording on", "ms", on))
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
