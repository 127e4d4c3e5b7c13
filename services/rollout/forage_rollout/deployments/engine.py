"""The `Engine` deployment, one engine a replica, and `RemoteEngine`, which calls it through Serve."""

from __future__ import annotations

import asyncio
import dataclasses
import operator
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import ray
from ray.serve.handle import DeploymentHandle

from forage_common.settings import Settings
from forage_common.streams.client import StreamClient
from forage_common.streams.history import open_history
from forage_common.telemetry.logs import get_logger
from forage_common.telemetry.waits import list_waits
from forage_common.v1.trajectory_pb2 import Policy, Replica
from forage_rollout.background import supervise
from forage_rollout.core.arguments import build_environment
from forage_rollout.core.process import prepare_fork
from forage_rollout.deployments.follower import Follower
from forage_rollout.deployments.replica import (
    REDIS_TIMEOUT_S,
    CheckPace,
    broadcast,
    build_process_name,
    call_replica,
    start_process,
)
from forage_rollout.deployments.routing import OUT_OF_SERVICE
from forage_rollout.deployments.shifts import Shifts
from forage_rollout.engine.endpoint_engine import EndpointEngine
from forage_rollout.engine.openai import OpenAiRoutes, ResponseHead
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import Generation, Request
from forage_rollout.metrics import Snapshot, read_call_counts, to_counts
from forage_rollout.weights.policy import NotServingError

log = get_logger()
_OUT_OF_SERVICE_S = 60.0
_NOT_SERVING_RETRY_S = 0.5
_RELEASE_TIMEOUT_S = 2.0

_get_fields = operator.attrgetter(*(field.name for field in dataclasses.fields(Request)))


class EngineDeployment:
    """One model replica: vLLM, or a client of a remote endpoint, and the task that follows the published policy."""

    async def __init__(self, settings_json: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """Return once the announced policy is served, so that a new replica never samples under an older one."""
        start_process()
        settings = Settings.model_validate_json(settings_json)
        self._replica = build_process_name()
        self._check_pace = CheckPace()
        self._out_of_service_since: float | None = None
        self._engine: VllmEngine | EndpointEngine
        self._openai: OpenAiRoutes | EndpointEngine
        self._follower: Follower | None = None
        self._following: asyncio.Task[None] | None = None
        if settings.rollout.engine.endpoint:
            self._engine = self._openai = EndpointEngine(settings)
            await self._engine.connect()
            return
        if not ray.get_gpu_ids():
            os.environ.update(build_environment(settings.rollout.engine))
            prepare_fork()
        streams = StreamClient(settings.redis, settings.run.id, REDIS_TIMEOUT_S, open_history(settings.run, "engine"))
        shifts = Shifts(streams, self._replica) if settings.trainer.placement == "colocated" else None
        if shifts is not None:
            await shifts.wait_for_engines()
        with nullcontext() if shifts is None else shifts.starting():
            self._engine = VllmEngine(settings)
            self._openai = OpenAiRoutes(self._engine.llm, settings)
        self._follower = Follower(streams, self._engine, self._replica, shifts, settings.security.audit_file)
        await self._follower.catch_up()
        self._following = supervise(self._follower.follow(), "follow_policy")

    async def get_end_of_turn(self) -> str:
        return self._engine.end_of_turn

    async def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return await self._engine.render_chat(messages)

    async def generate(self, fields: tuple[Any, ...]) -> tuple[Any, ...]:
        """A `Request`'s fields in, a `Generation`'s fields out: plain tuples pickle faster than dataclasses."""
        generation = await self._engine.generate(Request(*fields))
        return generation.token_ids, generation.logprobs, generation.hit_length, generation.versions

    async def release(self, affinity: str) -> None:
        await self._engine.release(affinity)

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

    async def forward_openai(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Yield (status, headers), then the parts of the body."""
        async for part in self._openai.forward_openai(method, path, headers, body):
            yield part

    async def take_snapshot(self) -> Snapshot:
        counts = to_counts(self._engine.counts) | read_call_counts()
        return Snapshot(self._replica, counts, self._engine.serving, waits=list_waits("engine"))

    async def record_routing_stats(self) -> dict[str, str]:
        """Report the state of this replica to the router; Serve calls this method by its name."""
        return {OUT_OF_SERVICE: self._engine.out_of_service}

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
        if not self._engine.out_of_service:
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

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.shutdown()


class RemoteEngine:
    """`loop.generation.Engine` through a Serve handle.

    Args:
        releases: whether engines need to know that an affinity gets no more requests.
    """

    def __init__(self, handle: DeploymentHandle, releases: bool) -> None:
        # Unary gRPC between the replicas takes half the CPU time of Serve's default, a stream of object references.
        self._handle = handle.options(_by_reference=False)
        self._releases = releases
        self._releasing: set[asyncio.Task[None]] = set()

    async def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        token_ids: list[int] = await call_replica(self._handle.render_chat, messages)
        return token_ids

    async def generate(self, request: Request) -> Generation:
        """Generate on the replica of the request's affinity.

        Waits where a replica is out of service: another takes over, or it is back soon; the caller has a deadline.
        """
        handle = self._handle.options(method_name="generate", session_id=request.affinity)
        fields = _get_fields(request)
        while True:
            answer = call_replica(handle, fields)
            try:
                return Generation(*await answer)
            except asyncio.CancelledError:
                answer.cancel()
                raise
            except NotServingError:
                await asyncio.sleep(_NOT_SERVING_RETRY_S)  # wait: named by the agent, whose trajectory has a time limit

    async def release(self, affinity: str) -> None:
        """End an affinity on every replica: under load its generations went to several, and each may hold a lease.

        Never raises, so that no finished group is lost. A replica that does not answer within `_RELEASE_TIMEOUT_S` is
        not waited for: it gets the message when it runs again.
        """
        if not self._releases:
            return
        releasing = asyncio.create_task(self._release(affinity))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)
        await asyncio.wait([releasing], timeout=_RELEASE_TIMEOUT_S)  # wait: two seconds at most

    async def _release(self, affinity: str) -> None:
        try:
            await broadcast(self._handle, "release", affinity)
        except Exception as error:  # noqa: BLE001 - leases that are left end with their time limit
            log.warning("not_released", affinity=affinity, detail=f"{type(error).__name__}: {error}")
