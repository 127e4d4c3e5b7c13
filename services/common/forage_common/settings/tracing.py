"""Settings of tracing."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from forage_common.settings.base import Section


class TracingProtocol(StrEnum):
    """How spans travel: OTLP over gRPC or over HTTP."""

    GRPC = "grpc"
    HTTP = "http"


class TracingSettings(Section):
    """Where every service sends its spans."""

    enabled: bool = False
    endpoint: str = Field(
        "",
        pattern=r"^$|^https?://[^\s?#]+$",
        description="URL of an OpenTelemetry collector, such as http://collector:4317; "
        "empty = that of OTEL_EXPORTER_OTLP_ENDPOINT, or this machine's",
    )
    protocol: TracingProtocol = TracingProtocol.GRPC
    sample_ratio: float = Field(1.0, ge=0, le=1, description="share of the prompts whose spans are sent")
