"""Failure never trains: a batch with 91.6 % failed trajectories moves the weights exactly as its survivors alone do.

All recipes are in tests/nightly/trainer.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from arrived_groups import arrive
from failed_batches import RECIPES, Bench, assert_trains_as_survivors, build, draw_batch, model
from trainer_parts import build_trajectory

from forage_proto.v1.trajectory_pb2 import Status
from forage_trainer.data import tensors

__all__ = ["build", "model"]


@pytest.mark.parametrize("recipe", ["grpo-token-mean", "multiturn-token-mean", "gae-token-mean"])
def test_a_batch_full_of_failures_trains_as_its_survivors_alone(recipe: str, build: Callable[..., Bench]) -> None:
    assert_trains_as_survivors(build(*RECIPES[recipe]), recipe, seed=0)


def test_one_failure_that_counts_changes_the_bits(build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof would notice: a rule that lets a failed search train is found."""
    bench = build()
    whole, alone = draw_batch(0, 0)
    expected = bench.train([alone])
    assert bench.train([whole])[0] == expected[0]
    failed = build_trajectory(whole[0].group_uid, 99, 0.0, status=Status.STATUS_TIMEOUT)
    crowded = max(whole, key=lambda group: sum(map(tensors.is_valid, arrive(group).trajectories)))
    crowded.trajectories.append(failed)
    assert bench.train([whole])[0] == expected[0]
    sound = tensors.is_valid
    monkeypatch.setattr(tensors, "is_valid", lambda row: sound(row) or row.sample == 99)
    assert bench.train([whole])[0] != expected[0]
