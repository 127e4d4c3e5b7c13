"""Spans: which part of which service did what for a trajectory, when, and how it ended. Off unless `tracing.enabled`.

A process calls `start` once and `stop` at its end; everybody else opens spans, which cost next to nothing while tracing
is off. OpenTelemetry is imported by `start` alone. Between processes a span goes by its W3C `traceparent`: in a header,
in gRPC's metadata, or in a field of what travels on the streams.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter

from forage_common.settings import Settings

if TYPE_CHECKING:
    from forage_common.telemetry.otlp import Tracer
    from forage_common.v1.trajectory_pb2 import Prompt

HEADER = "traceparent"
"""Of HTTP and of gRPC's metadata."""

DROPPED = Counter(
    "forage_common_spans_dropped_total",
    "Spans that did not reach the collector: it was away (export), or too slow for them (queue)",
    ["reason"],
)
for _reason in ("queue", "export"):
    DROPPED.labels(_reason)  # shown from the start, as 0

Attributes = Mapping[str, str | int | float | bool]


class SpanKind(Enum):
    """What a span is in a call between processes, or on a stream."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"
    PRODUCER = "producer"
    CONSUMER = "consumer"


class Span:
    """One piece of work. This one is not recorded: it does nothing, and may be used any number of times."""

    traceparent = ""
    trace_id = ""

    def set_attributes(self, attributes: Attributes) -> None:
        """Say more about it."""

    def add_event(self, name: str, attributes: Attributes | None = None) -> None:
        """Something that happened within it, now."""

    def fail(self, detail: str) -> None:
        """It went wrong, though nothing was raised."""

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


_OFF = Span()
_tracer: Tracer | None = None


def start(settings: Settings, service: str) -> None:
    """Trace this process from now on, if the settings say so.

    Args:
        service: becomes `service.name`, after "forage-".
    """
    global _tracer
    if settings.tracing.enabled and _tracer is None:
        from forage_common.telemetry.otlp import Tracer

        _tracer = Tracer(settings.tracing, service, settings.run.id)


def stop() -> None:
    """Send what is left, for two seconds at most, and trace no more."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.close()


def is_enabled() -> bool:
    """Whether this process traces."""
    return _tracer is not None


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
    """A span around what is done inside; an exception marks it as failed and passes.

    Args:
        parent: the `traceparent` of a span elsewhere; without one ("") a trace begins. None = the active span, if any.
        links: `traceparent`s of other spans that this one has to do with; empty ones are left out.
        began_ns: when it began, in nanoseconds since 1970; None = now.
        active: what is opened inside, in this task, belongs to it. False where several run side by side, and in
            generators, which other tasks may close.
    """
    if _tracer is None:
        return _OFF
    return _tracer.span(name, attributes, kind, parent, links, began_ns, active)


def current_span() -> Span:
    """The active span."""
    return _OFF if _tracer is None else _tracer.current_span()


def traceparent(span: Span) -> str:
    """The W3C `traceparent` of a span; empty where nothing is traced."""
    return span.traceparent


def mark_failed(span: Span, detail: str) -> None:
    """Set a span's status to error, though nothing was raised."""
    span.fail(detail)


def trace_headers() -> dict[str, str]:
    """Of a call that belongs to the active span; none where there is no span."""
    value = traceparent(current_span())
    return {HEADER: value} if value else {}


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Likewise, for gRPC."""
    return tuple(trace_headers().items())


def read_trace_context(context: Any) -> str:
    """The `traceparent` of a gRPC call's metadata; empty where there is none."""
    if _tracer is None:
        return ""
    value = dict(context.invocation_metadata() or ()).get(HEADER, "")
    return value if isinstance(value, str) else ""


def attach_trace_context(prompt: Prompt, span: Span) -> None:
    """Have what becomes of a prompt belong to a span; nothing changes where there is none."""
    if value := traceparent(span):
        prompt.trace_id, prompt.traceparent = span.trace_id, value


def log_fields(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: the ids of the active span."""
    if _tracer is not None and (found := traceparent(current_span())):
        _, event["trace_id"], event["span_id"], _ = found.split("-")
    return event
