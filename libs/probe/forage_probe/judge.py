"""Verdicts of the reward service on continuations: which are correct, and which answers are equal."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from forage_probe.contexts import Thought
from forage_proto.v1.reward_pb2 import ScoreItem
from forage_proto.v1.trajectory_pb2 import Score, Span, Status, Trajectory
from forage_runtime.clients.calls import RefusedError
from forage_runtime.clients.reward import RewardClient
from forage_runtime.text.answers import normalize_answer
from forage_runtime.text.enums import name_value
from forage_runtime.text.tags import CLOSE, OPEN, Tag

ANSWER_OPEN, ANSWER_CLOSE = OPEN[Tag.ANSWER], CLOSE[Tag.ANSWER]


class UnjudgedError(Exception):
    """The reward service has no verdict; the status and the message have the reason."""

    def __init__(self, score: Score) -> None:
        super().__init__(score.detail or f"the reward's status is {name_value(Status, score.status, whole=True)}")
        self.status = score.status


def is_correct(score: Score, validation: Score) -> bool:
    """Whether an answer is correct: exactly 1.0 by the reward that training uses, or by exact match.

    Exact match is for rewards that also score the format of a trajectory, such as `search_r1_format`: a forced answer
    does not have the format of a full score.
    """
    return any(verdict.status == Status.STATUS_OK and verdict.total == 1.0 for verdict in (score, validation))


def to_answer_block(continuation: str) -> str:
    """Format a continuation as an answer block: on one line, with the `<answer>` that the connective has opened."""
    flat = " ".join(continuation.splitlines())
    return flat if ANSWER_OPEN in flat else ANSWER_OPEN + flat


def parse_answer(trajectory: Trajectory, continuation: str) -> str | None:
    """Parse the answer into a form in which equal answers are equal texts; None if its block is not closed."""
    text, closed, _ = to_answer_block(continuation).partition(ANSWER_CLOSE)
    if not closed:
        return None
    answer = text.rpartition(ANSWER_OPEN)[2]
    if trajectory.ground_truth.HasField("countdown_target"):
        return "".join(answer.split())
    return normalize_answer(answer)


async def find_correct(
    reward: RewardClient, trajectory: Trajectory, thought: Thought, continuations: Iterable[str], end_of_turn: str
) -> set[str]:
    """Find the correct continuations. Equal ones are scored once.

    Raises:
        UnjudgedError: the reward service has no verdict on one, which must not count as wrong.
        UnavailableError: the reward service does not answer within its deadline.
        RefusedError: the reward service rejects the request.
    """
    unique = sorted(set(continuations))
    items = [_build_item(trajectory, thought, number, text, end_of_turn) for number, text in enumerate(unique)]
    try:
        scored = await reward.score(items)
    except grpc.RpcError as error:
        raise RefusedError(f"the reward service rejects probes of {trajectory.id}: {error.details()}") from error
    for item in scored:
        if item.score.status not in (Status.STATUS_OK, Status.STATUS_ABSTAIN):
            raise UnjudgedError(item.score)
    return {text for text, item in zip(unique, scored, strict=True) if is_correct(item.score, item.validation_score)}


def _build_item(
    trajectory: Trajectory, thought: Thought, number: int, continuation: str, end_of_turn: str
) -> ScoreItem:
    """Build an item with the spans before the turn and, in its place, only the answer.

    What the thought, truncated or not, says about answers must not be scored, nor its opening, which nothing closes.
    """
    answer = Span(role=trajectory.spans[thought.span].role, text=to_answer_block(continuation))
    return ScoreItem(
        trajectory_id=f"{trajectory.id}/probe/{number}",
        data_source=trajectory.data_source,
        spans=[*(span for span in trajectory.spans[: thought.span] if thought.turn > 1 or not span.opening), answer],
        ground_truth=trajectory.ground_truth,
        end_of_turn=end_of_turn,
    )
