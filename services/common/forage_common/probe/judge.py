"""Continuations judged by the reward service: which are right, and which answers are the same."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from forage_common.clients.calls import RefusedError
from forage_common.clients.reward import RewardClient
from forage_common.probe.contexts import Thought
from forage_common.text.answers import normalize_answer
from forage_common.text.tags import CLOSE, OPEN, Tag
from forage_common.v1.reward_pb2 import ScoreItem
from forage_common.v1.trajectory_pb2 import Score, Span, Status, Trajectory

ANSWER_OPEN, ANSWER_CLOSE = OPEN[Tag.ANSWER], CLOSE[Tag.ANSWER]


class UnjudgedError(Exception):
    """The reward gave no verdict: its status, and why."""

    def __init__(self, score: Score) -> None:
        super().__init__(score.detail or f"the reward's status is {Status.Name(score.status)}")
        self.status = score.status


def is_correct(score: Score, validation: Score) -> bool:
    """Whether an answer is right: exactly 1.0 by the reward that training uses, or by exact match.

    The second is for rewards that judge the form of a trajectory besides its answer, such as `search_r1_format`: a
    forced answer has not the form that earns all of it.
    """
    return any(one.status == Status.STATUS_OK and one.total == 1.0 for one in (score, validation))


def answer_text(continuation: str) -> str:
    """A continuation as an answer block: on one line, and with the `<answer>` that the connective has opened."""
    flat = " ".join(continuation.splitlines())
    return flat if ANSWER_OPEN in flat else ANSWER_OPEN + flat


def parse_answer(trajectory: Trajectory, continuation: str) -> str | None:
    """The answer, in a form in which the same answers are equal texts; None where it is not closed."""
    text, closed, _ = answer_text(continuation).partition(ANSWER_CLOSE)
    if not closed:
        return None
    answer = text.rpartition(ANSWER_OPEN)[2]
    if trajectory.ground_truth.HasField("countdown_target"):
        return "".join(answer.split())
    return normalize_answer(answer)


async def find_correct(
    reward: RewardClient, trajectory: Trajectory, thought: Thought, continuations: Iterable[str], end_of_turn: str
) -> set[str]:
    """Those of the continuations that are right. Equal ones are judged once.

    Raises:
        UnjudgedError: the reward has no verdict on one; it must not count as wrong.
        UnavailableError: the reward gives no answer within its deadline.
        RefusedError: it refuses the request.
    """
    unique = sorted(set(continuations))
    items = [_item(trajectory, thought, number, text, end_of_turn) for number, text in enumerate(unique)]
    try:
        scored = await reward.score(items)
    except grpc.RpcError as error:
        raise RefusedError(f"the reward service refuses probes of {trajectory.id}: {error.details()}") from error
    for item in scored:
        if item.score.status not in (Status.STATUS_OK, Status.STATUS_ABSTAIN):
            raise UnjudgedError(item.score)
    return {text for text, item in zip(unique, scored, strict=True) if is_correct(item.score, item.validation_score)}


def _item(trajectory: Trajectory, thought: Thought, number: int, continuation: str, end_of_turn: str) -> ScoreItem:
    """What came before the turn, and in the turn's place the answer alone: what the thought says of answers, whole or
    cut in two, is not judged."""
    answer = Span(role=trajectory.spans[thought.span].role, text=answer_text(continuation))
    return ScoreItem(
        trajectory_id=f"{trajectory.id}/probe/{number}",
        data_source=trajectory.data_source,
        spans=[*trajectory.spans[: thought.span], answer],
        ground_truth=trajectory.ground_truth,
        end_of_turn=end_of_turn,
    )
