"""A collector of OpenTelemetry traces: OTLP over HTTP on the loopback, decoded as it comes."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

KEY = "recorder.key"
"""The attribute that names the run."""


@dataclass
class Span:
    """One span, as it was sent."""

    name: str
    trace_id: str
    parent_id: str
    start: float
    """Seconds since the epoch; so are the others."""
    end: float
    failed: str
    """What its status says, where that is an error."""
    attributes: dict[str, Any] = field(default_factory=dict)
    events: dict[str, float] = field(default_factory=dict)


class Collector:
    """What was sent so far."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        self.spans: list[Span] = []

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [_span(each) for each in scope.spans]

    def of(self, key: str) -> list[Span]:
        """The spans that are about a run."""
        return [each for each in list(self.spans) if each.attributes.get(KEY) == key]

    def in_trace(self, trace_id: str, name: str) -> list[Span]:
        """The spans of a name that are in a trace."""
        return [each for each in list(self.spans) if (each.name, each.trace_id) == (name, trace_id)]


def _span(sent: Any) -> Span:
    return Span(
        name=sent.name,
        trace_id=sent.trace_id.hex(),
        parent_id=sent.parent_span_id.hex(),
        start=sent.start_time_unix_nano / 1e9,
        end=sent.end_time_unix_nano / 1e9,
        failed=sent.status.message if sent.status.code == 2 else "",
        attributes={
            each.key: getattr(each.value, str(each.value.WhichOneof("value")))
            for each in sent.attributes
        },
        events={each.name: each.time_unix_nano / 1e9 for each in sent.events},
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            zipped = self.headers.get("content-encoding") == "gzip"
            collector.take(gzip.decompress(body) if zipped else body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_address[1])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield collector
        finally:
            server.shutdown()
