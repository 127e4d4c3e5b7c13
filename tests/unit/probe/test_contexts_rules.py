"""The context of a truncation: what preceded the thought, what is kept of it, and words that open an answer."""

from __future__ import annotations

from forage_common.v1.probe_pb2 import CotBoundary
from forage_common.v1.trajectory_pb2 import Trajectory
from forage_probe.contexts import CONNECTIVE, Thought, build_context


def test_the_connective_closes_the_thought_and_opens_an_answer() -> None:
    assert CONNECTIVE == " </think> Thus, the final answer is <answer> "


def test_a_context_is_what_the_policy_saw_and_the_kept_tokens() -> None:
    one = Trajectory(token_ids=range(100))
    thought = Thought(2, 50, 60, CotBoundary.COT_BOUNDARY_END, window=20, span=3, offset=0, texts=("x",) * 10)
    assert build_context(one, thought, 4, [-1, -2]) == [*range(20, 54), -1, -2]
    assert build_context(one, thought, 0, []) == [*range(20, 50)]
