"""Keeps an engine on the policy that the trainer published last, and tells the trainer which one is served."""

from __future__ import annotations

import asyncio
from typing import Protocol

from forage_common.errors import UnavailableError
from forage_common.streams import StreamClient
from forage_common.telemetry import get_logger
from forage_common.v1.trajectory_pb2 import Policy
from forage_rollout.policy import PolicyError, is_newer, same

log = get_logger()
POLL_S = 0.1
RETRY_S = 1.0


class Loader(Protocol):
    """An engine whose weights can be replaced."""

    serving: Policy | None

    async def load(self, policy: Policy) -> float: ...


async def follow_policy(streams: StreamClient, engine: Loader, replica: str) -> None:
    """Load each newer policy and acknowledge it; never returns, survives Redis being away."""
    acknowledged: Policy | None = None
    refused: Policy | None = None
    while True:
        try:
            announced = await asyncio.to_thread(streams.policy)
            if announced is not None and is_newer(announced, engine.serving):
                await engine.load(announced)
            if engine.serving is not None and not same(engine.serving, acknowledged):
                serving = engine.serving
                await asyncio.to_thread(streams.acknowledge_policy, replica, serving)
                acknowledged = serving
        except PolicyError as error:
            if not same(announced, refused):
                log.error("policy_refused", detail=str(error))
            refused = announced
            await asyncio.sleep(RETRY_S)
        except UnavailableError as error:
            log.warning("waiting_for_redis", detail=str(error))
            await asyncio.sleep(RETRY_S)
        await asyncio.sleep(POLL_S)
