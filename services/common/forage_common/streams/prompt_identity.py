"""What a group and its trajectories carry of the prompt that they answer."""

from __future__ import annotations

from collections.abc import Iterable

from forage_common.v1.trajectory_pb2 import Prompt, Trajectory, TrajectoryGroup


def with_prompt_identity(trajectory: Trajectory, prompt: Prompt, sample: int) -> Trajectory:
    """The trajectory as sample `sample` of a prompt; fields that it sets itself stay."""
    whole = Trajectory(
        id=f"{prompt.run_id}/{prompt.group_uid}/{sample}",
        run_id=prompt.run_id,
        group_uid=prompt.group_uid,
        sample=sample,
        data_source=prompt.data_source,
        trace_id=prompt.trace_id,
        ground_truth=prompt.ground_truth,
        sampling=prompt.sampling,
    )
    whole.MergeFrom(trajectory)
    return whole


def build_group(prompt: Prompt, trajectories: Iterable[Trajectory]) -> TrajectoryGroup:
    """The reply to a prompt."""
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
