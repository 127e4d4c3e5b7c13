"""The health endpoint of every service.

It answers `/healthz` (the process is alive), `/readyz` (503 with the reasons until the service is ready; notes of what
slows a ready one down), `/waitz` (every wait in progress) and `/metrics` (Prometheus).
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest

from forage_common.addresses import port_in_use_error, split_address
from forage_common.telemetry.logs import get_logger
from forage_common.telemetry.waits import list_waits

WAITING = Gauge("forage_common_waiting", "1 while this keeps the service from being ready", ["what"])


class Health:
    """The readiness of a service: ready unless it waits for something. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._lock = threading.Lock()
        self.wait_for("start", "starting")

    def wait_for(self, what: str, detail: str) -> None:
        """Mark the service as not ready until `mark_ready(what)`."""
        with self._lock:
            self._waiting[what] = detail
            WAITING.labels(what).set(1)

    def mark_ready(self, what: str) -> None:
        """End the wait for `what`; other waits stay."""
        with self._lock:
            self._waiting.pop(what, None)
            WAITING.labels(what).set(0)

    def mark_started(self) -> None:
        """End the wait for the start of the service; other waits stay."""
        self.mark_ready("start")

    def set_notes(self, notes: Mapping[str, str]) -> None:
        """Replace the notes of what slows the service down, although it is ready: topic → sentence."""
        with self._lock:
            self._notes = dict(notes)

    @property
    def notes(self) -> dict[str, str]:
        with self._lock:
            return dict(self._notes)

    @property
    def waiting(self) -> dict[str, str]:
        with self._lock:
            return dict(self._waiting)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    health: Health
    metrics: Callable[[], bytes]
    list_waits: Callable[[], list[dict[str, Any]]]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors, except of clients that closed the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            get_logger().exception("health_request_failed")


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:  # the name is http.server's
        if self.path == "/metrics":
            return self._reply(200, self.server.metrics(), CONTENT_TYPE_LATEST)
        if self.path == "/healthz":
            return self._reply(200, b'{"status":"ok"}')
        if self.path == "/readyz":
            health = self.server.health
            waiting = health.waiting
            body = json.dumps({"ready": not waiting, "waiting_for": waiting, "notes": health.notes}).encode()
            return self._reply(503 if waiting else 200, body)
        if self.path == "/waitz":
            return self._reply(200, json.dumps({"waits": self.server.list_waits()}).encode())
        return self._reply(404, b'{"detail":"try /healthz, /readyz, /waitz or /metrics"}')

    def _reply(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log every probe."""


def serve_health(
    address: str,
    health: Health,
    metrics: Callable[[], bytes] = generate_latest,
    waits: Callable[[], list[dict[str, Any]]] = list_waits,
) -> ThreadingHTTPServer:
    """Serve health and metrics on a daemon thread; `shutdown()` on the result ends it.

    Args:
        metrics: renders the metrics page; by default the metrics of this process.
        waits: lists the waits; by default those of this process.

    Raises:
        UserError: the port is in use.
    """
    try:
        server = _Server(split_address(address), _Handler)
    except OSError as error:
        raise port_in_use_error(address, error) from None
    server.health = health
    server.metrics = metrics
    server.list_waits = waits
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server
