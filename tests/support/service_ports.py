"""What every port of a service answers besides its own calls, as curl, a kubelet or grpcurl would ask it."""

from __future__ import annotations

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from forage_runtime.clients.health import list_health_urls
from forage_runtime.settings import Settings

PAGES = ("healthz", "readyz", "waitz", "metrics")
GRPC = {"reward": "forage.v1.Reward", "retriever": "forage.v1.Retriever", "rollout": "forage.v1.Rollout"}
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST_SERVICES = b"\x3a\x00"
"""A ServerReflectionRequest with an empty `list_services`: not every environment has the messages of reflection."""


def check_grpc_port(address: str, service: str) -> str:
    """The answer of a health check: "SERVING". The server and the service must answer the same, and be listed."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        requests = [health_pb2.HealthCheckRequest(service=name) for name in ("", service)]
        whole, own = (stub.Check(request, timeout=60).status for request in requests)
        assert whole == own
        (listed,) = channel.stream_stream(REFLECTION)(iter([LIST_SERVICES]), timeout=60)
    for name in (service, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"):
        assert name.encode() in listed
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(whole))


def check_pages(settings: Settings, *services: str) -> None:
    """Assert that services of a run, ready or not, answer over HTTP what docs/reference/api.md says."""
    urls = list_health_urls(settings)
    for name in services or urls:
        for page in PAGES:
            reply = httpx.get(f"{urls[name].rsplit('/', 1)[0]}/{page}", timeout=60)
            assert reply.status_code in ((200, 503) if page == "readyz" else (200,)), (name, page, reply.text)


def check_grpc_ports(settings: Settings) -> None:
    """Assert that every gRPC port of a run, ready or not, answers what docs/reference/api.md says."""
    for name, service in GRPC.items():
        assert check_grpc_port(getattr(settings, name).grpc_address, service) in ("SERVING", "NOT_SERVING"), name
