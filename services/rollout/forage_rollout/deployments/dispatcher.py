"""The `Dispatcher` deployment: a `Dispatcher` between the streams and the agents in each replica."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from ray.serve.handle import DeploymentHandle

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import Prompt, Replica
from forage_queue.rollout import backpressure, concurrency
from forage_queue.rollout.dispatcher import Dispatcher
from forage_queue.streams.client import StreamClient
from forage_queue.streams.history import open_history
from forage_queue.streams.payloads import Payloads
from forage_rollout.deployments.autoscaling import ONGOING
from forage_rollout.deployments.readiness import wait_for_services
from forage_rollout.deployments.replica import REDIS_TIMEOUT_S, CheckPace, broadcast, build_process_name, start_process
from forage_rollout.metrics import Counts, Snapshot, read_span_counts, to_counts
from forage_rollout.worker_names import WorkerName
from forage_runtime.background import supervise
from forage_runtime.settings import Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.waits import list_waits


class DispatcherDeployment:
    """Gives the dispatcher agents and engines to call through Serve."""

    def __init__(self, settings_json: str, agent: DeploymentHandle, engine: DeploymentHandle) -> None:
        start_process()
        settings = Settings.model_validate_json(settings_json)
        tracing.start(settings, "rollout")
        self._longest_s = settings.rollout.longest_group_s
        self._name = WorkerName(settings)
        self._replica = build_process_name()
        self._check_pace = CheckPace()

        async def run_group(prompt: Prompt) -> PackedGroup:
            return PackedGroup.FromString(await agent.run_group_packed.remote(prompt.SerializeToString()))

        async def ask_engines() -> dict[str, Replica]:
            return {name: Replica.FromString(word) for name, word in await broadcast(engine, "describe_replica")}

        async def ask_counts() -> Mapping[str, Counts]:
            snapshots: list[Snapshot] = await broadcast(engine, "take_snapshot")
            return {one.replica: one.counts for one in snapshots}

        history = open_history(settings.run, "dispatcher")
        streams = StreamClient(settings.redis, settings.run.id, REDIS_TIMEOUT_S, history, Payloads(settings))
        self._dispatcher = Dispatcher(
            settings,
            streams,
            self._name.text,
            run_group,
            ask_engines,
            partial(wait_for_services, settings),
            None if settings.rollout.engine.endpoint else ask_counts,
        )
        self._task = supervise(self._dispatcher.run(), "dispatcher")

    async def drain(self, timeout_s: float) -> int:
        """Claim no more prompts and let running groups end; returns how many did not within the time."""
        left = await self._dispatcher.drain(timeout_s)
        await asyncio.to_thread(tracing.stop)
        return left

    async def __del__(self) -> None:
        """Serve awaits it before it removes this replica: the groups in flight end, and other dispatchers claim on."""
        await self.drain(self._longest_s)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report what Serve cannot count; Serve calls this method by its name."""
        return {ONGOING: float(self._dispatcher.counts.groups_in_flight)}

    async def take_snapshot(self) -> Snapshot:
        held, limit = self._dispatcher.hold, self._dispatcher.limit
        counts = to_counts(self._dispatcher.counts) | read_span_counts() | self._check_pace.read_counts("Dispatcher")
        for reason in backpressure.REASONS:
            counts["backpressure", reason] = float(held is not None and held.reason == reason)
        for cause in concurrency.REASONS:
            counts["groups_limit_reason", cause] = float(limit.reason == cause)
        counts["groups_limit",] = limit.groups
        counts["groups_limit_raised",], counts["groups_limit_lowered",] = limit.raised, limit.lowered
        return Snapshot(self._replica, counts, notes=self._dispatcher.notes, waits=list_waits("dispatcher"))

    async def check_health(self) -> None:
        """Raise when the dispatcher has ended; Serve then starts a new replica."""
        await self._check_pace.last(self._task.done)
        if self._task.done():
            raise RuntimeError("the dispatcher has ended")
