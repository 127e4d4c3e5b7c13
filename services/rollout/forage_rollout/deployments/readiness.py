"""Probes of the services that the rollout needs: for the health endpoint, and before prompts are claimed."""

from __future__ import annotations

import asyncio
import ssl

import grpc
import httpx

from forage_proto.v1.reward_pb2 import DescribeRequest
from forage_proto.v1.reward_pb2_grpc import RewardStub
from forage_queue.streams.client import StreamClient
from forage_runtime.clients.health import read_readiness
from forage_runtime.clients.outgoing import UnboundedReplyError, bound_replies
from forage_runtime.clients.reasons import describe_error
from forage_runtime.clients.retriever import TOKEN_SETTING
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.security.channels import open_channel
from forage_runtime.security.handshakes import explain_tls
from forage_runtime.security.tls import http_scheme, make_client_context
from forage_runtime.security.token_file import authorization_metadata, open_token_file
from forage_runtime.settings import Settings
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger

log = get_logger()
_PROBE_TIMEOUT_S = 2.0
_MAX_REPLY_BYTES = 2**20
_REWARD_TOKEN = "reward.auth_token_file"
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def watch_services(settings: Settings, health: Health) -> None:
    """Keep `health` current: probe Redis, the retriever and the reward, more often while one is missing."""
    streams = StreamClient(settings.redis, settings.run.id, _PROBE_TIMEOUT_S)
    async with _open_client(settings) as client, _open_reward(settings) as reward:
        while True:
            missing = await asyncio.gather(
                _probe_redis(streams),
                _probe_retriever(client, settings),
                _probe_reward(reward, settings),
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
    async with _open_client(settings) as client, _open_reward(settings) as reward:
        while True:
            missing = await asyncio.gather(_probe_retriever(client, settings), _probe_reward(reward, settings))
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


def _open_client(settings: Settings) -> httpx.AsyncClient:
    verify = make_client_context(settings.tls)
    return httpx.AsyncClient(timeout=_PROBE_TIMEOUT_S, **bound_replies(_MAX_REPLY_BYTES, verify=verify))


async def _probe_retriever(client: httpx.AsyncClient, settings: Settings) -> str:
    """It must be ready and accept the token: /readyz needs none, so a route that does is asked, too."""
    address, token_file = settings.retriever.http_address, settings.retriever.auth_token_file
    url = f"{http_scheme(settings.tls)}://{address}"
    try:
        response = await client.get(f"{url}/readyz")
        if not response.is_success:
            return f"{address} is not ready: {read_readiness(response).explain()}"
        if token_file is None:
            return ""
        headers = dict(authorization_metadata(token_file, TOKEN_SETTING))
        response = await client.get(f"{url}/retrieve", headers=headers)  # 405 where the token is right
    except (httpx.HTTPError, ssl.SSLError) as error:
        return f"no answer at {address} ({explain_tls(error) or error or type(error).__name__})"
    except (SettingsError, UnboundedReplyError) as error:  # of a file that is being replaced, or of a stranger
        return str(error)
    if response.status_code in (401, 403):
        return f"{address} refuses this service: {response.text[:200]}; look at {TOKEN_SETTING}"
    return ""


def _open_reward(settings: Settings) -> grpc.aio.Channel:
    tokens = open_token_file(settings.reward.auth_token_file, _REWARD_TOKEN)
    return open_channel(settings.reward.grpc_address, settings.tls, tokens=tokens)


async def _probe_reward(channel: grpc.aio.Channel, settings: Settings) -> str:
    """Ask as a scorer does: a service that refuses the token of this one is of no use to it."""
    address = settings.reward.grpc_address
    try:
        await RewardStub(channel).Describe(DescribeRequest(), timeout=_PROBE_TIMEOUT_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return f"{address}: {error.details()}: set {_REWARD_TOKEN} to the file that it reads"
        if error.code() in _NO_ANSWER:
            return f"no answer at {address} ({describe_error(error)})"
    return ""
