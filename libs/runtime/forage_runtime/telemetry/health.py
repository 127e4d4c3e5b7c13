"""The health endpoint of every service.

It answers `/healthz` (the process is alive), `/readyz` (503 with the reasons until the service is ready; notes of what
slows a ready one down), `/waitz` (every wait in progress) and `/metrics` (Prometheus).
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest

from forage_runtime.addresses import bound_by_descriptors, listen
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import list_waits

_MAX_CONNECTIONS = 128
_ANSWER_S = 30.0
"""A connection has one request; it ends after this, however slowly its client sends or reads."""
WAITING = Gauge("forage_common_waiting", "1 while this keeps the service from being ready", ["what"])


class Health:
    """The readiness of a service: ready unless it waits for something. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._lasting: dict[str, str] = {}
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

    def add_lasting_note(self, topic: str, sentence: str) -> None:
        """Add a note that holds as long as the process, such as a protection that its machine lacks."""
        with self._lock:
            self._lasting[topic] = sentence

    @property
    def notes(self) -> dict[str, str]:
        with self._lock:
            return self._lasting | self._notes

    @property
    def waiting(self) -> dict[str, str]:
        with self._lock:
            return dict(self._waiting)


class Gate(Protocol):
    """Who is let in; `forage_runtime.security.health_gate` has the one of the settings."""

    def admit(self, connection: socket.socket, peer: str) -> socket.socket | None:
        """Return the connection to answer on, within TLS; None to close it. May block for some seconds."""

    def refuse(self, connection: socket.socket, path: str, peer: str) -> str:
        """Say why a request may not pass; empty if it may."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    health: Health
    metrics: Callable[[], bytes]
    list_waits: Callable[[], list[dict[str, Any]]]
    gate: Gate | None

    def __init__(self, listener: socket.socket) -> None:
        self._open: dict[int, tuple[float, socket.socket]] = {}  # thread → since when, its connection
        self._most = bound_by_descriptors(_MAX_CONNECTIONS, 8)  # probes are few, and HTTP and gRPC take a quarter each
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Shake hands and answer, in a thread of the connection: a slow client delays nobody else."""
        thread, since = threading.get_ident(), time.monotonic()
        self._open[thread] = since, request
        try:
            admitted = self.gate.admit(request, client_address[0]) if self.gate is not None else request
            if admitted is None:
                self.shutdown_request(request)
            else:
                self._open[thread] = since, admitted
                super().process_request_thread(admitted, client_address)
        finally:
            del self._open[thread]

    def service_actions(self) -> None:
        """End connections that last too long, and the oldest ones while there are too many."""
        connections = sorted(list(self._open.values()), key=lambda one: one[0])
        too_many = max(0, len(connections) - self._most)
        for number, (since, connection) in enumerate(connections):
            if number < too_many or time.monotonic() - since > _ANSWER_S:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not TLS's own, whose state is the thread's

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors, except of clients that closed the connection or were too slow."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError | ssl.SSLError):
            get_logger().exception("health_request_failed")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0

    def do_GET(self) -> None:  # the name is http.server's
        gate = self.server.gate
        if gate is not None and (why := gate.refuse(self.connection, self.path, self.client_address[0])):
            return self._reply(403, json.dumps({"detail": why}).encode())
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
    gate: Gate | None = None,
) -> ThreadingHTTPServer:
    """Serve health and metrics on a daemon thread; `shutdown()` on the result ends it.

    Args:
        metrics: renders the metrics page; by default the metrics of this process.
        waits: lists the waits; by default those of this process.
        gate: who is let in; None: everybody, in plain text.

    Raises:
        UserError: the port is in use.
    """
    server = _Server(listen(address))
    server.health = health
    server.metrics = metrics
    server.list_waits = waits
    server.gate = gate
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server
