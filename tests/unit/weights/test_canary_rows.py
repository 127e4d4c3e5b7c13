"""What of an announced canary no engine scores."""

from __future__ import annotations

import math

import pytest

from forage_proto.v1.trajectory_pb2 import Policy
from forage_weights.announcement import CANARY_ROWS, CANARY_TOKENS, PolicyError, check_canary

VOCABULARY = 100


def make_policy(*rows: tuple[list[int], list[float]]) -> Policy:
    policy = Policy(version=3, epoch=1, uri="/policies/v3")
    for tokens, given in rows:
        policy.canary.rows.add(token_ids=tokens, logprobs=given)
    return policy


def test_rows_of_every_allowed_size_are_scored_and_none_need_be() -> None:
    longest = ([VOCABULARY - 1] * CANARY_TOKENS, [-1.0] * (CANARY_TOKENS - 1))
    check_canary(make_policy(), VOCABULARY)
    check_canary(make_policy(([0, 1], [-0.5]), *[longest] * (CANARY_ROWS - 1)), VOCABULARY)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([([1, 2], [-1.0])] * (CANARY_ROWS + 1), "of 5 rows, expected at most 4"),
        ([([1], [])], "row 0 has 1 tokens and 0 values, expected 2 to 64 tokens"),
        ([([1, 2], [-1.0]), ([1, 2, 3], [-1.0])], "row 1 has 3 tokens and 1 values"),
        ([([1] * (CANARY_TOKENS + 1), [-1.0] * CANARY_TOKENS)], "row 0 has 65 tokens"),
        ([([1, VOCABULARY], [-1.0])], "row 0 has token 100, expected fewer than 100"),
        ([([1, 2], [math.nan])], "row 0 has a log-probability that is not finite"),
        ([([1, 2], [-math.inf])], "row 0 has a log-probability that is not finite"),
    ],
)
def test_any_other_is_refused_with_its_row_and_value(rows: list[tuple[list[int], list[float]]], problem: str) -> None:
    with pytest.raises(PolicyError, match=f"policy version 3 .*{problem}"):
        check_canary(make_policy(*rows), VOCABULARY)
