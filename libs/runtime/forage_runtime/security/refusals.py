"""Counts and logs the callers that a service turns away, without what they sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import StrEnum

from prometheus_client import Counter

from forage_runtime.telemetry.logs import get_logger

REFUSED = Counter("forage_common_refused_callers_total", "Calls and connections turned away", ["wire", "reason"])
LOG_PERIOD_S = 1.0
"""Between two lines of the log for a wire and a reason: who floods a service does not flood its log."""


class Refusal(StrEnum):
    """Why a caller is turned away."""

    NO_TOKEN = "no_token"
    WRONG_TOKEN = "wrong_token"
    NO_CERTIFICATE = "no_certificate"
    TLS_FAILED = "tls_failed"
    """Another authority's or an expired certificate, or plain text where TLS is spoken."""


class _LogLimit:
    """Lets a line of each kind through once a period, and counts those between. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._state: dict[tuple[str, Refusal], tuple[float, int]] = {}

    def count_unlogged(self, wire: str, reason: Refusal) -> int | None:
        """How many were left out since the last line; None if this one is left out, too."""
        with self._lock:
            now = self._clock()
            logged_at, unlogged = self._state.get((wire, reason), (-LOG_PERIOD_S, 0))
            if now - logged_at < LOG_PERIOD_S:
                self._state[wire, reason] = logged_at, unlogged + 1
                return None
            self._state[wire, reason] = now, 0
            return unlogged


_limit = _LogLimit()


def record_refusal(wire: str, reason: Refusal, peer: str, detail: str = "") -> None:
    """Count a refusal, and log it unless one like it was logged within the last second.

    Args:
        wire: service and protocol: reward/grpc, retriever/http, …
        peer: address of the caller.
        detail: what TLS said.
    """
    REFUSED.labels(wire, reason).inc()
    unlogged = _limit.count_unlogged(wire, reason)
    if unlogged is not None:
        more = {name: value for name, value in (("detail", detail), ("unlogged", unlogged)) if value}
        get_logger().warning("caller_refused", wire=wire, reason=str(reason), peer=peer, **more)
