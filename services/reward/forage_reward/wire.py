"""Between protobuf messages and what rewards see and give."""

from __future__ import annotations

from forage_common.v1 import reward_pb2, trajectory_pb2
from forage_reward.score import Score, Status
from forage_reward.trajectory import Action, GroundTruth, Role, Span, TrajectoryView, Turn

_ROLES = {
    trajectory_pb2.ROLE_PROMPT: Role.PROMPT,
    trajectory_pb2.ROLE_MODEL: Role.MODEL,
    trajectory_pb2.ROLE_ENV: Role.ENV,
}
_ACTIONS = {
    trajectory_pb2.ACTION_KIND_INVALID: Action.INVALID,
    trajectory_pb2.ACTION_KIND_SEARCH: Action.SEARCH,
    trajectory_pb2.ACTION_KIND_ANSWER: Action.ANSWER,
}
_STATUSES = {
    Status.OK: trajectory_pb2.STATUS_OK,
    Status.ABSTAIN: trajectory_pb2.STATUS_ABSTAIN,
    Status.INVALID_INPUT: trajectory_pb2.STATUS_INVALID_INPUT,
    Status.TIMEOUT: trajectory_pb2.STATUS_TIMEOUT,
    Status.INTERNAL: trajectory_pb2.STATUS_INTERNAL,
}


class InvalidItemError(ValueError):
    """An item that no reward could judge; the message says why."""


def view_of(item: reward_pb2.ScoreItem) -> TrajectoryView:
    """The trajectory of an item.

    Raises:
        InvalidItemError: a span without an author, no span of the model, or a turn without an action.
    """
    spans = []
    for index, span in enumerate(item.spans):
        role = _ROLES.get(span.role)
        if role is None:
            raise InvalidItemError(f"span {index} has no known role ({span.role}): set prompt, model or env")
        spans.append(Span(role, span.text))
    if not any(span.role is Role.MODEL for span in spans):
        raise InvalidItemError("no span was written by the model, so there is nothing to score")
    return TrajectoryView(tuple(spans), item.end_of_turn, tuple(map(_turn_of, item.turns)))


def _turn_of(turn: trajectory_pb2.Turn) -> Turn:
    action = _ACTIONS.get(turn.action)
    if action is None:
        raise InvalidItemError(f"turn {turn.index} has no known action ({turn.action}): set invalid, search or answer")
    return Turn(action, turn.content, turn.executed and turn.retrieval_status == trajectory_pb2.STATUS_OK)


def truth_of(item: reward_pb2.ScoreItem) -> GroundTruth:
    """The ground truth of an item."""
    truth = item.ground_truth
    countdown = truth.countdown_target if truth.HasField("countdown_target") else None
    return GroundTruth(tuple(truth.targets), countdown, tuple(truth.countdown_numbers))


def to_proto(score: Score) -> trajectory_pb2.Score:
    """A score as a message."""
    return trajectory_pb2.Score(
        status=_STATUSES[score.status],
        total=score.total,
        components=[
            trajectory_pb2.Component(name=part.name, raw=part.raw, weighted=part.weighted) for part in score.components
        ],
        reward=score.reward,
        detail=score.detail,
    )
