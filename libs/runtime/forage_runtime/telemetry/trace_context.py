"""W3C trace context: how a span is named in headers, in gRPC metadata and in messages; and spans that were dropped."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.trace import Span
from prometheus_client import Counter

HEADER = "traceparent"
"""Name of the HTTP header, and of the key in gRPC metadata."""

DROPPED = Counter(
    "forage_common_spans_dropped_total",
    "Spans that did not reach the collector: it was unavailable (export), or the queue was full (queue)",
    ["reason"],
)
for _reason in ("queue", "export"):
    DROPPED.labels(_reason)  # exported as 0 from the start

Attributes = Mapping[str, str | int | float | bool]


def traceparent(span: Span) -> str:
    """The W3C `traceparent` of a span; empty if nothing is traced."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
