"""Spans: which part of which service worked on a trajectory, when, and with what result. Off unless `tracing.enabled`.

A process calls `start` once and `stop` at its end. All other code opens spans with `span`. While tracing is off that is
the OpenTelemetry API's own invalid span, which does nothing; the SDK is imported by `start` alone. Between processes a
span is named by its W3C `traceparent`: in a header, in gRPC metadata, or in a field of a message on the streams.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, StatusCode
from opentelemetry.trace import Span as Span
from opentelemetry.trace import SpanKind as SpanKind

from forage_runtime.settings import Settings
from forage_runtime.telemetry.trace_context import HEADER as HEADER
from forage_runtime.telemetry.trace_context import Attributes as Attributes
from forage_runtime.telemetry.trace_context import traceparent as traceparent
from forage_runtime.text.redaction import redact_text

if TYPE_CHECKING:
    from forage_proto.v1.trajectory_pb2 import Prompt
    from forage_runtime.telemetry.otlp import Tracer

# Not OpenTelemetry's global provider: vLLM and Ray would add their own spans to it.
_tracer: Tracer | None = None


def start(settings: Settings, service: str) -> None:
    """Trace this process from now on, if the settings enable it.

    Args:
        service: `service.name` is this name after "forage-".
    """
    global _tracer
    if settings.tracing.enabled and _tracer is None:
        from forage_runtime.telemetry.otlp import Tracer

        _tracer = Tracer(settings.tracing, service, settings.run.id)


def stop() -> None:
    """Send the remaining spans, for at most two seconds, and stop tracing."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.close()


def span(
    name: str,
    attributes: Attributes | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    parent: str | None = None,
    links: Sequence[str] = (),
    began_ns: int | None = None,
    active: bool = True,
) -> AbstractContextManager[Span]:
    """Open a span around a block; an exception marks it as failed and is raised on.

    Args:
        parent: `traceparent` of a span of another process; "" begins a new trace. None: the active span, if any.
        links: `traceparent`s of related spans; empty ones are skipped.
        began_ns: start of the span, in nanoseconds since 1970; None: now.
        active: spans opened inside, in this task, become children. False for spans that run side by side, and in
            generators, which another task may close.
    """
    if _tracer is None:
        return INVALID_SPAN
    return _tracer.span(name, attributes, kind, parent, links, began_ns, active)


def current_span() -> Span:
    """The active span; an invalid one, which does nothing, if there is none."""
    # While we do not trace, OpenTelemetry's current span, if any, is one of a library's: not ours to add to.
    return INVALID_SPAN if _tracer is None else trace.get_current_span()


def mark_failed(span: Span, detail: str) -> None:
    """Set a span's status to error, though nothing was raised."""
    span.set_status(StatusCode.ERROR, redact_text(detail))


def trace_headers() -> dict[str, str]:
    """HTTP headers that make a call part of the active span; empty without one."""
    value = traceparent(current_span())
    return {HEADER: value} if value else {}


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """gRPC metadata that makes a call part of the active span; empty without one."""
    return tuple(trace_headers().items())


def read_trace_context(context: Any) -> str:
    """The `traceparent` in the metadata of a gRPC call; empty without one."""
    if _tracer is None:
        return ""
    value = dict(context.invocation_metadata() or ()).get(HEADER, "")
    return value if isinstance(value, str) else ""


def attach_trace_context(prompt: Prompt, span: Span) -> None:
    """Make all work on a prompt part of a span; nothing changes if nothing is traced."""
    if value := traceparent(span):
        prompt.trace_id, prompt.traceparent = value.split("-")[1], value


def add_log_fields(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor that adds the ids of the active span."""
    if value := traceparent(current_span()):
        _, event["trace_id"], event["span_id"], _ = value.split("-")
    return event
