"""Time that recording takes on the engine's event loop, per finished request.

vLLM's own output processor runs here without an engine, with and without the hook, on the same
outputs as an engine core would send. 64 requests run side by side, each step brings one token to
each. The target is for what happens once per request (reading the key, taking the request over,
handing the finished generation over); keeping a logprob happens per token and is shown beside it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from transformers import AutoTokenizer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from benchmarks.harness import Row, cpu_microseconds, main, microseconds, no_gc, progress, row
from recorder_core import KeyPrefix, Recorder, record_key
from recorder_core.server import IdentityMiddleware
from tests.models import VOCABULARY, tiny_qwen3
from vllm_recorder.column import Step, column_of, mark_of, output_of
from vllm_recorder.hook import Hook, Recording

TARGET_MICROSECONDS = 20.0
PROMPT = 512
CONCURRENT = 64
KEY = "bench/task/0"

# What the OpenAI SDK sends.
HEADERS = [
    (b"host", b"127.0.0.1:8000"),
    (b"accept-encoding", b"gzip, deflate"),
    (b"connection", b"keep-alive"),
    (b"accept", b"application/json"),
    (b"content-type", b"application/json"),
    (b"user-agent", b"AsyncOpenAI/Python 2.25.0"),
    *[(b"x-stainless-%d" % number, b"value") for number in range(7)],
    (b"x-stainless-retry-count", b"0"),
    (b"authorization", b"Bearer " + KEY.encode()),
    (b"content-length", b"2000"),
]


def messages(tokens: int) -> tuple[list[Any], list[Any]]:
    """What an engine core sends after each step, encoded as it does.

    Returns:
        The frames of each step's message, without and with a column of logprobs.
    """
    random = np.random.default_rng(0)
    encoder = MsgpackEncoder()
    plain: list[Any] = []
    with_columns: list[Any] = []
    # A number of each request's own; those that `Columns` gives out begin at 1.
    marks, values = range(1, CONCURRENT + 1), np.full(CONCURRENT, -1.5, np.float32)
    for number in range(tokens):
        reason = FinishReason.LENGTH if number == tokens - 1 else None
        sampled = random.integers(10, VOCABULARY, CONCURRENT).tolist()
        outputs = [
            EngineCoreOutput(f"request-{index}", [token], finish_reason=reason)
            for index, token in enumerate(sampled)
        ]
        column = output_of(column_of(marks, [number] * CONCURRENT, values))
        for frames, sent in ((plain, outputs), (with_columns, [*outputs, column])):
            message = EngineCoreOutputs(outputs=sent, weight_version="0")
            frames.append([bytes(frame) for frame in encoder.encode(message)])
    return plain, with_columns


class Side:
    """An output processor, what it is fed, and how long that takes.

    Args:
        tokenizer: The model's.
        frames: The message of each step.
    """

    def __init__(self, tokenizer: Any, frames: list[Any]) -> None:
        self.processor = OutputProcessor(tokenizer, log_stats=False)
        self.frames = frames
        decoder, arriving = MsgpackDecoder(EngineCoreOutputs), iter(frames)
        self.core = SimpleNamespace(get_output=lambda: decoder.decode(next(arriving)))
        self.added: list[float] = []
        """[requests]: microseconds of `add_request`."""
        self.decoded: list[float] = []
        """[steps]: microseconds of reading the message."""
        self.processed: list[float] = []
        """[steps]: microseconds of `process_outputs`."""

    def add(self, request: EngineCoreRequest) -> None:
        """A request arrives."""
        queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, request.request_id)
        add_request = self.processor.add_request
        self.added.append(microseconds(add_request, request, "prompt", None, 0, queue))

    def step(self) -> None:
        """A message of the engine core's arrives, as `LLMEngine` takes it."""
        begin = time.perf_counter_ns()
        outputs = self.core.get_output()
        middle = time.perf_counter_ns()
        self.processor.process_outputs(
            outputs.outputs, outputs.timestamp, None, weight_version=outputs.weight_version
        )
        end = time.perf_counter_ns()
        self.decoded.append((middle - begin) / 1000)
        self.processed.append((end - middle) / 1000)


class Times:
    """Microseconds, over all rounds."""

    def __init__(self) -> None:
        # Once per request:
        self.own_added: list[float] = []
        self.taken_over: list[float] = []
        self.handed_over: list[float] = []
        # Per token:
        self.own: list[float] = []
        self.decoded: list[float] = []
        self.kept: list[float] = []


def timed(function: Callable[..., Any], samples: list[float]) -> Callable[..., Any]:
    """A function that also notes how long each call takes."""

    @functools.wraps(function)
    def timed_function(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            samples.append((time.perf_counter_ns() - begin) / 1000)

    return timed_function


@contextmanager
def hooked(side: Side, recorder: Recorder) -> Iterator[None]:
    """Record what goes through an output processor that no engine is behind."""
    engine = SimpleNamespace(
        output_processor=side.processor,
        engine_core=side.core,
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(logprobs_mode="raw_logprobs"),
            scheduler_config=SimpleNamespace(scheduler_cls=None),
            kv_transfer_config=None,
        ),
        collective_rpc=lambda *args, **kwargs: None,
        add_lora=lambda lora_request: None,
        sleep=lambda level=1: None,
        set_weight_version=lambda version: None,
    )
    hook = Hook(engine, recorder, version="0", hide_routed_experts=False)
    try:
        yield
    finally:
        hook.remove()


def requests(tokens: int) -> list[EngineCoreRequest]:
    """Requests as the API server makes them; the hook sees to the logprobs."""
    random = np.random.default_rng(1)
    return [
        EngineCoreRequest(
            request_id=f"request-{index}",
            external_req_id=f"cmpl-{index}",
            prompt_token_ids=random.integers(10, VOCABULARY, PROMPT).tolist(),
            mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=tokens, output_kind=RequestOutputKind.FINAL_ONLY
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        for index in range(CONCURRENT)
    ]


def one_round(
    tokenizer: Any, frames: tuple[list[Any], list[Any]], recorder: Recorder, times: Times
) -> None:
    """64 requests, once recorded and once not, step by step in turn.

    The steps alternate, not whole rounds: what disturbs one then disturbs its twin.
    """
    off, on = Side(tokenizer, frames[0]), Side(tokenizer, frames[1])
    tokens = len(on.frames)
    theirs: list[float] = []
    on.processor.add_request = timed(on.processor.add_request, theirs)
    finish = timed(Recording.finish, times.handed_over)
    with (
        hooked(on, recorder),
        record_key(KEY),
        patch.object(Recording, "finish", finish),
    ):
        pairs = list(zip(requests(tokens), requests(tokens), strict=True))
        with no_gc():
            for one, other in pairs:
                off.add(one)
                on.add(other)
            for number in range(tokens):
                for side in (off, on) if number % 2 else (on, off):
                    side.step()
    assert not on.processor.request_states
    # The recorder's thread must not work into the next round.
    recorder.flush()
    assert recorder.store.remove(KeyPrefix()) == CONCURRENT

    times.own_added += off.added
    times.taken_over += np.subtract(on.added, theirs).tolist()
    steps = slice(0, -1)  # all requests finish in the last one, which is no token's time

    def per_token(total: Sequence[float]) -> list[float]:
        return (np.asarray(total)[steps] / CONCURRENT).tolist()

    times.own += per_token(np.add(off.decoded, off.processed))
    times.decoded += per_token(np.subtract(on.decoded, off.decoded))
    times.kept += per_token(np.subtract(on.processed, off.processed))


def column_times(count: int) -> list[float]:
    """[count]: microseconds of CPU per token that a step's column takes in the engine core."""
    names = [f"request-{index}" for index in range(CONCURRENT)]
    requests = {
        name: SimpleNamespace(
            sampling_params=SamplingParams(logprobs=0, extra_args=mark_of(number)),
            num_output_tokens=100,
        )
        for number, name in enumerate(names)
    }
    scheduler = SimpleNamespace(requests=requests)
    scheduled = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1))
    index = {name: row for row, name in enumerate(names)}
    ids, values = np.zeros((CONCURRENT, 1), np.int32), np.zeros((CONCURRENT, 1), np.float32)

    def one_step(sampled: Any, outputs: list[EngineCoreOutput]) -> None:
        step = Step.of(scheduler, scheduled, sampled)
        assert step is not None
        step.append_column(outputs)

    times = []
    with no_gc():
        for _ in range(count):
            logprobs = LogprobsLists(ids, values, np.zeros(CONCURRENT, np.int32))
            sampled = SimpleNamespace(logprobs=logprobs, req_id_to_index=index)
            outputs = [EngineCoreOutput(name, [1]) for name in names]
            times.append(cpu_microseconds(one_step, sampled, outputs) / CONCURRENT)
            assert len(outputs) == CONCURRENT + 1
    return times


def identity_times(count: int) -> list[float]:
    """Microseconds that the middleware adds to one HTTP request."""

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    def serve(application: Any) -> None:
        # Nothing is awaited: the coroutine ends at once.
        try:
            application({"type": "http", "headers": HEADERS}, None, None).send(None)
        except StopIteration:
            return

    middleware = IdentityMiddleware(app)
    with no_gc():
        return [microseconds(serve, middleware) - microseconds(serve, app) for _ in range(count)]


def measure(quick: bool) -> list[Row]:
    tokens, rounds = (32, 2) if quick else (512, 8)
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3())
    frames = messages(tokens)
    recorder = Recorder()
    one_round(tokenizer, frames, recorder, Times())  # warms up
    times = Times()
    for number in range(rounds):
        progress(f"event_loop: round {number + 1} of {rounds}")
        one_round(tokenizer, frames, recorder, times)
    recorder.close()
    identity = identity_times(100 if quick else 5000)

    once = sum(map(_median, (identity, times.taken_over, times.handed_over)))
    logprobs = _median(times.decoded) + _median(times.kept)
    own = _median(times.own_added) + tokens * _median(times.own)
    size = f"{PROMPT} + {tokens} tokens"
    return [
        row(f"once per request, {size}", "µs/request", [once], TARGET_MICROSECONDS),
        row("of that: reading the key (middleware)", "µs/request", identity),
        row("of that: taking the request over", "µs/request", times.taken_over),
        row("of that: handing over at the finish", "µs/request", times.handed_over),
        row("logprobs: reading them from the engine", "µs/token", times.decoded),
        row("logprobs: keeping them", "µs/token", times.kept),
        row("vLLM's own, recording off", "µs/token", times.own),
        row("in the engine core: a step's column", "µs/token", column_times(20 if quick else 2000)),
        row(f"all of recording, {size}", "µs/request", [once + tokens * logprobs]),
        row(f"vLLM's own, recording off, {size}", "µs/request", [own]),
    ]


def _median(samples: list[float]) -> float:
    return float(np.median(samples))


if __name__ == "__main__":
    main(__doc__, measure)
