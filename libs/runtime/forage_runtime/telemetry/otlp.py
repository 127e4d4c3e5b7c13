"""Spans of OpenTelemetry's SDK, exported over OTLP by a thread: work never waits for the collector.

Nothing here is global: libraries that trace by themselves (vLLM, Ray) neither see these spans nor add to them. The SDK
reads its standard variables, such as OTEL_EXPORTER_OTLP_HEADERS and OTEL_BSP_MAX_QUEUE_SIZE; settings take precedence.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes as SdkAttributes

from forage_runtime import __version__
from forage_runtime.addresses import NO_PROXY
from forage_runtime.errors import InterruptedWorkError
from forage_runtime.settings import TracingSettings
from forage_runtime.telemetry.trace_context import DROPPED, HEADER, Attributes

STOP_S = 2.0
"""Time to send the remaining spans at the end of a process."""

_DELAY_MS = 1000
_QUEUE = 16384
_propagator = TraceContextTextMapPropagator()
_use_span = partial(trace.use_span, record_exception=False, set_status_on_exception=False)


class Tracer:
    """Opens the spans of this process and exports the sampled ones."""

    def __init__(self, settings: TracingSettings, service: str, run: str) -> None:
        size = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", _QUEUE))
        room = threading.Semaphore(size)
        self._exporter = _MonitoredExporter(_exporter(settings), settings.endpoint, room)
        self._processor = _CountingProcessor(self._exporter, size, room)
        # `close` handles the exit of the process: the SDK's own handler would wait for half a minute.
        sampler = ParentBased(_LinkSampler(settings.sample_ratio))
        provider = TracerProvider(sampler, _resource(service, run), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("forage", __version__)

    @contextmanager
    def span(
        self,
        name: str,
        attributes: Attributes | None = None,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
        parent: str | None = None,
        links: Sequence[str] = (),
        began_ns: int | None = None,
        active: bool = True,
    ) -> Iterator[trace.Span]:
        """See `tracing.span`."""
        context = None if parent is None else _remote(parent)
        above = trace.get_current_span(context)
        if (known := above.get_span_context()).is_valid and not known.trace_flags.sampled:
            # Not sampled, as decided where the trace began: nothing is recorded, and calls pass the decision on.
            with trace.use_span(above) if context is not None and active else nullcontext():
                yield above
            return
        span = self._tracer.start_span(
            name,
            context=context,
            kind=kind,
            attributes=attributes,
            links=[trace.Link(found) for link in links if (found := _span_context(link)).is_valid],
            start_time=began_ns,
            record_exception=False,
            set_status_on_exception=False,
        )
        try:
            with _use_span(span) if active else nullcontext():
                yield span
        except (asyncio.CancelledError, InterruptedWorkError):
            span.add_event("cancelled")
            raise
        except Exception as error:
            span.record_exception(error)
            span.set_status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")
            raise
        finally:
            span.end()

    def close(self) -> None:
        """Send the remaining spans; those that cannot be sent in time are dropped and counted."""
        ending = threading.Thread(target=self._processor.shutdown, name="tracing-end", daemon=True)
        ending.start()
        ending.join(STOP_S)
        if ending.is_alive():
            self._exporter.shutdown()


class _CountingProcessor(BatchSpanProcessor):
    """Counts spans dropped because the queue is full, where the SDK would log each of them.

    Args:
        room: free places of the queue; the exporter releases those of the spans that it takes.
    """

    def __init__(self, exporter: SpanExporter, size: int, room: threading.Semaphore) -> None:
        delay_ms = float(os.environ.get("OTEL_BSP_SCHEDULE_DELAY", _DELAY_MS))
        super().__init__(exporter, max_queue_size=size, schedule_delay_millis=delay_ms)
        self._room = room

    def on_end(self, span: ReadableSpan) -> None:
        if not span.context.trace_flags.sampled:
            return
        if self._room.acquire(blocking=False):
            super().on_end(span)
        else:
            DROPPED.labels("queue").inc()


class _MonitoredExporter(SpanExporter):
    """Counts spans that did not arrive; logs once when the collector becomes unavailable, and once when it is back."""

    def __init__(self, exporter: SpanExporter, endpoint: str, room: threading.Semaphore) -> None:
        self._room = room
        self._exporter = exporter
        self._endpoint = endpoint or "that of OTEL_EXPORTER_OTLP_ENDPOINT"
        self._is_unavailable = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._room.release(len(spans))
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001 - export must not fail the traced work; counted below
            result = SpanExportResult.FAILURE
        is_unavailable = result is not SpanExportResult.SUCCESS
        if is_unavailable:
            DROPPED.labels("export").inc(len(spans))
        if is_unavailable != self._is_unavailable:
            self._is_unavailable = is_unavailable
            log = structlog.get_logger()
            if is_unavailable:
                log.warning("collector_unavailable", endpoint=self._endpoint, spans=len(spans))
            else:
                log.info("collector_available", endpoint=self._endpoint, spans=len(spans))
        return result

    def shutdown(self) -> None:
        """Abort the export in progress, and make no more."""
        self._exporter.shutdown()


class _LinkSampler(Sampler):
    """Samples a new trace if a trace that it links to is sampled, and else by the ratio."""

    def __init__(self, ratio: float) -> None:
        self._ratio, self._all = TraceIdRatioBased(ratio), TraceIdRatioBased(1.0)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: trace.SpanKind | None = None,
        attributes: SdkAttributes = None,
        links: Sequence[trace.Link] | None = None,
        trace_state: trace.TraceState | None = None,
    ) -> SamplingResult:
        linked = any(link.context.trace_flags.sampled for link in links or ())
        sampler = self._all if linked else self._ratio
        return sampler.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"LinkSampler{{{self._ratio.get_description()}}}"


def _resource(service: str, run: str) -> Resource:
    own = {
        "service.namespace": "forage",
        "service.name": os.environ.get("OTEL_SERVICE_NAME") or f"forage-{service}",
        "service.version": __version__,
        "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
        "forage.run": run,
    }
    return Resource.create(own)


def _exporter(settings: TracingSettings) -> SpanExporter:
    """The exporter, which uses no proxy of the environment, as no call between services does."""
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # it logs every attempt
    endpoint = settings.endpoint.rstrip("/")
    if settings.protocol == "http":
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        session = requests.Session()
        session.trust_env = False
        return HttpExporter(endpoint=f"{endpoint}/v1/traces" if endpoint else None, session=session)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter(endpoint=endpoint or None, channel_options=NO_PROXY)  # type: ignore[arg-type]


def _remote(traceparent: str) -> Context:
    return _propagator.extract({HEADER: traceparent}, context=Context())


def _span_context(traceparent: str) -> trace.SpanContext:
    return trace.get_current_span(_remote(traceparent)).get_span_context()
