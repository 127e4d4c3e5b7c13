"""A collector of spans on loopback, over gRPC or HTTP: reads OpenTelemetry's own messages and keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Message
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from waiting import wait_until

from forage_runtime.settings import load_settings
from forage_runtime.telemetry import tracing


@dataclass(frozen=True)
class Received:
    """A span as a backend sees it. `links` are (trace id, span id); ids are hexadecimal, "" = none."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    events: tuple[str, ...]
    failed: bool
    detail: str
    seconds: float


class Receiver(TraceServiceServicer):
    """Keeps spans. `headers` are those of the last export, `resources` the attributes of each sender."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.headers: dict[str, str] = {}
        self.resources: dict[str, dict[str, Any]] = {}
        self.endpoint = ""

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        self.take(request, dict(context.invocation_metadata()))
        return ExportTraceServiceResponse()

    def take(self, request: ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        self.headers = headers
        for resource in request.resource_spans:
            known = _read_attributes(resource.resource.attributes)
            self.resources[known["service.name"]] = known
            for scope in resource.scope_spans:
                self.spans += [_read_span(known["service.name"], span) for span in scope.spans]

    def named(self, name: str, trace_id: str = "") -> list[Received]:
        """Find all spans of a name; of one trace where it is given."""
        return [span for span in list(self.spans) if span.name == name and trace_id in ("", span.trace_id)]

    def wait_for(self, condition: Callable[[Receiver], Any]) -> Any:
        """Wait until the condition returns something, and return it."""
        return wait_until(lambda: condition(self), lambda: f"more than {sorted({span.name for span in self.spans})}")


@contextmanager
def receive_grpc(address: str = "127.0.0.1:0") -> Iterator[Receiver]:
    """Serve a receiver at http://127.0.0.1:… over gRPC."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    add_TraceServiceServicer_to_server(receiver, server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port(address)}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()


@contextmanager
def trace_process(service: str) -> Iterator[Receiver]:
    """Trace this process, as the given service, to a receiver over gRPC."""
    with receive_grpc() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        overrides = ["tracing.enabled=true", f"tracing.endpoint={receiver.endpoint}"]
        tracing.start(load_settings(overrides=overrides, environ={}), service)
        yield receiver
        tracing.stop()


@contextmanager
def receive_http() -> Iterator[Receiver]:
    """Serve a receiver at http://127.0.0.1:… over HTTP."""
    receiver = Receiver()

    class Desk(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/v1/traces":
                self.send_error(404)
                return
            receiver.take(ExportTraceServiceRequest.FromString(body), {k.lower(): v for k, v in self.headers.items()})
            reply = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Desk) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        receiver.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        yield receiver
        server.shutdown()


def _read_span(service: str, span: Message) -> Received:
    return Received(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=Message.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        attributes=_read_attributes(span.attributes),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        events=tuple(event.name for event in span.events),
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        detail=span.status.message,
        seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
    )


def _read_attributes(attributes: Sequence[KeyValue]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}
