"""Groups as a trainer has them, made of messages: by way of the stream, as in a run."""

from __future__ import annotations

from collections.abc import Sequence

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import Score, TrajectoryGroup
from forage_proto.v1.trajectory_pb2 import Trajectory as TrajectoryMessage
from forage_trajectory.codec import decode_group, pack_group
from forage_trajectory.trajectory import ColumnFolder, Group, Trajectory


def arrive(group: TrajectoryGroup, folder: ColumnFolder | None = None) -> Group:
    return decode_group(PackedGroup.FromString(pack_group(group).SerializeToString()), folder)


def arrive_alone(trajectory: TrajectoryMessage) -> Trajectory:
    return arrive(TrajectoryGroup(trajectories=[trajectory])).trajectories[0]


def arrive_scored(loss_mask: Sequence[int], turn_ids: Sequence[int], score: Score) -> Trajectory:
    """A response with this score; its tokens are all the same."""
    tokens = len(loss_mask)
    message = TrajectoryMessage(loss_mask=loss_mask, turn_ids=turn_ids, score=score, prompt_length=1)
    message.token_ids.extend([0] * (1 + tokens))
    message.logprobs.extend([0.0] * tokens)
    return arrive_alone(message)
