"""Countdown: how close to its target an equation must be."""

from __future__ import annotations

import pytest

from forage_reward.rewards.countdown import find_violation


@pytest.mark.parametrize(
    ("equation", "target", "numbers", "is_right"),
    [
        ("3000001 / 1000000", 3, (3000001, 1000000), True),
        ("300001 / 100000", 3, (300001, 100000), False),
        ("299999 / 100000", 3, (299999, 100000), False),
        ("100 / 33", 3, (100, 33), False),
    ],
)
def test_an_equation_is_right_within_a_hundred_thousandth(
    equation: str, target: int, numbers: tuple[int, ...], is_right: bool
) -> None:
    assert (find_violation(equation, target, numbers) == "") is is_right
