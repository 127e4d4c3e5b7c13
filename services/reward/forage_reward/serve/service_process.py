"""The service as a process: one server, or several workers on one port, with health endpoints and graceful stop."""

from __future__ import annotations

import signal

from forage_reward.checks import list_checks
from forage_reward.serve.server import DRAIN_S, Server
from forage_reward.serve.workers import WorkerPool
from forage_runtime.problems import require_all
from forage_runtime.security.health_gate import HealthGate
from forage_runtime.settings import Settings
from forage_runtime.settings.reward import join_titles
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health, serve_health
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import idling
from forage_sandbox.support import list_notes


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then finish the calls in progress.

    Raises:
        UserError: a route, a user reward, a certificate or a token is invalid, or a port is in use.
    """
    require_all(list_checks(settings))
    gate = HealthGate(settings.tls, "reward")
    stop = Stop()
    stop.install_handler(signal.SIGTERM, signal.SIGINT)
    ready = Health()
    for topic, note in list_notes(settings.reward.user, settings.security.user_code).items():
        ready.add_lasting_note(topic, note)
    serving = WorkerPool(settings, ready) if settings.reward.workers > 1 else Server(settings)
    health = serve_health(settings.reward.health_address, ready, serving.metrics, gate=gate)
    serving.listen()
    ready.mark_started()
    log = get_logger()
    log.info(
        "serving",
        grpc=settings.reward.grpc_address,
        routes={source: join_titles(route) for source, route in settings.reward.routes.items()},
        workers=settings.reward.workers,
    )
    with idling("calls to score", on="rollout and trainer"):
        stop.wait()
    log.info("draining", grace_s=DRAIN_S)
    ready.wait_for("stop", "draining")
    serving.drain()
    health.shutdown()
    log.info("stopped")
