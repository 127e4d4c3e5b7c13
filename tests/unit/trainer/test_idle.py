"""The rollout service's idle time between batches."""

from __future__ import annotations

from arrived_groups import arrive

from forage_proto.v1.trajectory_pb2 import Timings, Trajectory, TrajectoryGroup
from forage_queue.streams.client import Entry
from forage_queue.trainer.idle import IdleTime
from forage_trajectory.trajectory import Group


def make_entry(arrived_ms: int, *durations_s: float) -> Entry[Group]:
    trajectories = [Trajectory(timings=Timings(total_s=s - 0.25, score_s=0.25)) for s in durations_s]
    return Entry(f"{arrived_ms}-3".encode(), arrive(TrajectoryGroup(trajectories=trajectories)))


def test_the_first_batch_has_no_pause_before_it() -> None:
    assert IdleTime().measure([make_entry(5_000, 1.0)]) is None


def test_a_pause_ends_when_the_longest_trajectory_of_the_first_group_begins() -> None:
    idle = IdleTime()
    idle.measure([make_entry(10_000, 1.0), make_entry(12_000, 3.0)])
    # Begun at 16 - 1.5 = 14.5 and at 18 - 3.75 = 14.25 seconds.
    assert idle.measure([make_entry(16_000, 1.0, 1.5), make_entry(18_000, 3.75)]) == 2.25
    assert idle.measure([make_entry(19_500, 0.5)]) == 1.0


def test_batches_that_overlap_have_no_pause_between_them() -> None:
    idle = IdleTime()
    idle.measure([make_entry(10_000, 1.0), make_entry(30_000, 1.0)])
    assert idle.measure([make_entry(20_000, 5.0)]) == 0.0
    # The last group of all batches counts, not that of the last batch.
    assert idle.measure([make_entry(32_000, 0.5)]) == 1.5


def test_a_batch_without_groups_changes_nothing() -> None:
    idle = IdleTime()
    assert idle.measure([]) is None
    idle.measure([make_entry(1_000, 0.5)])
    assert idle.measure([]) is None
    assert idle.measure([make_entry(4_000, 1.0)]) == 2.0
