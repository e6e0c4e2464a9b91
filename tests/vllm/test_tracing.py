"""The recorder's span lies in the trace that the client names, beside the engine's own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from examples.vllm_server import VLLMServer
from recorder_core.client import RecordClient
from recorder_core.tracing import SPAN
from tests.collector import Collector, Span, collecting
from tests.models import tiny_qwen3
from tests.vllm.apis import PROMPT, completions, only, wait_until
from tests.vllm.conftest import ADMIN_KEY, ENV

Keys = Callable[[], str]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced_server(collector: Collector, log_folder: Path) -> Iterator[VLLMServer]:
    """The tiny model, with the engine's own tracing on."""
    args = ["--enable-recording", "--dtype", "float32"]
    args += ["--otlp-traces-endpoint", collector.endpoint]
    env = {
        **ENV,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",  # milliseconds
    }
    with VLLMServer(tiny_qwen3(), *args, env=env, log=log_folder / "traced.log") as server:
        yield server


@pytest.fixture(scope="module")
def traced_client(traced_server: VLLMServer) -> Iterator[RecordClient]:
    with RecordClient(traced_server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


def ask(server: VLLMServer, key: str, traceparent: str = "", *, n: int = 1) -> None:
    request = completions(PROMPT, max_tokens=5, n=n, ignore_eos=True)
    headers = {"authorization": f"Bearer {key}"}
    if traceparent:
        headers["traceparent"] = traceparent
    reply = httpx.post(
        server.base_url + request.path,
        json={"model": "model", **request.body},
        headers=headers,
        timeout=60,
    )
    assert reply.status_code == 200, reply.text


def spans_of(collector: Collector, key: str, count: int = 1) -> list[Span]:
    wait_until(lambda: len(collector.of(key)) >= count)
    spans = collector.of(key)
    assert [each.name for each in spans] == [SPAN] * count
    return spans


def test_a_record_has_a_span_in_the_clients_trace(
    traced_server: VLLMServer, traced_client: RecordClient, collector: Collector, fresh_key: Keys
) -> None:
    key, trace, parent = fresh_key(), secrets.token_hex(16), secrets.token_hex(8)
    ask(traced_server, key, f"00-{trace}-{parent}-01")
    [span] = spans_of(collector, key)
    assert (span.trace_id, span.parent_id) == (trace, parent)

    record = only(traced_client.get(key))
    assert span.attributes["recorder.record_id"] == record.id
    assert span.attributes["gen_ai.usage.prompt_tokens"] == len(record.prompt_ids)
    assert span.attributes["gen_ai.usage.completion_tokens"] == 5
    assert span.attributes["recorder.finish_reason"] == "length"
    assert "recorder.dropped" not in span.attributes
    assert not span.failed

    assert span.start == pytest.approx(record.created_at, abs=1e-3)
    assert span.events["generated"] == pytest.approx(record.finished_at, abs=1e-3)
    after = span.attributes["recorder.queue_seconds"] + span.attributes["recorder.build_seconds"]
    assert 0 < after <= span.end - record.finished_at + 0.01

    # The engine's own span of the same request.
    wait_until(lambda: collector.in_trace(trace, "llm_request"))
    [engine] = collector.in_trace(trace, "llm_request")
    assert engine.parent_id == parent
    named = "gen_ai.request.id"
    assert engine.attributes[named] == span.attributes[named] == record.request_id


def test_each_sample_has_a_span(
    traced_server: VLLMServer, traced_client: RecordClient, collector: Collector, fresh_key: Keys
) -> None:
    key, trace = fresh_key(), secrets.token_hex(16)
    ask(traced_server, key, f"00-{trace}-{secrets.token_hex(8)}-01", n=2)
    spans = spans_of(collector, key, 2)
    assert {each.trace_id for each in spans} == {trace}
    assert {each.attributes["recorder.record_id"] for each in spans} == {
        each.id for each in traced_client.get(key)
    }


def test_a_generation_that_is_not_stored_has_a_span_that_says_why(
    traced_server: VLLMServer, traced_client: RecordClient, collector: Collector, fresh_key: Keys
) -> None:
    key, trace = fresh_key(), secrets.token_hex(16)
    traced_client.block(key)
    ask(traced_server, key, f"00-{trace}-{secrets.token_hex(8)}-01")
    [span] = spans_of(collector, key)
    assert span.trace_id == trace
    assert span.attributes["recorder.dropped"] == "blocked"
    assert "recorder.record_id" not in span.attributes
    assert not span.failed  # it is as it was asked for


def test_what_the_client_does_not_sample_has_no_span(
    traced_server: VLLMServer, traced_client: RecordClient, collector: Collector, fresh_key: Keys
) -> None:
    unsampled, sampled = fresh_key(), fresh_key()
    ask(traced_server, unsampled, f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00")
    ask(traced_server, sampled, f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01")
    spans_of(collector, sampled)  # sent later, in the same queue
    assert not collector.of(unsampled)
    assert only(traced_client.get(unsampled))


@pytest.mark.parametrize("traceparent", ["", "no-trace"])
def test_without_a_trace_the_span_begins_one(
    traced_server: VLLMServer, collector: Collector, fresh_key: Keys, traceparent: str
) -> None:
    key = fresh_key()
    ask(traced_server, key, traceparent)
    [span] = spans_of(collector, key)
    assert span.trace_id
    assert not span.parent_id
