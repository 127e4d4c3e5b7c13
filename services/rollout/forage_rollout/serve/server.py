"""The main process: gRPC, HTTP, health and metrics in front of the Serve application, from start to clean shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import uvicorn
from prometheus_client import REGISTRY

from forage_queue.streams.client import StreamClient
from forage_rollout.checks import list_checks
from forage_rollout.deployments.cluster import LOST_AFTER_S, Cluster, open_cluster
from forage_rollout.deployments.readiness import watch_services
from forage_rollout.engine.endpoint_engine import check_endpoint
from forage_rollout.loop.tokens import FileTokenizer
from forage_rollout.serve.backend import ServeBackend, ServiceState
from forage_rollout.serve.grpc_api import RolloutApi, make_server
from forage_rollout.serve.http_api import WIRE, make_app
from forage_runtime.addresses import listen
from forage_runtime.errors import UnavailableError
from forage_runtime.problems import require_all
from forage_runtime.security.health_gate import HealthGate
from forage_runtime.security.http.server import make_protocol
from forage_runtime.security.token_file import TokenFile
from forage_runtime.settings import Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.grpc_probes import GrpcProbes
from forage_runtime.telemetry.health import Health, serve_health
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import list_waits, waiting
from forage_sandbox.support import list_notes

log = get_logger()
_STOP_TIMEOUT_S = 6.0
_REFRESH_INTERVAL_S = 1.0
_REFRESH_TIMEOUT_S = 30.0
_REDIS_TIMEOUT_S = 2.0
_WATCH_INTERVAL_S = 0.5


def main(settings: Settings) -> None:
    """Run the service until SIGTERM or SIGINT.

    Raises:
        UserError: the model folder is incomplete, a limit does not fit, an environment cannot be loaded, vLLM has no
            such argument or does not sample so, a file of tokens or keys is wrong, or a port is in use.
    """
    require_all(list_checks(settings))
    asyncio.run(check_endpoint(settings))
    token = None if settings.rollout.auth_token_file is None else TokenFile(settings.rollout.auth_token_file)
    asyncio.run(_serve(settings, token, FileTokenizer(settings.model.path).vocabulary_size))


class _HttpServer(uvicorn.Server):  # type: ignore[misc]
    """Leaves signals to `_serve`, which stops more than HTTP."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(settings: Settings, token: TokenFile | None, vocabulary: int) -> None:
    health = Health()
    for name in ("redis", "retriever", "reward"):
        health.wait_for(name, "not probed yet")
    own = {source: route for source, route in settings.rollout.environments.items() if route.is_own}
    for topic, note in list_notes(own, settings.security.user_code).items():
        health.add_lasting_note(topic, note)
    health.wait_for("engine", "it is starting")
    health.wait_for("policy", "no policy is served yet")
    health.mark_started()
    cluster = open_cluster(settings)
    backend, state = ServeBackend(cluster), ServiceState(health)
    REGISTRY.register(state.collector)
    rollout = settings.rollout
    protocol, gate = make_protocol(settings.tls, WIRE), HealthGate(settings.tls, "rollout")
    servicer = RolloutApi(backend, state, vocabulary, settings.security.audit_file, token is not None)
    grpc_server, probes = make_server(rollout.grpc_address, servicer, token, settings.tls)
    listening = listen(rollout.http_address)
    http_server = _HttpServer(
        uvicorn.Config(
            make_app(backend, state, settings, token, needs_certificate=settings.tls.require_client_cert),
            http=protocol,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=max(1, round(rollout.drain_timeout_s)),
        )
    )
    waits = lambda: list_waits("main process") + state.waits  # noqa: E731 - one expression, used once
    endpoint = serve_health(rollout.health_address, health, waits=waits, gate=gate)
    await grpc_server.start()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    http = asyncio.create_task(http_server.serve([listening]))
    tasks = [
        http,
        asyncio.create_task(watch_services(settings, health)),
        asyncio.create_task(_run_application(settings, cluster, backend, state)),
        asyncio.create_task(report_health(health, probes)),
        asyncio.create_task(_watch_ray(cluster)),
        asyncio.create_task(stop.wait()),  # wait: the life of the service
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # wait: the life of the service
        if failure := await _find_failure(cluster):
            # Ends at once, for the supervisor to start anew: draining and Ray's own end would wait for what is gone.
            health.wait_for("ray", failure)
            await asyncio.to_thread(cluster.abandon)
            log.error("ray_failed", detail=failure)  # last, where a supervisor looks for the reason
            sys.stderr.flush()
            os._exit(1)
        for task in done:
            task.result()
    finally:
        log.info("draining", seconds=rollout.drain_timeout_s)
        health.wait_for("stop", "draining")
        await probes.begin_shutdown()
        was_running, state.running = state.running, False
        http_server.should_exit = True
        drained = [grpc_server.stop(rollout.drain_timeout_s), http]
        if was_running:
            drained.append(asyncio.to_thread(cluster.begin_drain))
        await asyncio.gather(*drained, return_exceptions=True)
        for task in tasks:
            task.cancel()
        endpoint.shutdown()
        await asyncio.to_thread(cluster.stop, _STOP_TIMEOUT_S)
        log.info("stopped")
    # Exits without waiting for threads: one may be blocked in a start of Ray that was interrupted.
    tracing.stop()
    sys.stderr.flush()
    os._exit(0)


async def report_health(health: Health, probes: GrpcProbes) -> None:
    """Have gRPC's health checks answer as /readyz does."""
    while True:
        await probes.set_serving(not health.waiting)
        await asyncio.sleep(_WATCH_INTERVAL_S)  # wait: pause between two looks


async def _watch_ray(cluster: Cluster) -> None:
    """Return once Ray has failed and does not come back."""
    while not await _find_failure(cluster):
        await asyncio.sleep(_WATCH_INTERVAL_S)  # wait: pause between two looks


async def _find_failure(cluster: Cluster) -> str:
    try:
        async with asyncio.timeout(LOST_AFTER_S):
            return await asyncio.to_thread(cluster.find_failure)
    except TimeoutError:
        return f"Ray has not answered for {LOST_AFTER_S:g} s"


async def _run_application(settings: Settings, cluster: Cluster, backend: ServeBackend, state: ServiceState) -> None:
    """Start the application, then keep its state current."""
    why = "Ray and Serve give up by themselves"
    with waiting("the start of all deployments", on="ray", limit_s=None, why_unlimited=why):
        await asyncio.to_thread(cluster.start)
    state.running = True
    streams = StreamClient(settings.redis, settings.run.id, _REDIS_TIMEOUT_S)
    health = state.health
    while True:
        with contextlib.suppress(UnavailableError):  # `watch_services` reports it
            state.announced = await asyncio.to_thread(streams.read_policy)
            state.queues = {
                "prompts_on_stream": await asyncio.to_thread(streams.count_backlog, streams.prompts),
                "trajectories_on_stream": await asyncio.to_thread(streams.count_backlog, streams.trajectories),
            }
        try:
            with waiting("answers of the replicas", on="ray", limit_s=_REFRESH_TIMEOUT_S):
                async with asyncio.timeout(_REFRESH_TIMEOUT_S):
                    await state.refresh(backend)
        except (UnavailableError, TimeoutError) as error:
            health.wait_for("engine", f"a part of the service does not answer ({type(error).__name__})")
            log.warning("snapshot_failed", detail=str(error))
        else:
            health.mark_ready("engine")
            if state.serving is not None:
                health.mark_ready("policy")
            else:
                health.wait_for("policy", "the trainer has published none yet, or it could not be loaded")
        await asyncio.sleep(_REFRESH_INTERVAL_S)  # wait: pause between two snapshots
