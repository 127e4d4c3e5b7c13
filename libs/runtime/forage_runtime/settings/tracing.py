"""Settings of tracing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forage_runtime.settings.base import Section, Url


class TracingSettings(Section):
    """OpenTelemetry spans of every service, and where they are sent."""

    enabled: bool = Field(False, description="Record spans and send them to the collector")
    endpoint: Url = Field(
        "",
        pattern=r"^$|^https?://[^\s?#]+$",
        description="URL of an OpenTelemetry collector, such as http://collector:4317; "
        "empty: OTEL_EXPORTER_OTLP_ENDPOINT, or else this machine",
    )
    protocol: Literal["grpc", "http"] = Field("grpc", description="OTLP over gRPC or over HTTP")
    sample_ratio: float = Field(1.0, ge=0, le=1, description="Share of prompts whose spans are recorded")
