"""A group whose trajectories differ in length, of which some may be cut."""

from __future__ import annotations

from arrived_groups import arrive
from trainer_parts import build_trajectory

from forage_proto.v1.trajectory_pb2 import TrajectoryGroup
from forage_runtime.settings import AlgorithmSettings
from forage_trainer.data.tensors import StepTensors, build_step_tensors, select_trajectories

LENGTHS = (6, 8, 9, 10, 12, 14)
"""Generated tokens of trajectories; two turns each, and an observation between them that counts for nothing."""
REWARDS = (0.0, 1.0, 1.0, 0.0, 1.0, 1.0)


def build(algorithm: AlgorithmSettings, unfinished: tuple[int, ...] = ()) -> tuple[StepTensors, TrajectoryGroup]:
    rows = [
        build_trajectory("a", i, reward, turns=(length - 3, 3), observation=20)
        for i, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True))
    ]
    for row in unfinished:
        rows[row].finished = False
    group = TrajectoryGroup(group_uid="a", trajectories=rows)
    tensors = build_step_tensors(select_trajectories([arrive(group)], algorithm), 0, 1, 0, algorithm)
    assert tensors is not None
    return tensors, group
