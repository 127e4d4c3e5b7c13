"""The gRPC server of one process: scores batches and streams, describes itself, and leaves in order when told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import generate_latest

from forage_common.settings import Settings
from forage_common.telemetry import port_in_use
from forage_common.v1 import reward_pb2, reward_pb2_grpc
from forage_reward.deadline import deadline_of
from forage_reward.describe import described
from forage_reward.judge import Judge
from forage_reward.metrics import REFUSED, REQUESTS, SECONDS
from forage_reward.registry import REWARDS
from forage_reward.score_stream import ScoreStream
from forage_reward.scoring import QueueFullError, Scoring
from forage_reward.shadow import Shadow
from forage_reward.user_rewards import UserRewards

MAX_MESSAGE_BYTES = 256 * 2**20
"""Of a request or reply: thousands of long trajectories, yet not all of a machine's memory."""

MAX_CONCURRENT_CALLS = 256
"""Beyond this a call ends with RESOURCE_EXHAUSTED, which clients repeat later."""

MAX_STREAMS = 32
MAX_THREADS = MAX_STREAMS + 32
"""Of handlers. They start on demand; how many score at once is `reward.threads`."""

DRAIN_S = 20.0
SERVICE = reward_pb2.DESCRIPTOR.services_by_name["Reward"].full_name


class RewardServicer(reward_pb2_grpc.RewardServicer):
    """`forage.v1.Reward` over a judge at work."""

    def __init__(self, scoring: Scoring, description: reward_pb2.DescribeResponse) -> None:
        self._scoring = scoring
        self._description = description
        self._streams = threading.Semaphore(MAX_STREAMS)

    def Score(self, request: reward_pb2.ScoreRequest, context: grpc.ServicerContext) -> reward_pb2.ScoreResponse:
        REQUESTS.labels("Score").inc()
        try:
            with SECONDS.time(), self._scoring.admission.of(len(request.items)):
                deadline = deadline_of(context.time_remaining())
                items = self._scoring.batch(request.items, deadline, context.is_active)
        except QueueFullError as error:
            REFUSED.labels("Score").inc()
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return reward_pb2.ScoreResponse(items=items)

    def ScoreStream(
        self, request_iterator: Iterator[reward_pb2.ScoreStreamRequest], context: grpc.ServicerContext
    ) -> Iterator[reward_pb2.ScoreStreamResponse]:
        REQUESTS.labels("ScoreStream").inc()
        if not self._streams.acquire(blocking=False):
            REFUSED.labels("ScoreStream").inc()
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_STREAMS} streams are open: try again later")
        try:
            deadline = deadline_of(context.time_remaining())
            yield from ScoreStream(self._scoring, request_iterator, deadline, context.add_callback).replies()
        finally:
            self._streams.release()

    def ListRewards(
        self, request: reward_pb2.ListRewardsRequest, context: grpc.ServicerContext
    ) -> reward_pb2.ListRewardsResponse:
        REQUESTS.labels("ListRewards").inc()
        judge = self._scoring.judge
        rewards = [
            reward_pb2.RewardInfo(name=name, summary=reward.summary, data_sources=judge.data_sources(name))
            for name, reward in judge.rewards.items()
        ]
        return reward_pb2.ListRewardsResponse(rewards=rewards)

    def Describe(
        self, request: reward_pb2.DescribeRequest, context: grpc.ServicerContext
    ) -> reward_pb2.DescribeResponse:
        REQUESTS.labels("Describe").inc()
        if not request.name:
            return self._description
        found = [reward for reward in self._description.rewards if reward.name == request.name]
        if not found:
            known = ", ".join(reward.name for reward in self._description.rewards)
            context.abort(grpc.StatusCode.NOT_FOUND, f"no reward is called '{request.name}': known are {known}")
        whole = self._description
        return reward_pb2.DescribeResponse(rewards=found, version=whole.version, config_digest=whole.config_digest)


class Server:
    """A serving process, from `listen` to `drain`.

    Raises:
        UserError: a route or a user reward is wrong.
    """

    def __init__(self, settings: Settings) -> None:
        reward = settings.reward
        self._user = UserRewards(reward.user, REWARDS)
        try:
            judge = Judge(reward.routes, self._user.rewards)
            Judge(reward.shadow, self._user.rewards, "reward.shadow")  # a wrong one is an error here, in words
            self._scoring = Scoring(judge, Shadow(settings), reward)
        except BaseException:
            self._user.close()
            raise
        self._servicer = RewardServicer(self._scoring, described(judge.rewards, reward))
        self._address = reward.grpc_address

    def listen(self, shared: bool = False) -> Server:
        """Serve from now on.

        Args:
            shared: other processes serve the same port.

        Raises:
            UserError: the port is in use.
        """
        try:
            self._grpc, self._probes = _start(self._address, self._servicer, shared)
        except BaseException:
            self._close()
            raise
        return self

    def metrics(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest()

    def drain(self, grace_s: float = DRAIN_S) -> None:
        """Take no more calls, finish those in progress, end the processes of user and shadow rewards."""
        self._probes.enter_graceful_shutdown()
        self._grpc.stop(grace_s).wait()
        self._close()

    def _close(self) -> None:
        self._scoring.close()
        self._user.close()


def _start(address: str, servicer: RewardServicer, shared: bool) -> tuple[grpc.Server, health.HealthServicer]:
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", int(shared)),  # else a second service would share the port in silence
    ]
    pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="reward")
    server = grpc.server(pool, options=options, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
    reward_pb2_grpc.add_RewardServicer_to_server(servicer, server)
    probes = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise port_in_use(address, OSError(str(error))) from None
    if bound == 0:
        raise port_in_use(address, OSError("address in use"))
    server.start()
    for name in ("", SERVICE):
        probes.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, probes
