"""What identifies a prompt, and the fields that its group and trajectories copy from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forage_proto.v1.trajectory_pb2 import Prompt, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class Issue:
    """A prompt that was issued. attempt: 0 at first, one more each time that its position is issued again."""

    batch: int
    position: int
    attempt: int
    group_uid: str


def with_prompt_identity(trajectory: Trajectory, prompt: Prompt, sample: int) -> Trajectory:
    """Return the trajectory with the identity of sample `sample` of a prompt; fields that it already has are kept."""
    complete = Trajectory(
        id=f"{prompt.run_id}/{prompt.group_uid}/{sample}",
        run_id=prompt.run_id,
        group_uid=prompt.group_uid,
        sample=sample,
        data_source=prompt.data_source,
        trace_id=prompt.trace_id,
        ground_truth=prompt.ground_truth,
        sampling=prompt.sampling,
    )
    complete.MergeFrom(trajectory)
    return complete


def build_group(prompt: Prompt, trajectories: Iterable[Trajectory]) -> TrajectoryGroup:
    """Build the group that answers a prompt."""
    return TrajectoryGroup(
        run_id=prompt.run_id,
        group_uid=prompt.group_uid,
        purpose=prompt.purpose,
        batch=prompt.batch,
        position=prompt.position,
        attempt=prompt.attempt,
        trajectories=trajectories,
        traceparent=prompt.traceparent,
    )
