"""A process with few descriptors that serves HTTP, health and gRPC as the services do. usage: HOST PORT"""

from __future__ import annotations

import asyncio
import resource
import sys
from typing import Any

import grpc
import uvicorn
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2_grpc

from forage_runtime.addresses import bind, join_address, listen
from forage_runtime.security.call_limits import limit_connections
from forage_runtime.security.http.server import make_protocol
from forage_runtime.settings import TlsSettings
from forage_runtime.telemetry.health import Health, serve_health
from forage_runtime.telemetry.logs import configure_logs

FILES = 64


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """The application: 200 to everything."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def serve(host: str, port: int) -> None:
    """Serve on three ports from `port` on, until the process is killed."""
    health = Health()
    health.mark_started()
    serve_health(join_address(host, port + 1), health)
    calls = grpc.aio.server(options=limit_connections())
    health_pb2_grpc.add_HealthServicer_to_server(grpc_health.aio.HealthServicer(), calls)
    bind(calls, join_address(host, port + 2))
    await calls.start()
    config = uvicorn.Config(
        answer, http=make_protocol(TlsSettings(), "test/http"), log_config=None, lifespan="off", ws="none"
    )
    await uvicorn.Server(config).serve([listen(join_address(host, port))])


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    configure_logs("test")
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
