"""The health endpoint: what a service waits for, in the words of a probe and as metrics."""

from __future__ import annotations

from collections.abc import Callable

import httpx
from waiting import WAIT_S

from forage_runtime.telemetry.health import Health, serve_health


def test_the_metrics_agree_with_the_readiness_probe(free_address: Callable[[], str]) -> None:
    health, address = Health(), free_address()
    server = serve_health(address, health)
    try:
        health.wait_for("redis", "no answer")
        health.mark_started()
        probe, page = (httpx.get(f"http://{address}/{name}", timeout=WAIT_S) for name in ("readyz", "metrics"))
        assert (probe.status_code, probe.json()["waiting_for"]) == (503, {"redis": "no answer"})
        assert 'forage_common_waiting{what="redis"} 1.0' in page.text
        assert 'forage_common_waiting{what="start"} 0.0' in page.text
        health.mark_ready("redis")
        assert httpx.get(f"http://{address}/readyz", timeout=WAIT_S).status_code == 200
        assert 'forage_common_waiting{what="redis"} 0.0' in httpx.get(f"http://{address}/metrics", timeout=WAIT_S).text
    finally:
        server.shutdown()


def test_notes_of_a_ready_service_are_shown(free_address: Callable[[], str]) -> None:
    health, address = Health(), free_address()
    server = serve_health(address, health)
    try:
        health.mark_started()
        health.set_notes({"backpressure": "the trainer is slow"})
        probe = httpx.get(f"http://{address}/readyz", timeout=WAIT_S)
        assert (probe.status_code, probe.json()["notes"]) == (200, {"backpressure": "the trainer is slow"})
        health.set_notes({})
        assert httpx.get(f"http://{address}/readyz", timeout=WAIT_S).json()["notes"] == {}
    finally:
        server.shutdown()
