"""The digest of a step's tokens: equal where the step trains on the same, whatever was repeated on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from arrived_groups import arrive
from trainer_parts import build_trajectory, make_group

from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile, Status, TrajectoryGroup
from forage_trainer.data.digests import digest_tokens, digest_weights


def build_groups() -> list[TrajectoryGroup]:
    return [make_group("a", [0.0, 1.0]), make_group("b", [0.5, 1.0], position=1)]


def fail_one(groups: list[TrajectoryGroup]) -> None:
    groups[1].trajectories.append(build_trajectory("b", 2, 1.0, status=Status.STATUS_TIMEOUT))


def repeat_under_another_epoch(groups: list[TrajectoryGroup]) -> None:
    for group in groups:
        group.attempt += 1
        for trajectory in group.trajectories:
            trajectory.segments[0].epoch += 1
            trajectory.timings.total_s = 3.0
            trajectory.replica = "another"


@pytest.mark.parametrize("change", [fail_one, repeat_under_another_epoch])
def test_what_is_not_trained_on_changes_nothing(change: Callable[[list[TrajectoryGroup]], None]) -> None:
    groups = build_groups()
    change(groups)
    assert digest_tokens(map(arrive, groups)) == digest_tokens(map(arrive, build_groups()))


def change_token(groups: list[TrajectoryGroup]) -> None:
    groups[1].trajectories[0].token_ids[-1] += 1


def change_mask(groups: list[TrajectoryGroup]) -> None:
    groups[0].trajectories[0].loss_mask[0] ^= 1


def change_log_prob(groups: list[TrajectoryGroup]) -> None:
    groups[0].trajectories[1].logprobs[0] += 1e-6


def change_reward(groups: list[TrajectoryGroup]) -> None:
    groups[0].trajectories[1].score.total += 1e-12


def lose_one(groups: list[TrajectoryGroup]) -> None:
    groups[0].trajectories[0].status = Status.STATUS_INTERNAL


def swap(groups: list[TrajectoryGroup]) -> None:
    groups.reverse()


def move(groups: list[TrajectoryGroup]) -> None:
    groups[1].position += 1


@pytest.mark.parametrize("change", [change_token, change_mask, change_log_prob, change_reward, lose_one, swap, move])
def test_every_bit_that_is_trained_on_counts(change: Callable[[list[TrajectoryGroup]], None]) -> None:
    groups = build_groups()
    change(groups)
    assert digest_tokens(map(arrive, groups)) != digest_tokens(map(arrive, build_groups()))


def test_the_digest_of_weights_is_that_of_all_files() -> None:
    one = Policy(files=[PolicyFile(name="model.safetensors", digest="d1")])
    assert digest_weights(one) == "d1"
    both = Policy(version=3, epoch=2, files=[*one.files, PolicyFile(name="more", digest="d2")])
    assert digest_weights(both) == digest_weights(Policy(files=both.files)) != digest_weights(one)
