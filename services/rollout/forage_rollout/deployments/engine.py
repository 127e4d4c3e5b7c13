"""The `Engine` deployment: one engine a replica, which agents reach on connections of their own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from typing import NoReturn

import ray

from forage_proto.v1.trajectory_pb2 import Policy, Replica, Sampling
from forage_queue.rollout.lease_watch import LeaseWatch
from forage_queue.streams.client import StreamClient
from forage_queue.streams.history import open_history
from forage_rollout.deployments.autoscaling import ONGOING
from forage_rollout.deployments.engine_links import open_server
from forage_rollout.deployments.replica import REDIS_TIMEOUT_S, CheckPace, build_process_name, start_process
from forage_rollout.deployments.routing import OUT_OF_SERVICE
from forage_rollout.engine.endpoint_engine import EndpointEngine
from forage_rollout.engine.openai import OpenAiRoutes, ResponseHead
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.links.engine_directory import describe_address
from forage_rollout.metrics import Snapshot, read_call_counts, to_counts
from forage_rollout.vllm_start.fork_server import prepare_fork
from forage_rollout.vllm_start.start_errors import EngineStartError, explain_start
from forage_rollout.vllm_start.vllm_args import build_environment
from forage_runtime.background import supervise
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import list_waits
from forage_weights.rollout.follower import Follower
from forage_weights.rollout.policy import NotServingError

log = get_logger()
_OUT_OF_SERVICE_S = 60.0


def _start_engine(settings: Settings) -> VllmEngine:
    """Start vLLM; an error is logged whole here, since Serve keeps its own record of it in a file that Ray removes.

    Raises:
        EngineStartError: it does not start.
    """
    try:
        with explain_start(settings.model.path.resolve()):
            return VllmEngine(settings)
    except EngineStartError as error:
        failure = error.failure
        log.error("engine_not_started", reason=failure.reason, lasts=failure.lasts, exception=failure.details)
        raise


class EngineDeployment:
    """One model replica: vLLM, or a client of a remote endpoint, and the task that follows the published policy."""

    async def __init__(self, settings_json: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """Return once the announced policy is served, so that a new replica never samples under an older one."""
        start_process()
        settings = Settings.model_validate_json(settings_json)
        self._replica = build_process_name()
        self._check_pace = CheckPace()
        self._drain_timeout_s = settings.rollout.trajectory_timeout_s
        self._out_of_service_since: float | None = None
        self._engine: VllmEngine | EndpointEngine
        self._openai: OpenAiRoutes | EndpointEngine
        self._follower: Follower | None = None
        self._following: asyncio.Task[None] | None = None
        if settings.rollout.engine.endpoint:
            self._engine = self._openai = EndpointEngine(settings)
            await self._engine.connect()
            self._server, self._address = await open_server(self._engine)
            return
        if not ray.get_gpu_ids():
            os.environ.update(build_environment(settings.rollout.engine))
            prepare_fork()
        streams = StreamClient(settings.redis, settings.run.id, REDIS_TIMEOUT_S, open_history(settings.run, "engine"))
        lease_watch = LeaseWatch(streams, self._replica) if settings.trainer.placement == "colocated" else None
        if lease_watch is not None:
            await lease_watch.wait_for_engines()
        with nullcontext() if lease_watch is None else lease_watch.starting():
            self._engine = engine = _start_engine(settings)
            self._openai = OpenAiRoutes(engine, settings)
        self._follower = Follower(streams, self._engine, self._replica, lease_watch, settings.security.audit_file)
        await self._follower.catch_up()
        self._following = supervise(self._follower.follow(), "follow_policy")
        self._server, self._address = await open_server(self._engine, lambda: engine.stands_still)

    async def get_end_of_turn(self) -> str:
        return self._engine.end_of_turn

    async def pause(self, drain: bool) -> None:
        await self._engine.pause(drain)

    async def resume(self) -> None:
        await self._engine.resume()

    async def load_policy(self, policy: bytes) -> float:
        """Serve a serialized policy; returns the seconds that generation was paused."""
        return await self._engine.load_policy(Policy.FromString(policy))

    async def describe_replica(self) -> tuple[str, bytes]:
        """The name of this replica, and what it serves and refuses as a serialized `Replica`."""
        return self._replica, (self._follower.describe() if self._follower else Replica()).SerializeToString()

    async def check_sampling(self, sampling: bytes) -> tuple[str, str]:
        """What the engine refuses of a serialized `Sampling`; see `VllmEngine.check_sampling`."""
        return self._engine.check_sampling(Sampling.FromString(sampling))

    async def forward_openai(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes, chat: str = ""
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Yield (status, headers), then the parts of the body; `chat` is for the router, which sends it here."""
        async for part in self._openai.forward_openai(method, path, headers, body):
            yield part

    async def take_snapshot(self) -> Snapshot:
        counts = to_counts(self._engine.counts) | read_call_counts() | self._check_pace.read_counts("Engine")
        engine, waits = self._engine, list_waits("engine")
        return Snapshot(self._replica, counts, engine.serving, waits=waits, difference=engine.difference)

    async def record_routing_stats(self) -> dict[str, str]:
        """Report the state of this replica to the router; Serve calls this method by its name."""
        return {OUT_OF_SERVICE: self._engine.out_of_service}

    async def record_replica_metadata(self) -> dict[str, str]:
        """Tell agents how to reach this replica; Serve calls this method by its name, once."""
        return describe_address(self._address)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report what Serve cannot count; Serve calls this method by its name."""
        return {ONGOING: self._server.in_progress}

    async def check_health(self) -> None:
        """End the process when the engine is dead, hangs or has been out of service for long; Serve starts another."""
        await self._check_pace.last(lambda: self._engine.has_died)
        try:
            await self._engine.check_health()
            await self._engine.probe()
            self._check_in_service()
        except Exception as error:  # noqa: BLE001 - whatever it is, this engine cannot be trusted
            self._exit(error)
        if self._following is not None and self._following.done():
            raise RuntimeError("the task that follows the policy has ended")

    def _check_in_service(self) -> None:
        if not self._engine.out_of_service or self._engine.is_starting_again:
            self._out_of_service_since = None
            return
        self._out_of_service_since = self._out_of_service_since or time.monotonic()
        if time.monotonic() - self._out_of_service_since > _OUT_OF_SERVICE_S:
            raise NotServingError(self._engine.out_of_service)

    def _exit(self, error: Exception) -> NoReturn:
        """End the process at once: running requests fail now and run elsewhere, not after several failed checks."""
        log.error("engine_given_up", detail=f"{type(error).__name__}: {error}")
        try:
            self._engine.kill()
        finally:
            os._exit(1)

    async def __del__(self) -> None:
        """End this replica; Serve awaits this before it ends the process. Generations in progress may end before."""
        if hasattr(self, "_server"):
            await self._server.leave(self._drain_timeout_s)
            await self._server.close()
        if hasattr(self, "_engine"):
            self._engine.shutdown()
