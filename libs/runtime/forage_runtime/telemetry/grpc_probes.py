"""What every gRPC port answers besides its own service: health checks, and reflection, which lists what it offers."""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc


class GrpcProbes:
    """Health checks and reflection of a server. Health is NOT_SERVING until `set_serving`.

    The checks name the service, or nothing, which is the whole server.
    """

    def __init__(self, server: Any, service: str) -> None:
        """
        Args:
            server: of `grpc.aio`, not started yet.
            service: full name, such as forage.v1.Reward.
        """
        from grpc_reflection.v1alpha import reflection  # environments without a server lack it

        self._names = ("", service)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    async def set_serving(self, is_serving: bool) -> None:
        """Answer health checks with SERVING or NOT_SERVING from now on."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    async def begin_shutdown(self) -> None:
        """Answer NOT_SERVING to the end, whatever is set later."""
        await self._health.enter_graceful_shutdown()
