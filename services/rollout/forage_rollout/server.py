"""The main process: gRPC, health and metrics in front of the Serve application, from start to clean end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import grpc
from prometheus_client import REGISTRY

from forage_common.model_folder import check_model_folder
from forage_common.settings import Settings
from forage_common.telemetry import Health, get_logger, port_in_use, serve_health
from forage_common.v1.rollout_pb2 import GetStatusRequest, GetStatusResponse, RunRequest, RunResponse
from forage_common.v1.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from forage_common.v1.trajectory_pb2 import Policy, TrajectoryGroup
from forage_rollout.cluster import LocalCluster
from forage_rollout.loop import Limits
from forage_rollout.metrics import SnapshotCollector
from forage_rollout.readiness import watch
from forage_rollout.tokens import FileTokenizer

log = get_logger()
_MESSAGE_BYTES = 64 * 2**20
_STOP_S = 6.0
_SNAPSHOT_S = 1.0


class RolloutService(RolloutServicer):
    """`forage.v1.Rollout`: one prompt off the streams, through the same loop."""

    def __init__(self, health: Health, shown: SnapshotCollector) -> None:
        self._health = health
        self._shown = shown
        self.serving = Policy()
        self.running = False

    async def Run(self, request: RunRequest, context: Any) -> RunResponse:  # the name is gRPC's
        if not self.running:
            waiting = "; ".join(f"{k}: {v}" for k, v in self._health.waiting.items())
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the rollout service is starting ({waiting})")
        if not request.prompt.messages or request.prompt.samples < 1:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a prompt needs messages and at least one sample")
        agent = _handle("Agent")
        group = TrajectoryGroup.FromString(await agent.run.remote(request.prompt.SerializeToString()))
        return RunResponse(group=group)

    async def GetStatus(self, request: GetStatusRequest, context: Any) -> GetStatusResponse:  # the name is gRPC's
        return GetStatusResponse(
            serving=self.serving,
            groups_in_flight=self._shown.get("groups_in_flight"),
            groups_done=self._shown.get("groups_done"),
            tokens_generated=self._shown.get("generated_tokens"),
        )


def main(settings: Settings) -> None:
    """Run the service until SIGTERM or SIGINT.

    Raises:
        UserError: the model folder is not one, a limit does not fit, or a port is in use.
    """
    check_model_folder(settings.model.path)
    Limits.of(settings.rollout, FileTokenizer(settings.model.path))
    asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    health = Health()
    for name in ("redis", "retriever", "reward"):
        health.wait_for(name, "not asked yet")
    health.wait_for("engine", "vLLM is starting")
    health.wait_for("policy", "no policy is served yet")
    health.ready()
    shown = SnapshotCollector()
    REGISTRY.register(shown)
    service = RolloutService(health, shown)
    server = _grpc_server(settings.rollout.grpc_address, service)
    endpoint = serve_health(settings.rollout.health_address, health)
    await server.start()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    cluster = LocalCluster(settings)
    tasks = [
        asyncio.create_task(watch(settings, health)),
        asyncio.create_task(_work(cluster, service, health, shown)),
        asyncio.create_task(stop.wait()),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        log.info("stopping")
        for task in tasks:
            task.cancel()
        await server.stop(grace=0.5)
        endpoint.shutdown()
        await asyncio.to_thread(cluster.stop, _STOP_S)
        log.info("stopped")
    # A thread may still sit in a start that was interrupted; nothing of it is left to wait for.
    sys.stderr.flush()
    os._exit(0)


async def _work(cluster: LocalCluster, service: RolloutService, health: Health, shown: SnapshotCollector) -> None:
    """Start the application, then keep what is shown of it up to date."""
    await asyncio.to_thread(cluster.start)
    service.running = True
    engine, agent, dispatcher = _handle("Engine"), _handle("Agent"), _handle("Dispatcher")
    while True:
        try:
            async with asyncio.timeout(30):
                (served, counts), of_agent, of_dispatcher = await asyncio.gather(
                    engine.snapshot.remote(), agent.snapshot.remote(), dispatcher.snapshot.remote()
                )
        except Exception as error:  # noqa: BLE001 - protects the endpoint from a replica that is starting again
            health.wait_for("engine", f"a part of the service does not answer ({type(error).__name__})")
            log.warning("snapshot_failed", detail=str(error))
        else:
            health.have("engine")
            service.serving = Policy.FromString(served)
            if served:
                health.have("policy")
            else:
                health.wait_for("policy", "the trainer has published none yet, or it could not be loaded")
            shown.update({**counts, **of_agent, **of_dispatcher}, service.serving)
        await asyncio.sleep(_SNAPSHOT_S)


def _handle(deployment: str) -> Any:
    from ray import serve

    from forage_rollout.deployments import APPLICATION

    return serve.get_deployment_handle(deployment, APPLICATION)


def _grpc_server(address: str, service: RolloutService) -> grpc.aio.Server:
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MESSAGE_BYTES),
        ]
    )
    add_RolloutServicer_to_server(service, server)
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise port_in_use(address, OSError(str(error))) from None
    if bound == 0:
        raise port_in_use(address, OSError("address already in use"))
    return server
