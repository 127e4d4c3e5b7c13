"""Keeps an engine on the policy that the trainer published last, and tells the trainer which one is served."""

from __future__ import annotations

import asyncio
import time

from forage_common.errors import UnavailableError
from forage_common.streams.client import StreamClient
from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import Policy
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.weights.policy import PolicyError, is_newer, is_same

log = get_logger()
POLL_INTERVAL_S = 0.1
RETRY_INTERVAL_S = 1.0
MAX_REFUSALS = 3
CATCH_UP_TIMEOUT_S = 60.0


async def catch_up(streams: StreamClient, engine: VllmEngine, timeout_s: float = CATCH_UP_TIMEOUT_S) -> None:
    """Return once the engine serves the announced policy, or none is announced.

    A policy that cannot be loaded within `timeout_s` leaves the engine out of service; `follow_policy` keeps trying.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            announced = await asyncio.to_thread(streams.read_policy)
            if announced is None or not is_newer(announced, engine.serving):
                return
            await engine.load_policy(announced)
        except PolicyError as error:
            log.error("policy_refused", detail=str(error))
            if time.monotonic() > deadline:
                engine.out_of_service = str(error)
                return
            await asyncio.sleep(RETRY_INTERVAL_S)
        except UnavailableError as error:
            log.warning("waiting_for_redis", detail=str(error))
            await asyncio.sleep(RETRY_INTERVAL_S)


async def follow_policy(streams: StreamClient, engine: VllmEngine, replica: str) -> None:
    """Load each newer policy and acknowledge it; never returns, and survives an unavailable Redis.

    An announced policy that cannot be loaded `MAX_REFUSALS` times takes the engine out of service: its trajectories
    would become too stale for the trainer, and another engine may be able to load it.
    """
    acknowledged: Policy | None = None
    refused: Policy | None = None
    refusals = 0
    while True:
        try:
            # Polled, not pushed: an engine that misses a message would serve an old policy without knowing.
            announced = await asyncio.to_thread(streams.read_policy)
            if announced is not None and is_newer(announced, engine.serving):
                await engine.load_policy(announced)
            # Acknowledged only when loaded. UpdateWeights loads policies past this task; they are acknowledged, too.
            if engine.serving is not None and not is_same(engine.serving, acknowledged):
                serving = engine.serving
                await asyncio.to_thread(streams.acknowledge_policy, replica, serving)
                acknowledged = serving
        except PolicyError as error:
            if not is_same(announced, refused):  # log each refused policy once, not at each attempt
                log.error("policy_refused", detail=str(error))
                refused, refusals = announced, 0
            refusals += 1
            if refusals >= MAX_REFUSALS and not engine.out_of_service:
                engine.out_of_service = str(error)
                log.error("out_of_service", detail=str(error))
            await asyncio.sleep(RETRY_INTERVAL_S)
        except UnavailableError as error:
            log.warning("waiting_for_redis", detail=str(error))
            await asyncio.sleep(RETRY_INTERVAL_S)
        await asyncio.sleep(POLL_INTERVAL_S)
