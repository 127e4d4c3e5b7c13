"""A reward that answers about other trajectories: the real agent over real gRPC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from faulty_services import MakeParts

from forage_proto.v1.reward_pb2 import ScoreResponse
from forage_proto.v1.reward_pb2_grpc import RewardServicer, add_RewardServicer_to_server
from forage_proto.v1.trajectory_pb2 import Status


@pytest.mark.parametrize("fault", ["too few", "another's"])
async def test_scores_that_are_not_of_these_trajectories_are_refused(
    make_parts: MakeParts, free_address: Callable[[], str], fault: str
) -> None:
    class MismatchedReward(RewardServicer):
        async def Score(self, request: Any, context: Any) -> ScoreResponse:  # the name is gRPC's
            reply = ScoreResponse()
            for item in request.items[1:] if fault == "too few" else request.items:
                reply.items.add(trajectory_id=item.trajectory_id + "?" * (fault != "too few")).score.total = 1.0
            return reply

    server, address = grpc.aio.server(), free_address()
    add_RewardServicer_to_server(MismatchedReward(), server)
    server.add_insecure_port(address)
    await server.start()
    trajectories = await make_parts(address).run()
    await server.stop(None)
    for trajectory in trajectories:
        assert (trajectory.status, trajectory.score.status) == (Status.STATUS_INTERNAL,) * 2
        assert "does not match" in trajectory.status_detail
        assert trajectory.score.total == 0.0
