"""The `Dispatcher` deployment: one `Dispatcher` between the streams and the agents."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

from ray.serve.handle import DeploymentHandle

from forage_common.settings import Settings
from forage_common.streams.client import StreamClient
from forage_common.streams.history import open_history
from forage_common.streams.payloads import Payloads
from forage_common.telemetry import tracing
from forage_common.telemetry.waits import list_waits
from forage_common.v1.packed_pb2 import PackedGroup
from forage_common.v1.trajectory_pb2 import Prompt, Replica
from forage_rollout.background import supervise
from forage_rollout.backpressure import REASONS
from forage_rollout.deployments.readiness import wait_for_services
from forage_rollout.deployments.replica import REDIS_TIMEOUT_S, CheckPace, broadcast, build_process_name, start_process
from forage_rollout.dispatcher import Dispatcher
from forage_rollout.metrics import Snapshot, read_span_counts, to_counts


class DispatcherDeployment:
    """Gives the dispatcher agents and engines to call through Serve."""

    def __init__(self, settings_json: str, agent: DeploymentHandle, engine: DeploymentHandle) -> None:
        start_process()
        settings = Settings.model_validate_json(settings_json)
        tracing.start(settings, "rollout")
        self._agents = agent
        self._replica = build_process_name()
        self._check_pace = CheckPace()

        async def run_group(prompt: Prompt) -> PackedGroup:
            return PackedGroup.FromString(await agent.pack_group.remote(prompt.SerializeToString()))

        async def ask_engines() -> dict[str, Replica]:
            return {name: Replica.FromString(word) for name, word in await broadcast(engine, "describe_replica")}

        history = open_history(settings.run, "dispatcher")
        streams = StreamClient(settings.redis, settings.run.id, REDIS_TIMEOUT_S, history, Payloads(settings))
        self._dispatcher = Dispatcher(
            settings,
            streams,
            _build_consumer(settings),
            run_group,
            ask_engines,
            partial(wait_for_services, settings),
        )
        self._task = supervise(self._dispatcher.run(), "dispatcher")

    async def drain(self, timeout_s: float) -> int:
        """Claim no more prompts and let running groups end; returns how many did not within the time."""
        left = await self._dispatcher.drain(timeout_s)
        if tracing.is_enabled():
            await asyncio.gather(broadcast(self._agents, "stop_tracing"), asyncio.to_thread(tracing.stop))
        return left

    async def take_snapshot(self) -> Snapshot:
        held = self._dispatcher.hold
        holds = {("backpressure", reason): float(held is not None and held.reason == reason) for reason in REASONS}
        counts = to_counts(self._dispatcher.counts) | read_span_counts() | holds
        return Snapshot(self._replica, counts, notes=self._dispatcher.notes, waits=list_waits("dispatcher"))

    async def check_health(self) -> None:
        """Raise when the dispatcher has ended; Serve then starts a new replica."""
        await self._check_pace.last(self._task.done)
        if self._task.done():
            raise RuntimeError("the dispatcher has ended")


def _build_consumer(settings: Settings) -> str:
    """This service's name on the stream, which stays the same when the dispatcher or the whole service is started anew.

    Two services of one run differ in host or address. Where they do not, or a dispatcher comes back on another node,
    work is only done twice, or later.
    """
    return f"rollout-{socket.gethostname()}-{settings.rollout.grpc_address}"
