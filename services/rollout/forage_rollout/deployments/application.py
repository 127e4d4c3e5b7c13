"""The three Ray Serve deployments: thin shells that carry bytes and plain data between the real parts."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import operator
import os
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, NoReturn, cast

from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from ray.serve.schema import LoggingConfig

from forage_common.clients.retriever import RetrieverClient
from forage_common.clients.reward import RewardClient
from forage_common.settings import ReplicaSettings, Settings, WeightUpdate, load_settings
from forage_common.streams.client import StreamClient
from forage_common.telemetry import tracing
from forage_common.telemetry.logs import configure_logs, get_logger
from forage_common.v1.rollout_pb2 import RunStreamResponse
from forage_common.v1.trajectory_pb2 import Policy, Prompt, TrajectoryGroup
from forage_rollout.agent import Agent
from forage_rollout.deployments.follower import catch_up, follow_policy
from forage_rollout.deployments.readiness import wait_for_services
from forage_rollout.deployments.relay import join
from forage_rollout.deployments.routing import OUT_OF_SERVICE, AffinityRouter
from forage_rollout.dispatcher import Dispatcher, supervise
from forage_rollout.engine.endpoint_engine import EndpointEngine
from forage_rollout.engine.openai import Head, OpenAI
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import Generation, Request
from forage_rollout.loop.tokens import FileTokenizer
from forage_rollout.metrics import VersionTokens, call_counts, span_counts
from forage_rollout.serve.backend import oldest
from forage_rollout.weights.policy import NotServingError

log = get_logger()
# Bounded so that one call never sits in the retry loop of a Redis that is away for much longer than a health check.
REDIS_PATIENCE_S = 4.0
_MANY = 4096
_CPUS = 0.1  # of Ray's book-keeping: replicas share what the machine has
_HEALTH_PERIOD_S = 2.0
_ROUTING_PERIOD_S = 1.0
_HANG_SLACK_S = 30.0  # a probe waits for `engine.hang_timeout_s` and says what is wrong; Serve must not be faster
_OUT_OF_SERVICE_S = 60.0
_NOT_SERVING_RETRY_S = 0.5
Snapshot = tuple[str, bytes, dict[str, float]]
"""(name of the process, policy served as bytes or empty, counts)"""

_fields = operator.attrgetter(*(field.name for field in dataclasses.fields(Request)))


class EngineDeployment:
    """One model replica: vLLM, and the task that follows the published policy."""

    async def __init__(self, settings_json: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """Ready once the announced policy is served, so that a new replica never samples under an older one."""
        _join_logs()
        settings = Settings.model_validate_json(settings_json)
        self._replica = _process_name()
        self._refused_since: float | None = None
        self._engine: VllmEngine | EndpointEngine
        self._openai: OpenAI | EndpointEngine
        self._follower: asyncio.Task[None] | None = None
        if settings.rollout.engine.endpoint:
            self._engine = self._openai = EndpointEngine(settings)
            await self._engine.connect()
            return
        self._engine = VllmEngine(settings, replica=serve.get_replica_context().rank.rank)
        self._openai = OpenAI(self._engine.llm, settings)
        streams = StreamClient(settings.redis, settings.run.id, REDIS_PATIENCE_S)
        await catch_up(streams, self._engine)
        self._follower = supervise(follow_policy(streams, self._engine, self._replica), "follow_policy")

    async def describe(self) -> str:
        """The end-of-turn text."""
        return self._engine.end_of_turn

    async def render(self, messages: list[dict[str, str]]) -> list[int]:
        return await self._engine.render(messages)

    async def generate(self, fields: tuple[Any, ...]) -> tuple[Any, ...]:
        """A `Request`'s fields in, a `Generation`'s fields out."""
        done = await self._engine.generate(Request(*fields))
        return done.token_ids, done.logprobs, done.hit_length, done.versions

    async def release(self, affinity: str) -> None:
        await self._engine.release(affinity)

    async def pause(self, drain: bool) -> None:
        await self._engine.pause(drain)

    async def resume(self) -> None:
        await self._engine.resume()

    async def update(self, policy: bytes) -> float:
        """Serve a policy, given serialised; the seconds that generation stood still."""
        return await self._engine.load(Policy.FromString(policy))

    async def wait_for_policy(self, version: int, epoch: int, timeout_s: float) -> bytes | None:
        """The policy that is served, serialised; empty when there is none, None from a replica out of service."""
        served = await self._engine.wait_for(version, epoch, timeout_s)
        if self._engine.out_of_service:
            return None
        return b"" if served is None else served.SerializeToString()

    async def openai(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[Head | bytes, None]:
        """(status, headers), then the parts of the body."""
        async for part in self._openai.handle(method, path, headers, body):
            yield part

    async def snapshot(self) -> Snapshot:
        served = self._engine.serving
        policy = b"" if served is None else served.SerializeToString()
        return self._replica, policy, dataclasses.asdict(self._engine.counts) | call_counts()

    async def record_routing_stats(self) -> dict[str, str]:
        """What the router knows of this replica; Serve asks for it."""
        return {OUT_OF_SERVICE: self._engine.out_of_service}

    async def check_health(self) -> None:
        """Ends the process when the engine is dead, hangs or has been out of service for long; Serve starts another."""
        try:
            await self._engine.check_health()
            await self._engine.probe()
            self._check_service()
        except Exception as error:  # noqa: BLE001 - whatever it is, this engine cannot be trusted
            self._leave(error)
        if self._follower is not None and self._follower.done():
            raise RuntimeError("the task that follows the policy has ended")

    def _check_service(self) -> None:
        if not self._engine.out_of_service:
            self._refused_since = None
            return
        self._refused_since = self._refused_since or time.monotonic()
        if time.monotonic() - self._refused_since > _OUT_OF_SERVICE_S:
            raise NotServingError(self._engine.out_of_service)

    def _leave(self, error: Exception) -> NoReturn:
        """At once, so that running requests fail and run elsewhere, rather than after Serve has counted failures."""
        log.error("engine_given_up", detail=f"{type(error).__name__}: {error}")
        try:
            self._engine.kill()
        finally:
            os._exit(1)

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.shutdown()


class RemoteEngine:
    """`Engine` through a Serve handle.

    Args:
        releases: engines want to know when nothing more of an affinity will come.
    """

    def __init__(self, handle: DeploymentHandle, releases: bool) -> None:
        # Unary gRPC between the replicas: half the CPU time of Serve's default, a stream of object references.
        self._handle = handle.options(_by_reference=False)
        self._releases = releases

    async def render(self, messages: list[dict[str, str]]) -> list[int]:
        ids: list[int] = await _call(self._handle.render, messages)
        return ids

    async def generate(self, request: Request) -> Generation:
        """Waits where a replica is out of service: another takes over, or it comes back; the caller has a deadline."""
        handle = self._handle.options(method_name="generate", session_id=request.affinity)
        fields = _fields(request)
        while True:
            answer = _call(handle, fields)
            try:
                return Generation(*await answer)
            except asyncio.CancelledError:
                answer.cancel()
                raise
            except NotServingError:
                await asyncio.sleep(_NOT_SERVING_RETRY_S)

    async def release(self, affinity: str) -> None:
        if self._releases:
            await _call(self._handle.options(method_name="release", session_id=affinity), affinity)


def _call(handle: DeploymentHandle, *arguments: Any) -> DeploymentResponse:
    """A call under an id of its own.

    In the context of a request all calls go by its id, and Serve's router, which tells them apart by id, loses all but
    one of those that wait at the same time.
    """
    return contextvars.Context().run(handle.remote, *arguments)


class AgentDeployment:
    """Runs the loops of many groups on one event loop."""

    def __init__(self, settings_json: str, engine: DeploymentHandle) -> None:
        _join_logs()
        self._settings = Settings.model_validate_json(settings_json)
        tracing.start(self._settings, "rollout")
        self._replica = _process_name()
        self._handle = engine
        self._agent: Agent | None = None
        self._starting = asyncio.Lock()
        self._versions = VersionTokens()

    async def run(self, prompt: bytes) -> bytes:
        """A `Prompt` in, its `TrajectoryGroup` out, both serialised."""
        agent = await self._ready()
        group = await agent.run(Prompt.FromString(prompt))
        self._versions.add(group)
        return group.SerializeToString()

    async def run_stream(self, prompt: bytes) -> AsyncGenerator[bytes, None]:
        """A `Prompt` in, every `RunStreamResponse` as it happens, the one with the group last."""
        agent = await self._ready()
        events: asyncio.Queue[RunStreamResponse | None] = asyncio.Queue()
        running = asyncio.create_task(agent.run(Prompt.FromString(prompt), events.put_nowait))
        running.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event.SerializeToString()
            group = await running
            self._versions.add(group)
            yield RunStreamResponse(group=group).SerializeToString()
        finally:
            running.cancel()

    async def stop_tracing(self) -> None:
        """The end is near, and Ray does not announce it."""
        await asyncio.to_thread(tracing.stop)

    async def snapshot(self) -> Snapshot:
        counts = {} if self._agent is None else dataclasses.asdict(self._agent.counts)
        return self._replica, b"", counts | call_counts() | span_counts() | self._versions.counts

    async def _ready(self) -> Agent:
        async with self._starting:
            if self._agent is None:
                settings = self._settings
                self._agent = Agent(
                    settings,
                    RemoteEngine(self._handle, settings.rollout.weights.update == WeightUpdate.DRAIN),
                    RetrieverClient(settings.retriever.http_address, settings.rollout.retrieve_timeout_s),
                    RewardClient(settings),
                    FileTokenizer(settings.model.path),
                    await _call(self._handle.describe),
                    self._replica,
                )
        return self._agent


class DispatcherDeployment:
    """Between the streams and the agents."""

    def __init__(self, settings_json: str, agent: DeploymentHandle, engine: DeploymentHandle) -> None:
        _join_logs()
        settings = Settings.model_validate_json(settings_json)
        tracing.start(settings, "rollout")
        self._agents = agent
        self._replica = _process_name()

        async def run_group(prompt: Prompt) -> TrajectoryGroup:
            return TrajectoryGroup.FromString(await agent.run.remote(prompt.SerializeToString()))

        async def wait_for_policy(version: int, epoch: int, timeout_s: float) -> Policy | None:
            found = await broadcast(engine, "wait_for_policy", version, epoch, timeout_s)
            return oldest([Policy.FromString(served) if served else None for served in found if served is not None])

        streams = StreamClient(settings.redis, settings.run.id, REDIS_PATIENCE_S)
        self._dispatcher = Dispatcher(
            settings, streams, run_group, wait_for_policy, partial(wait_for_services, settings)
        )
        self._task = supervise(self._dispatcher.run(), "dispatcher")

    async def drain(self, timeout_s: float) -> int:
        """Take no more prompts and let running groups end; how many did not within the time."""
        left = await self._dispatcher.drain(timeout_s)
        if tracing.is_enabled():
            await asyncio.gather(broadcast(self._agents, "stop_tracing"), asyncio.to_thread(tracing.stop))
        return left

    async def snapshot(self) -> Snapshot:
        return self._replica, b"", dataclasses.asdict(self._dispatcher.counts) | span_counts()

    async def check_health(self) -> None:
        """Serve starts a new replica when this raises."""
        if self._task.done():
            raise RuntimeError("the dispatcher has ended")


async def broadcast(handle: DeploymentHandle, method: str, *arguments: Any) -> list[Any]:
    """What the method returns on each replica that runs; a replica that goes away meanwhile is left out.

    Raises:
        Exception: the method itself raised, on whichever replica.
    """
    try:
        found = await handle.broadcast(method, *arguments).results_async(return_exceptions=True)
    except DeploymentUnavailableError:
        return []
    for result in found:
        if isinstance(result, BaseException) and not isinstance(result, RayActorError):
            raise result
    return [result for result in found if not isinstance(result, RayActorError)]


def application_name(settings: Settings) -> str:
    """Of one run among those that share a Ray cluster."""
    return f"forage-rollout-{settings.run.id}"


def application(settings: Settings, gpus: int) -> Application:
    """The whole service as one Serve application, entered at the dispatcher.

    Args:
        gpus: how many this Ray has; with none the engine runs on CPU.
    """
    text, rollout = settings.model_dump_json(), settings.rollout
    # While a group runs, its replica is not ended; a group ends within its time limits.
    patience_s = rollout.trajectory_timeout_s + rollout.score_timeout_s
    engine = engine_deployment(EngineDeployment, settings, rollout.engine_replicas, gpus).bind(text)
    agent = _deployment("Agent", AgentDeployment, rollout.agent_replicas, graceful_shutdown_timeout_s=patience_s)
    dispatcher = _deployment("Dispatcher", DispatcherDeployment, ReplicaSettings(), graceful_shutdown_timeout_s=1.0)
    agents = agent.bind(text, engine)
    return cast(Application, dispatcher.bind(text, agents, engine))


def engine_deployment(of: type, settings: Settings, replicas: ReplicaSettings, gpus: int) -> Any:
    """Engine replicas with the router and the limits that they need, not bound yet."""
    rollout = settings.rollout
    return _deployment(
        "Engine",
        of,
        replicas,
        gpus=0 if rollout.engine.endpoint else min(gpus, rollout.engine.tensor_parallel_size),
        graceful_shutdown_timeout_s=rollout.trajectory_timeout_s,
        health_check_timeout_s=rollout.engine.hang_timeout_s + _HANG_SLACK_S,
        request_router_config=RequestRouterConfig(
            request_router_class=AffinityRouter, request_routing_stats_period_s=_ROUTING_PERIOD_S
        ),
    )


def build(arguments: dict[str, str]) -> Application:
    """The application for `serve deploy` and KubeRay's RayService, which run it inside the cluster.

    Args:
        arguments: settings by their dotted names, such as `{"run.id": "one", "redis.url": "redis://…"}`.

    Raises:
        SettingsError: a setting is unknown or wrong.
    """
    import ray

    settings = load_settings(overrides=[f"{name}={value}" for name, value in arguments.items()])
    return application(settings, int(ray.cluster_resources().get("GPU", 0)))


def cpus(settings: Settings) -> float:
    """What the application asks of Ray's book-keeping at its largest."""
    return _CPUS * (settings.rollout.engine_replicas.max + settings.rollout.agent_replicas.max + 1)


def _deployment(name: str, of: type, replicas: ReplicaSettings, gpus: int = 0, **options: Any) -> Any:
    if replicas.max > replicas.min:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=replicas.min,
            max_replicas=replicas.max,
            target_ongoing_requests=replicas.target_ongoing,
            upscale_delay_s=replicas.upscale_delay_s,
            downscale_delay_s=replicas.downscale_delay_s,
        )
    else:
        options["num_replicas"] = replicas.min
    return serve.deployment(
        name=name,
        ray_actor_options={"num_cpus": _CPUS, "num_gpus": gpus},
        max_ongoing_requests=_MANY,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=_HEALTH_PERIOD_S,
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
        **options,
    )(of)


def _process_name() -> str:
    return f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"


def _join_logs() -> None:
    join()
    configure_logs("rollout")
