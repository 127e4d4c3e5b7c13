"""A reward service that says which data sources it has routes for, and does nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from forage_proto.v1.reward_pb2 import DescribeRequest, DescribeResponse, RewardDescription, RewardUse
from forage_proto.v1.reward_pb2_grpc import RewardServicer, add_RewardServicer_to_server


class _Routes(RewardServicer):
    def __init__(self, data_sources: Sequence[str]) -> None:
        self._data_sources = data_sources

    def Describe(self, request: DescribeRequest, context: grpc.ServicerContext) -> DescribeResponse:
        uses = [RewardUse(data_source=source) for source in self._data_sources]
        uses.append(RewardUse(data_source="shadowed", shadow=True))
        return DescribeResponse(rewards=[RewardDescription(name="em", uses=uses)])


@contextmanager
def serve_routes(address: str, *data_sources: str) -> Iterator[None]:
    """A reward service that has routes for these data sources, and that nobody asks for scores."""
    server = grpc.server(ThreadPoolExecutor(2))
    add_RewardServicer_to_server(_Routes(data_sources), server)
    assert server.add_insecure_port(address)
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()
