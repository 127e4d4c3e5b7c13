"""Counts and logs the callers that a service turns away, without what they sent."""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import Counter

from forage_common.telemetry.logs import get_logger

REFUSED = Counter("forage_common_refused_callers_total", "Calls and connections turned away", ["wire", "reason"])


class Refusal(StrEnum):
    """Why a caller is turned away."""

    NO_TOKEN = "no_token"
    WRONG_TOKEN = "wrong_token"
    NO_CERTIFICATE = "no_certificate"
    TLS_FAILED = "tls_failed"
    """Another authority's or an expired certificate, or plain text where TLS is spoken."""


def record_refusal(wire: str, reason: Refusal, peer: str) -> None:
    """Count and log a refusal.

    Args:
        wire: service and protocol: reward/grpc, retriever/http, …
        peer: address of the caller.
    """
    REFUSED.labels(wire, reason).inc()
    get_logger().warning("caller_refused", wire=wire, reason=str(reason), peer=peer)
