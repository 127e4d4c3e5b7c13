"""The context of a truncation: what preceded the thought, what is kept of it, and words that open an answer."""

from __future__ import annotations

from typing import Any

from forage_probe.contexts import CONNECTIVE, Thought, build_context, find_thought
from forage_proto.v1.probe_pb2 import CotBoundary
from forage_proto.v1.trajectory_pb2 import Role, Span, Status, Trajectory
from forage_runtime.settings import RolloutSettings


def test_the_connective_closes_the_thought_and_opens_an_answer() -> None:
    assert CONNECTIVE == " </think> Thus, the final answer is <answer> "


def test_a_context_is_what_the_policy_saw_and_the_kept_tokens() -> None:
    one = Trajectory(token_ids=range(100))
    thought = Thought(2, 50, 60, CotBoundary.COT_BOUNDARY_END, window=20, span=3, offset=0, texts=("x",) * 10)
    assert build_context(one, thought, 4, [-1, -2]) == [*range(20, 54), -1, -2]
    assert build_context(one, thought, 0, []) == [*range(20, 50)]


def test_a_thought_that_the_template_opened_begins_with_the_first_sampled_token() -> None:
    texts = ["who?", "<think>", "\n", "a", "b", "</think>", "<answer>x</answer>"]
    own = Trajectory(
        token_ids=range(len(texts)),
        prompt_length=3,
        status=Status.STATUS_OK,
        spans=[
            Span(role=Role.ROLE_PROMPT, begin=0, end=1, text=texts[0]),
            Span(role=Role.ROLE_PROMPT, begin=1, end=3, text="<think>\n", opening=True),
            Span(role=Role.ROLE_MODEL, begin=3, end=7, text="".join(texts[3:])),
        ],
    )
    decode: Any = lambda ids: [texts[number] for number in ids]  # noqa: E731 - stands for a vocabulary
    thought = find_thought(own, 1, decode, RolloutSettings())
    assert (thought.begin, thought.end, thought.texts) == (3, 5, ("a", "b"))
    assert (thought.boundary, thought.offset) == (CotBoundary.COT_BOUNDARY_THINK_CLOSE, 0)
