"""A replica of the reward service that gives everybody the score of nobody, and counts."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from forage_proto.v1.reward_pb2 import ScoredItem, ScoreItem, ScoreRequest, ScoreResponse
from forage_proto.v1.reward_pb2_grpc import RewardServicer, add_RewardServicer_to_server

ITEMS = [ScoreItem(trajectory_id="t")]


@dataclass
class Replica(RewardServicer):
    """At an address, with a server while it runs."""

    address: str
    calls: int = 0
    server: grpc.aio.Server | None = None

    async def Score(self, request: ScoreRequest, context: object) -> ScoreResponse:
        self.calls += 1
        return ScoreResponse(items=[ScoredItem(trajectory_id=item.trajectory_id) for item in request.items])

    async def start(self, *options: tuple[str, int]) -> None:
        self.server = grpc.aio.server(options=options)
        add_RewardServicer_to_server(self, self.server)
        assert self.server.add_insecure_port(self.address)
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(None)
