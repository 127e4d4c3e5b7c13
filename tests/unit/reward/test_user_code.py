"""What a user's function may return: numbers of any kind, and nothing else."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import pytest

from forage_reward.isolation.user_code import ContractError, read_components
from forage_reward.score import Component


class Scalar:
    """As NumPy and PyTorch have them; neither is installed in this environment."""

    def __init__(self, value: object, ndim: int = 0) -> None:
        self.value, self.ndim = value, ndim

    def item(self) -> object:
        return self.value


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (0.25, 0.25),
        (Fraction(1, 4), 0.25),
        (Decimal("0.25"), 0.25),
        (Scalar(True), 1.0),
        (Scalar(False), 0.0),
        (Scalar(7), 7.0),
        (Scalar(0.5), 0.5),
    ],
)
def test_a_number_of_any_kind_is_a_score(value: object, want: float) -> None:
    assert read_components(value) == (Component("score", want, want),)
    assert read_components({"part": value, "_log": value}) == (
        Component("part", want, want),
        Component("_log", want, 0.0),
    )


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "a NoneType as value"),
        ("1.0", "a str as value"),
        ([True], "a list as value"),
        (1j, "a complex as value"),
        (Scalar(1.0, ndim=1), "a Scalar as value"),
        (Scalar("1"), "a Scalar as value"),
        (math.nan, "nan as value"),
        (Scalar(math.nan), "nan as value"),
        (Decimal("inf"), "inf as value"),
        ({"part": Scalar(math.inf)}, "inf as component 'part'"),
        ({"part": {"nested": True}}, "a dict as component 'part'"),
    ],
)
def test_anything_else_is_named(value: object, found: str) -> None:
    with pytest.raises(ContractError, match=f"returned {found}"):
        read_components(value)
