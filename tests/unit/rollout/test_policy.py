"""Which of two policies is newer, and their names in vLLM."""

from __future__ import annotations

import pytest

from forage_proto.v1.trajectory_pb2 import Policy
from forage_weights.rollout.policy import format_label, is_newer, parse_label


@pytest.mark.parametrize(
    ("candidate", "serving", "newer"),
    [
        ((1, 0), None, True),
        ((1, 3), (1, 2), True),
        ((1, 2), (1, 2), False),
        ((1, 9), (2, 1), False),
        ((2, 1), (1, 9), True),
    ],
)
def test_a_later_epoch_wins_and_an_earlier_one_never_does(
    candidate: tuple[int, int], serving: tuple[int, int] | None, newer: bool
) -> None:
    served = None if serving is None else Policy(epoch=serving[0], version=serving[1])
    assert is_newer(Policy(epoch=candidate[0], version=candidate[1]), served) == newer


def test_a_version_string_is_read_back() -> None:
    assert parse_label(format_label(Policy(version=7, epoch=3))) == (7, 3)
    assert parse_label("default") == (0, 0)
