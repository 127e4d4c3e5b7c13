"""Probes of the services that the rollout needs: for the health endpoint, and before prompts are claimed."""

from __future__ import annotations

import asyncio

import grpc
import httpx

from forage_common.errors import UnavailableError
from forage_common.settings import Settings
from forage_common.streams.client import StreamClient
from forage_common.telemetry.health import Health
from forage_common.telemetry.logs import get_logger

log = get_logger()
_PROBE_TIMEOUT_S = 2.0


async def watch_services(settings: Settings, health: Health) -> None:
    """Keep `health` current: probe Redis, the retriever and the reward, more often while one is missing."""
    streams = StreamClient(settings.redis, settings.run.id, _PROBE_TIMEOUT_S)
    async with httpx.AsyncClient(trust_env=False, timeout=_PROBE_TIMEOUT_S) as client:
        while True:
            missing = await asyncio.gather(
                _probe_redis(streams),
                _probe_retriever(client, settings.retriever.http_address),
                _probe_reward(settings),
            )
            for name, detail in zip(("redis", "retriever", "reward"), missing, strict=True):
                if detail:
                    health.wait_for(name, detail)
                else:
                    health.mark_ready(name)
            await asyncio.sleep(1.0 if any(missing) else 5.0)  # wait: pause between two probes


async def wait_for_services(settings: Settings) -> None:
    """Return once the retriever and the reward are both ready, however long that takes."""
    logged = None
    async with httpx.AsyncClient(trust_env=False, timeout=_PROBE_TIMEOUT_S) as client:
        while True:
            missing = await asyncio.gather(
                _probe_retriever(client, settings.retriever.http_address), _probe_reward(settings)
            )
            if not any(missing):
                return
            if missing != logged:
                log.info("waiting_for_services", detail="; ".join(filter(None, missing)))
                logged = missing
            await asyncio.sleep(0.5)  # wait: named by the dispatcher


async def _probe_redis(streams: StreamClient) -> str:
    """Why Redis cannot be used; empty while it can. The other probes return the same."""
    try:
        await asyncio.to_thread(streams.ping)
    except UnavailableError as error:
        return str(error)
    return ""


async def _probe_retriever(client: httpx.AsyncClient, address: str) -> str:
    try:
        response = await client.get(f"http://{address}/readyz")
    except httpx.HTTPError as error:
        return f"no answer at {address} ({error or type(error).__name__})"
    return "" if response.is_success else f"{address} is not ready: {response.text[:200]}"


async def _probe_reward(settings: Settings) -> str:
    address = settings.reward.grpc_address
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), _PROBE_TIMEOUT_S)  # wait: has a time limit
        except TimeoutError:
            return f"no answer at {address}"
    return ""
