"""The gRPC server of one process: scores batches and streams, describes the rewards, and drains on request."""

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

from forage_proto.v1 import reward_pb2, reward_pb2_grpc
from forage_reward.deadline import compute_deadline
from forage_reward.explanation import write_explanation
from forage_reward.isolation.user_rewards import UserRewards
from forage_reward.registry import REWARDS
from forage_reward.router import RewardRouter
from forage_reward.serve.describe import describe_rewards
from forage_reward.serve.metrics import REFUSED, REQUESTS, SECONDS
from forage_reward.serve.peer_workers import PeerWorkers, WorkerAddress
from forage_reward.serve.score_stream import ScoreStream
from forage_reward.serve.scoring import QueueFullError, ScoringQueue
from forage_reward.serve.shadow import ShadowScorer
from forage_reward.wire import InvalidItemError, from_proto, read_truth, read_view
from forage_runtime.addresses import bind
from forage_runtime.security.byte_budget import RequestByteBudget
from forage_runtime.security.call_guard import CallGuard
from forage_runtime.security.call_limits import guard_calls, limit_connections
from forage_runtime.security.tls import make_grpc_server_credentials
from forage_runtime.security.tokens import open_token_file
from forage_runtime.settings import Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.tracing import SpanKind

MAX_MESSAGE_BYTES = 32 * 2**20
"""Of a request or reply: a thousand long trajectories. Clients split what is larger."""

MAX_BYTES_IN_PROGRESS = 128 * 2**20
"""Of all requests of a process; further ones wait unread, and are refused after a while."""

MAX_CONCURRENT_CALLS = 256
"""Further calls end with RESOURCE_EXHAUSTED, and clients retry them later."""

MAX_STREAMS = 32
DRAIN_S = 20.0
SERVICE = reward_pb2.DESCRIPTOR.services_by_name["Reward"].full_name


class RewardServicer(reward_pb2_grpc.RewardServicer):
    """`forage.v1.Reward` over a scoring queue."""

    def __init__(self, scoring: ScoringQueue, description: reward_pb2.DescribeResponse) -> None:
        self._scoring = scoring
        self._description = description
        self._streams = 0
        self.room = RequestByteBudget(MAX_BYTES_IN_PROGRESS, MAX_MESSAGE_BYTES)

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ScoreResponse:
        REQUESTS.labels("Score").inc()
        try:
            with (
                _open_span("Score", context, {"forage.items": len(request.items)}),
                SECONDS.time(),
                self._scoring.admission.hold(len(request.items)),
            ):
                items = await self._scoring.score_batch(request.items, compute_deadline(context.time_remaining()))
        except QueueFullError as error:
            await _refuse(context, "Score", str(error))
        return reward_pb2.ScoreResponse(items=items)

    async def ScoreStream(
        self, request_iterator: AsyncIterator[reward_pb2.ScoreStreamRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[reward_pb2.ScoreStreamResponse]:
        REQUESTS.labels("ScoreStream").inc()
        if self._streams >= MAX_STREAMS:
            await _refuse(context, "ScoreStream", f"{MAX_STREAMS} streams are open: try again later")
        stream = ScoreStream(self._scoring, request_iterator, self.room, compute_deadline(context.time_remaining()))
        self._streams += 1

        def release(_: object) -> None:
            self._streams -= 1
            stream.cancel()

        context.add_done_callback(release)
        with _open_span("ScoreStream", context, active=False):
            async for reply in stream.iterate_replies():
                yield reply

    async def Describe(
        self, request: reward_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.DescribeResponse:
        REQUESTS.labels("Describe").inc()
        if not request.name:
            return self._description
        rewards = [reward for reward in self._description.rewards if reward.name == request.name]
        if not rewards:
            known = ", ".join(reward.name for reward in self._description.rewards)
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no reward is called '{request.name}': known are {known}")
        everything = self._description
        return reward_pb2.DescribeResponse(
            rewards=rewards, version=everything.version, config_digest=everything.config_digest
        )

    async def Explain(
        self, request: reward_pb2.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ExplainResponse:
        REQUESTS.labels("Explain").inc()
        try:
            view, truth = read_view(request.item), read_truth(request.item)
        except InvalidItemError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("unreachable: abort raises") from None
        # On a thread: a long text takes a while, and scores do not wait for it.
        text = await asyncio.to_thread(write_explanation, view, truth, from_proto(request.score))
        return reward_pb2.ExplainResponse(text=text)


def _open_span(
    method: str, context: grpc.aio.ServicerContext, attributes: tracing.Attributes | None = None, active: bool = True
) -> AbstractContextManager[tracing.Span]:
    attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method, **(attributes or {})}
    parent = tracing.read_trace_context(context)
    return tracing.span(f"{SERVICE}/{method}", attributes, kind=SpanKind.SERVER, parent=parent, active=active)


async def _refuse(context: grpc.aio.ServicerContext, method: str, detail: str) -> NoReturn:
    REFUSED.labels(method).inc()
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, detail)
    raise AssertionError("unreachable: abort raises")


class Server:
    """A serving process, from `listen` to `drain`. Its event loop runs on its own thread.

    Args:
        address: that of one of several workers, which share long batches.

    Raises:
        UserError: a route or a user reward is wrong.
    """

    def __init__(self, settings: Settings, address: WorkerAddress | None = None) -> None:
        reward = settings.reward
        self._user = UserRewards(reward.user, REWARDS, settings.security.user_code)
        try:
            router = RewardRouter(reward.routes, self._user.rewards)
            self._peers = PeerWorkers(address) if address else None
            self._scoring = ScoringQueue(router, ShadowScorer(settings), reward, self._peers)
        except BaseException:
            self._user.close()
            raise
        self._servicer = RewardServicer(self._scoring, describe_rewards(router.rewards, reward))
        self._settings = settings
        self._loop = uvloop.new_event_loop()

    def listen(self) -> Server:
        """Start to serve; a worker shares its port with its peers.

        Raises:
            UserError: the port is in use, or a file with a certificate or tokens is wrong.
        """
        threading.Thread(target=self._loop.run_forever, name="serve", daemon=True).start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self._close()
            raise
        # Objects of the start live as long as the process: scanning them in every full collection would delay calls.
        gc.collect()
        gc.freeze()
        return self

    def metrics(self) -> bytes:
        """Render the metrics for Prometheus."""
        return generate_latest()

    def drain(self, grace_s: float = DRAIN_S) -> None:
        """Refuse new calls, finish those in progress, end the processes of user and shadow rewards."""

        async def stop() -> None:
            await self._probes.enter_graceful_shutdown()
            await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._close()

    async def _start(self) -> None:
        server, self._probes = await _start_grpc(self._settings, self._servicer, self._peers is not None)
        self._servers = [server]
        if self._peers is not None:
            self._servers.append(await self._peers.serve(self._scoring))

    def _close(self) -> None:
        self._scoring.close()
        self._user.close()


async def _start_grpc(
    settings: Settings, servicer: RewardServicer, shared: bool
) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", int(shared)),  # otherwise a second service would share the port unnoticed
        *limit_connections(),
    ]
    credentials = make_grpc_server_credentials(settings.tls, "reward")
    tokens = open_token_file(settings.reward.auth_token_file, "reward.auth_token_file")
    interceptors = (*guard_calls(tokens, servicer.room, "reward/grpc", MAX_CONCURRENT_CALLS), CallGuard())
    server = grpc.aio.server(options=options, interceptors=interceptors)
    reward_pb2_grpc.add_RewardServicer_to_server(servicer, server)
    probes = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bind(server, settings.reward.grpc_address, credentials)
    await server.start()
    for name in ("", SERVICE):
        await probes.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, probes
