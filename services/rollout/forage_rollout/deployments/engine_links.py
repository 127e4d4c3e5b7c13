"""Connections between agents and engines in Ray: who tells whom the way, and what they speak."""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
from collections.abc import Callable

import ray
from ray.serve.handle import DeploymentHandle

from forage_rollout.deployments.replica import call_replica
from forage_rollout.links.engine_directory import ENGINE_DIRECTORY
from forage_rollout.links.link import EngineAddress
from forage_rollout.links.pool import EnginePool
from forage_rollout.links.server import EngineServer
from forage_rollout.loop.generation import Engine

_USE_TLS = "RAY_USE_TLS"
_CERT, _KEY, _CA = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"
_KEY_BYTES = 32


async def open_server(
    engine: Engine, stands_still: Callable[[], bool] = lambda: False
) -> tuple[EngineServer, EngineAddress]:
    """Serve an engine on its node's address, to those whom Ray tells the key: one of this replica alone.

    Args:
        stands_still: see `EngineServer`.
    """
    tls = make_ray_context(ssl.Purpose.CLIENT_AUTH)
    server = EngineServer(engine, secrets.token_bytes(_KEY_BYTES), tls, stands_still)
    return server, EngineAddress(await server.listen(ray.util.get_node_ip_address()), server.key)


async def open_pool(engine: DeploymentHandle, releases: bool) -> tuple[EnginePool, str]:
    """The running engines, as Serve lists them from now on, and the end-of-turn text of their model.

    Args:
        releases: see `EnginePool`.
    """
    end_of_turn: str = await call_replica(engine.get_end_of_turn)  # from here on the handle has a router
    pool = EnginePool(releases, make_ray_context(ssl.Purpose.SERVER_AUTH))
    ENGINE_DIRECTORY.watch(pool.set_replicas)
    await asyncio.sleep(0)  # the addresses are set in the loop's next turn
    await pool.wait_for_links()
    return pool, end_of_turn


def make_ray_context(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """The TLS of one end, mutual as Ray's own is, with the node's certificates; None where Ray speaks plain text.

    Args:
        purpose: who is verified: the server, or the client.

    Raises:
        OSError: a file is missing, or is none of PEM.
    """
    if os.environ.get(_USE_TLS, "0").lower() not in ("1", "true"):
        return None
    context = ssl.create_default_context(purpose, cafile=os.environ[_CA])
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(os.environ[_CERT], os.environ[_KEY])
    return context
