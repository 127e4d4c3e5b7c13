"""Deployments that work on prompts: the `Dispatcher` claims them and writes their groups, the `Agent` runs them.

They reach each other through Serve, and engines on connections of the agents' own."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.rollout_pb2 import RunStreamResponse
from forage_proto.v1.trajectory_pb2 import Prompt, Replica, TrajectoryGroup
from forage_queue.rollout import backpressure, concurrency
from forage_queue.rollout.dispatcher import Dispatcher
from forage_queue.streams.client import StreamClient
from forage_queue.streams.history import open_history
from forage_queue.streams.payloads import Payloads
from forage_rollout.agent import Agent
from forage_rollout.deployments.autoscaling import ONGOING
from forage_rollout.deployments.engine_links import open_pool
from forage_rollout.deployments.readiness import wait_for_services
from forage_rollout.deployments.replica import REDIS_TIMEOUT_S, CheckPace, broadcast, build_process_name, start_process
from forage_rollout.links.pool import EnginePool
from forage_rollout.loop.tokens import FileTokenizer
from forage_rollout.metrics import Counts, Snapshot, VersionTokens, read_call_counts, read_span_counts, to_counts
from forage_rollout.sessions.requests import HttpReply
from forage_rollout.sessions.table import SessionTable
from forage_rollout.worker_names import WorkerName
from forage_runtime.background import supervise
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.clients.reward import RewardClient
from forage_runtime.errors import UnavailableError
from forage_runtime.settings import Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.waits import list_waits
from forage_trajectory.codec import leave_out_texts, pack_group

_GARBAGE_AFTER = 50_000
"""New objects, less those that were freed, before Python looks for garbage among them."""


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


class AgentDeployment:
    """Runs prompts that arrive as bytes with one `Agent`."""

    def __init__(self, settings_json: str, engine: DeploymentHandle) -> None:
        start_process()
        self._settings = Settings.model_validate_json(settings_json)
        tracing.start(self._settings, "rollout")
        self._replica = build_process_name()
        self._check_pace = CheckPace()
        self._engine = engine
        self._agent: Agent | None = None
        self._codec = FileTokenizer(self._settings.model.path)
        self._engines: EnginePool | None = None
        self._creating = asyncio.Lock()
        self._version_tokens = VersionTokens()
        self._sessions = SessionTable(serve.get_replica_context().replica_id.unique_id)

    async def run_group(self, prompt: bytes) -> bytes:
        """Run a serialized `Prompt`; returns its serialized `TrajectoryGroup`."""
        return (await self._run_group(prompt)).SerializeToString()

    async def run_group_packed(self, prompt: bytes) -> bytes:
        """Run a serialized `Prompt`; returns its serialized `PackedGroup`, without texts that its tokens imply."""
        group = await self._run_group(prompt)
        return await asyncio.to_thread(self._pack, group)

    async def _run_group(self, prompt: bytes) -> TrajectoryGroup:
        asked = Prompt.FromString(prompt)
        agent = await self._get_agent(asked)
        group = await agent.run_group(asked)
        self._version_tokens.add_group(group)
        return group

    def _pack(self, group: TrajectoryGroup) -> bytes:
        for trajectory in group.trajectories:
            leave_out_texts(trajectory, self._codec.decode)
        return pack_group(group).SerializeToString()

    async def stream_group(self, prompt: bytes) -> AsyncGenerator[bytes, None]:
        """Run a serialized `Prompt`; yields each serialized `RunStreamResponse` at once, the group last."""
        asked = Prompt.FromString(prompt)
        agent = await self._get_agent(asked)
        events: asyncio.Queue[RunStreamResponse | None] = asyncio.Queue()
        running = asyncio.create_task(agent.run_group(asked, events.put_nowait))
        running.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event.SerializeToString()
            group = await running
            self._version_tokens.add_group(group)
            yield RunStreamResponse(group=group).SerializeToString()
        finally:
            running.cancel()

    async def count_waiting_sessions(self) -> tuple[str, int]:
        """The name of this replica for the router, and how many of its sessions wait for a worker."""
        return self._sessions.replica, self._sessions.waiting

    async def take_session(self, replica: str) -> dict[str, Any] | None:
        """See `SessionTable.take`; `replica` is for the router, which sends it here."""
        return self._sessions.take()

    async def answer_session(self, id: str, key: str, verb: str, body: bytes, replica: str) -> HttpReply:
        """See `SessionTable.answer`; `replica` is for the router: if that one has gone, another says so."""
        return await self._sessions.answer(id, key, verb, body)

    async def stop_tracing(self) -> None:
        """Export the spans that are left: Ray ends a replica without a chance to do it then."""
        await asyncio.to_thread(tracing.stop)

    async def take_snapshot(self) -> Snapshot:
        counts = read_call_counts() | read_span_counts() | self._check_pace.read_counts("Agent")
        if self._agent is not None and self._engines is not None:
            self._agent.counts.sessions_waiting = self._sessions.waiting
            counts |= to_counts(self._agent.counts) | to_counts(self._engines.counts)
        return Snapshot(
            self._replica, counts, version_tokens=dict(self._version_tokens.counts), waits=list_waits("agent")
        )

    async def check_health(self) -> None:
        """Last for a while: Serve calls it again and again."""
        await self._check_pace.last()

    async def _get_agent(self, asked: Prompt) -> Agent:
        """The agent, created with the first prompt: only a running engine knows its end-of-turn text.

        Raises:
            UnavailableError: no engine has answered within the prompt's time limit.
        """
        limit_s = min(one for one in (self._settings.rollout.trajectory_timeout_s, asked.timeout_s) if one > 0)
        try:
            async with asyncio.timeout(limit_s):
                return await self._create_agent()
        except TimeoutError:
            raise UnavailableError(f"no engine has answered within {limit_s:g} s: is one running?") from None

    async def _create_agent(self) -> Agent:
        async with self._creating:
            if self._agent is None:
                settings = self._settings
                releases = settings.rollout.weights.update == "drain"
                self._engines, end_of_turn = await open_pool(self._engine, releases)
                self._agent = Agent(
                    settings,
                    self._engines,
                    RetrieverClient.from_settings(settings, settings.rollout.retrieve_timeout_s),
                    RewardClient(settings),
                    self._codec,
                    end_of_turn,
                    self._replica,
                    self._sessions,
                )
                _rarely_look_for_garbage()
        return self._agent


def _rarely_look_for_garbage() -> None:
    """Thousands of trajectories in progress are no garbage, and Python would look through them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_AFTER)
