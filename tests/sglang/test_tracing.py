"""The recorder's span lies in the trace that the client names, where SGLang's tracing is on."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="SGLang's tracing is not installed")
pytest.importorskip("opentelemetry.exporter.otlp", reason="SGLang's tracing is not installed")

from examples.sglang_server import SGLangServer
from recorder_core.client import RecordClient
from recorder_core.tracing import SPAN
from tests.collector import Collector, collecting
from tests.models import tiny_qwen3
from tests.sglang.apis import wait_until
from tests.sglang.conftest import ADMIN_KEY


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced_server(collector: Collector, log_folder: Path) -> Iterator[SGLangServer]:
    """The tiny model, with the engine's own tracing on."""
    args = ["--enable-recording", "--admin-api-key", ADMIN_KEY, "--dtype", "float32"]
    args += ["--enable-trace", "--otlp-traces-endpoint", collector.endpoint]
    env = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "100",
    }
    with SGLangServer(tiny_qwen3(), *args, env=env, log=log_folder / "traced.log") as server:
        yield server


def test_a_record_has_a_span_in_the_clients_trace(
    traced_server: SGLangServer, collector: Collector, fresh_key: Callable[[], str]
) -> None:
    key, trace, parent = fresh_key(), secrets.token_hex(16), secrets.token_hex(8)
    reply = httpx.post(
        f"{traced_server.base_url}/v1/completions",
        json={"model": "model", "prompt": "Say it.", "max_tokens": 5, "ignore_eos": True},
        headers={"authorization": f"Bearer {key}", "traceparent": f"00-{trace}-{parent}-01"},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text
    wait_until(lambda: bool(collector.of(key)))
    [span] = collector.of(key)
    assert (span.name, span.trace_id, span.parent_id) == (SPAN, trace, parent)
    with RecordClient(traced_server.base_url, admin_key=ADMIN_KEY) as client:
        [record] = client.get(key)
    assert span.attributes["recorder.record_id"] == record.id
    assert span.attributes["gen_ai.request.id"] == record.request_id
    # SGLang's own spans of the request.
    wait_until(
        lambda: any(each.trace_id == trace and each.name != SPAN for each in collector.spans)
    )
