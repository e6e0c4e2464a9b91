"""A span of OpenTelemetry from each request to its record, in a process that is being traced.

An engine whose own tracing is on has made a tracer provider for its whole process; the span goes
there, into the trace that the request's `traceparent` header names, beside the engine's span. Only
OpenTelemetry's API is used, and only where the engine has imported it already: nothing here turns
tracing on. The headers are W3C's: https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from recorder_core.building import printable
from recorder_core.drops import DropReason
from recorder_core.records import FinishReason, Record, Turn

SPAN = "recorder.record"
"""The span's name."""
_HEADERS = (b"traceparent", b"tracestate")


def is_on() -> bool:
    """Whether this process has a tracer provider."""
    return _provider() is not None


def trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The trace that a request belongs to, from its ASGI headers; empty where it names none."""
    found = {name: value for name, value in headers if name in _HEADERS}
    return {name.decode(): value.decode("latin-1") for name, value in found.items()}


def trace(
    turn: Turn,
    record: Record | None,
    dropped: DropReason | None,
    *,
    queue_seconds: float,
    build_seconds: float,
) -> None:
    """Emit the span of a turn that is stored or dropped now; nothing where tracing is off.

    It begins when the engine took the request and ends now; its event `generated` is the
    generation's end.

    Args:
        turn: What was generated.
        record: What was stored of it.
        dropped: Why nothing was.
        queue_seconds: How long the turn waited for the recorder's thread.
        build_seconds: How long that took from there.
    """
    provider = _provider()
    if provider is None:
        return
    # Imported already, by whoever made the provider.
    from opentelemetry.trace import Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = turn.exchange.trace if turn.exchange is not None else {}
    span = provider.get_tracer("recorder_core").start_span(
        SPAN,
        context=TraceContextTextMapPropagator().extract(carrier),
        start_time=_nanoseconds(turn.created_at or time.time()),
        attributes={
            # As engines name them, so that one query finds both spans.
            "gen_ai.request.id": printable(turn.request_id),
            "gen_ai.usage.prompt_tokens": len(turn.prompt_ids),
            "gen_ai.usage.completion_tokens": len(turn.response_ids),
            "recorder.key": str(turn.key),
            "recorder.finish_reason": FinishReason(turn.finish_reason).value,
            "recorder.sample_index": turn.sample_index,
            "recorder.queue_seconds": queue_seconds,
            "recorder.build_seconds": build_seconds,
        },
    )
    if turn.finished_at:
        span.add_event("generated", timestamp=_nanoseconds(turn.finished_at))
    if record is not None:
        span.set_attribute("recorder.record_id", record.id)
        if record.parent is not None:
            span.set_attribute("recorder.parent", record.parent)
    if dropped is not None:
        span.set_attribute("recorder.dropped", dropped.value)
        if dropped.cuts:
            span.set_status(Status(StatusCode.ERROR, dropped.value))
    span.end()


def _provider() -> Any:
    """The tracer provider of this process; None where it has none."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    # What the API hands out until somebody sets one.
    return None if isinstance(provider, api.ProxyTracerProvider) else provider


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
