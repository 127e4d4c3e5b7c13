"""The gRPC server of one process: scores batches and streams, describes itself, and leaves in order when told to."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import NoReturn

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import generate_latest

from forage_common.addresses import bind
from forage_common.settings import Settings
from forage_common.telemetry import tracing
from forage_common.telemetry.tracing import SpanKind
from forage_common.v1 import reward_pb2, reward_pb2_grpc
from forage_reward.deadline import deadline_of
from forage_reward.isolation.user_rewards import UserRewards
from forage_reward.registry import REWARDS
from forage_reward.router import Judge
from forage_reward.serve.describe import described
from forage_reward.serve.metrics import REFUSED, REQUESTS, SECONDS
from forage_reward.serve.peer_workers import Place, Siblings
from forage_reward.serve.score_stream import ScoreStream
from forage_reward.serve.scoring import QueueFullError, Scoring
from forage_reward.serve.shadow import Shadow

MAX_MESSAGE_BYTES = 256 * 2**20
"""Of a request or reply: thousands of long trajectories, yet not all of a machine's memory."""

MAX_CONCURRENT_CALLS = 256
"""Beyond this a call ends with RESOURCE_EXHAUSTED, which clients repeat later."""

CONNECTION_AGE_MS = 300_000
"""Then a client connects anew, when its calls have ended, and looks the name up: it finds replicas that came since."""

MAX_STREAMS = 32
DRAIN_S = 20.0
SERVICE = reward_pb2.DESCRIPTOR.services_by_name["Reward"].full_name


class RewardServicer(reward_pb2_grpc.RewardServicer):
    """`forage.v1.Reward` over a judge at work."""

    def __init__(self, scoring: Scoring, description: reward_pb2.DescribeResponse) -> None:
        self._scoring = scoring
        self._description = description
        self._streams = 0

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ScoreResponse:
        REQUESTS.labels("Score").inc()
        try:
            with (
                _traced("Score", context, {"forage.items": len(request.items)}),
                SECONDS.time(),
                self._scoring.admission.of(len(request.items)),
            ):
                items = await self._scoring.batch(request.items, deadline_of(context.time_remaining()))
        except QueueFullError as error:
            await _refuse(context, "Score", str(error))
        return reward_pb2.ScoreResponse(items=items)

    async def ScoreStream(
        self, request_iterator: AsyncIterator[reward_pb2.ScoreStreamRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[reward_pb2.ScoreStreamResponse]:
        REQUESTS.labels("ScoreStream").inc()
        if self._streams >= MAX_STREAMS:
            await _refuse(context, "ScoreStream", f"{MAX_STREAMS} streams are open: try again later")
        stream = ScoreStream(self._scoring, request_iterator, deadline_of(context.time_remaining()))
        self._streams += 1

        def ended(_: object) -> None:
            self._streams -= 1
            stream.end()

        context.add_done_callback(ended)
        with _traced("ScoreStream", context, active=False):
            async for reply in stream.replies():
                yield reply

    async def ListRewards(
        self, request: reward_pb2.ListRewardsRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ListRewardsResponse:
        REQUESTS.labels("ListRewards").inc()
        judge = self._scoring.judge
        rewards = [
            reward_pb2.RewardInfo(name=name, summary=reward.summary, data_sources=judge.data_sources(name))
            for name, reward in judge.rewards.items()
        ]
        return reward_pb2.ListRewardsResponse(rewards=rewards)

    async def Describe(
        self, request: reward_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.DescribeResponse:
        REQUESTS.labels("Describe").inc()
        if not request.name:
            return self._description
        found = [reward for reward in self._description.rewards if reward.name == request.name]
        if not found:
            known = ", ".join(reward.name for reward in self._description.rewards)
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no reward is called '{request.name}': known are {known}")
        whole = self._description
        return reward_pb2.DescribeResponse(rewards=found, version=whole.version, config_digest=whole.config_digest)


def _traced(
    method: str, context: grpc.aio.ServicerContext, facts: tracing.Attributes | None = None, active: bool = True
) -> AbstractContextManager[tracing.Span]:
    facts = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method, **(facts or {})}
    parent = tracing.read_trace_context(context)
    return tracing.span(f"{SERVICE}/{method}", facts, kind=SpanKind.SERVER, parent=parent, active=active)


async def _refuse(context: grpc.aio.ServicerContext, method: str, why: str) -> NoReturn:
    REFUSED.labels(method).inc()
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
    raise AssertionError("unreachable: abort raises")


class Server:
    """A serving process, from `listen` to `drain`. Its event loop has a thread of its own.

    Args:
        place: of one of several workers; they share long batches.

    Raises:
        UserError: a route or a user reward is wrong.
    """

    def __init__(self, settings: Settings, place: Place | None = None) -> None:
        reward = settings.reward
        self._user = UserRewards(reward.user, REWARDS)
        try:
            judge = Judge(reward.routes, self._user.rewards)
            Judge(reward.shadow, self._user.rewards, "reward.shadow")  # a wrong one is an error here, in words
            self._siblings = Siblings(place) if place else None
            self._scoring = Scoring(judge, Shadow(settings), reward, self._siblings)
        except BaseException:
            self._user.close()
            raise
        self._servicer = RewardServicer(self._scoring, described(judge.rewards, reward))
        self._address = reward.grpc_address
        self._loop = uvloop.new_event_loop()

    def listen(self) -> Server:
        """Serve from now on; a worker shares its port with its siblings.

        Raises:
            UserError: the port is in use.
        """
        threading.Thread(target=self._loop.run_forever, name="serve", daemon=True).start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self._close()
            raise
        # What is here now stays: looking at it again in every full collection would cost calls their latency.
        gc.collect()
        gc.freeze()
        return self

    def metrics(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest()

    def drain(self, grace_s: float = DRAIN_S) -> None:
        """Take no more calls, finish those in progress, end the processes of user and shadow rewards."""

        async def stop() -> None:
            await self._probes.enter_graceful_shutdown()
            await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._close()

    async def _start(self) -> None:
        server, self._probes = await _serve(self._address, self._servicer, self._siblings is not None)
        self._servers = [server]
        if self._siblings is not None:
            self._servers.append(await self._siblings.serve(self._scoring))

    def _close(self) -> None:
        self._scoring.close()
        self._user.close()


async def _serve(
    address: str, servicer: RewardServicer, shared: bool
) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", int(shared)),  # else a second service would share the port in silence
        ("grpc.max_connection_age_ms", CONNECTION_AGE_MS),
    ]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
    reward_pb2_grpc.add_RewardServicer_to_server(servicer, server)
    probes = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bind(server, address)
    await server.start()
    for name in ("", SERVICE):
        await probes.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, probes
