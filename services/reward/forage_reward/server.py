"""The gRPC server: scores batches, lists rewards, and leaves in order when told to."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import Counter, Histogram

from forage_common.settings import RewardSettings, Settings
from forage_common.telemetry import Health, get_logger, port_in_use, serve_health
from forage_common.v1 import reward_pb2, reward_pb2_grpc
from forage_reward.judge import Judge
from forage_reward.registry import REWARDS

MAX_MESSAGE_BYTES = 256 * 2**20
"""Of a request or reply: thousands of long trajectories, yet not all of a machine's memory."""

MAX_CONCURRENT_CALLS = 256
"""Beyond this a call ends with RESOURCE_EXHAUSTED, which clients repeat later."""

DRAIN_S = 20.0
SERVICE = reward_pb2.DESCRIPTOR.services_by_name["Reward"].full_name

REQUESTS = Counter("forage_reward_requests_total", "Calls", ["method"])
SECONDS = Histogram("forage_reward_request_seconds", "Time to score a batch")


class RewardServicer(reward_pb2_grpc.RewardServicer):
    """`forage.v1.Reward` over a judge."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def Score(self, request: reward_pb2.ScoreRequest, context: grpc.ServicerContext) -> reward_pb2.ScoreResponse:
        REQUESTS.labels("Score").inc()
        response = reward_pb2.ScoreResponse()
        with SECONDS.time():
            for item in request.items:
                if not context.is_active():  # past its deadline, or the caller has gone
                    break
                response.items.append(self._judge.score(item))
        return response

    def ListRewards(
        self, request: reward_pb2.ListRewardsRequest, context: grpc.ServicerContext
    ) -> reward_pb2.ListRewardsResponse:
        REQUESTS.labels("ListRewards").inc()
        rewards = [
            reward_pb2.RewardInfo(name=name, summary=reward.summary, data_sources=self._judge.data_sources(name))
            for name, reward in REWARDS.items()
        ]
        return reward_pb2.ListRewardsResponse(rewards=rewards)


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then finish the calls in progress.

    Raises:
        UserError: a route is wrong, or a port is in use.
    """
    judge = Judge(settings.reward.routes)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    ready = Health()
    serve_health(settings.reward.health_address, ready)
    server, probes = _start(settings.reward, judge)
    ready.ready()
    log = get_logger()
    log.info(
        "serving",
        grpc=settings.reward.grpc_address,
        routes={k: v.title for k, v in settings.reward.routes.items()},
    )
    stop.wait()
    log.info("draining", grace_s=DRAIN_S)
    ready.wait_for("stop", "draining")
    probes.enter_graceful_shutdown()
    server.stop(DRAIN_S).wait()
    log.info("stopped")


def _start(settings: RewardSettings, judge: Judge) -> tuple[grpc.Server, health.HealthServicer]:
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),  # else a second server would share the port in silence
    ]
    # Two threads more than scoring needs, so that probes are answered while it is busy.
    pool = ThreadPoolExecutor(settings.threads + 2, thread_name_prefix="reward")
    server = grpc.server(pool, options=options, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
    reward_pb2_grpc.add_RewardServicer_to_server(RewardServicer(judge), server)
    probes = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        bound = server.add_insecure_port(settings.grpc_address)
    except RuntimeError as error:
        raise port_in_use(settings.grpc_address, OSError(str(error))) from None
    if bound == 0:
        raise port_in_use(settings.grpc_address, OSError("address in use"))
    server.start()
    for name in ("", SERVICE):
        probes.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, probes
