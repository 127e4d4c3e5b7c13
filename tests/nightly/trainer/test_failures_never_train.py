"""Failure never trains: a batch with 91.6 % failed trajectories moves the weights exactly as its survivors alone do.

In every recipe; tests/component/trainer has some of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from failed_batches import RECIPES, Bench, assert_trains_as_survivors, build, model

__all__ = ["build", "model"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_batch_full_of_failures_trains_as_its_survivors_alone(recipe: str, build: Callable[..., Bench]) -> None:
    bench = build(*RECIPES[recipe])
    for seed in range(2):
        assert_trains_as_survivors(bench, recipe, seed)
