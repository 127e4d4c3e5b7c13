"""Keeps an engine on the policy that the trainer published last, and tells the trainer which one is served."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from forage_common.errors import UnavailableError
from forage_common.streams.client import StreamClient
from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import Policy
from forage_rollout.weights.policy import PolicyError, is_newer, same

log = get_logger()
POLL_S = 0.1
RETRY_S = 1.0
REFUSALS = 3
CATCH_UP_S = 60.0


class Loader(Protocol):
    """An engine whose weights can be replaced."""

    serving: Policy | None
    out_of_service: str

    async def load(self, policy: Policy) -> float: ...


async def catch_up(streams: StreamClient, engine: Loader, timeout_s: float = CATCH_UP_S) -> None:
    """Return once the engine serves what is announced, or nothing is.

    A policy that cannot be loaded for so long leaves the engine out of service; `follow_policy` goes on trying.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            announced = await asyncio.to_thread(streams.read_policy)
            if announced is None or not is_newer(announced, engine.serving):
                return
            await engine.load(announced)
        except PolicyError as error:
            log.error("policy_refused", detail=str(error))
            if time.monotonic() > deadline:
                engine.out_of_service = str(error)
                return
            await asyncio.sleep(RETRY_S)
        except UnavailableError as error:
            log.warning("waiting_for_redis", detail=str(error))
            await asyncio.sleep(RETRY_S)


async def follow_policy(streams: StreamClient, engine: Loader, replica: str) -> None:
    """Load each newer policy and acknowledge it; never returns, survives Redis being away.

    An announced policy that cannot be loaded `REFUSALS` times takes the engine out of service: its trajectories would
    grow too old for the trainer, and another engine may be able to load it.
    """
    acknowledged: Policy | None = None
    refused: Policy | None = None
    refusals = 0
    while True:
        try:
            announced = await asyncio.to_thread(streams.read_policy)
            if announced is not None and is_newer(announced, engine.serving):
                await engine.load(announced)
            if engine.serving is not None and not same(engine.serving, acknowledged):
                serving = engine.serving
                await asyncio.to_thread(streams.acknowledge_policy, replica, serving)
                acknowledged = serving
        except PolicyError as error:
            if not same(announced, refused):
                log.error("policy_refused", detail=str(error))
                refused, refusals = announced, 0
            refusals += 1
            if refusals >= REFUSALS and not engine.out_of_service:
                engine.out_of_service = str(error)
                log.error("out_of_service", detail=str(error))
            await asyncio.sleep(RETRY_S)
        except UnavailableError as error:
            log.warning("waiting_for_redis", detail=str(error))
            await asyncio.sleep(RETRY_S)
        await asyncio.sleep(POLL_S)
