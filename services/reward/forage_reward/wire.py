"""Conversions between protobuf messages and the inputs and results of rewards."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import lru_cache

from forage_proto.v1 import reward_pb2, trajectory_pb2
from forage_reward.score import Component, Score, Status
from forage_reward.trajectory import Action, GroundTruth, Role, Span, TrajectoryView, Turn, join_opening
from forage_runtime.text.enums import name_value

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
    """An item that no reward can score; the message says why."""


def read_view(item: reward_pb2.ScoreItem) -> TrajectoryView:
    """Read the trajectory of an item.

    Raises:
        InvalidItemError: a span without an author, no span of the model, or a turn without an action.
    """
    spans = []
    has_model_span = False
    for index, span in enumerate(item.spans):
        role = Role.OPENING if span.opening else _ROLES.get(span.role)
        if role is None:
            raise InvalidItemError(f"span {index} has no known role ({span.role}): set prompt, model or env")
        has_model_span = has_model_span or role is Role.MODEL
        spans.append(Span(role, span.text))
    if not has_model_span:
        raise InvalidItemError("no span was written by the model, so there is nothing to score")
    return TrajectoryView(join_opening(spans), item.end_of_turn, tuple(map(read_turn, item.turns)))


def read_turn(turn: trajectory_pb2.Turn) -> Turn:
    """Read a turn.

    Raises:
        InvalidItemError: its action is not known.
    """
    action = _ACTIONS.get(turn.action)
    if action is None:
        raise InvalidItemError(f"turn {turn.index} has no known action ({turn.action}): set invalid, search or answer")
    return Turn(action, turn.content, turn.executed and turn.retrieval_status == trajectory_pb2.STATUS_OK)


def read_truth(item: reward_pb2.ScoreItem) -> GroundTruth:
    """Read the ground truth of an item."""
    truth = item.ground_truth
    countdown = truth.countdown_target if truth.HasField("countdown_target") else None
    return GroundTruth(tuple(truth.targets), countdown, tuple(truth.countdown_numbers))


@lru_cache(maxsize=4096)
def to_proto(score: Score) -> trajectory_pb2.Score:
    """Convert a score. Callers share the message and must not change it: a batch has few distinct scores."""
    return trajectory_pb2.Score(
        status=_STATUSES[score.status],
        total=score.total,
        components=[
            trajectory_pb2.Component(name=part.name, raw=part.raw, weighted=part.weighted) for part in score.components
        ],
        reward=score.reward,
        detail=score.detail,
    )


_ROLE_NUMBERS = {role: number for number, role in _ROLES.items()}
_ACTION_NUMBERS = {action: number for number, action in _ACTIONS.items()}
_STATUS_NAMES = {number: status for status, number in _STATUSES.items()}


def format_status(status: trajectory_pb2.Status.ValueType) -> str:
    """Return the lower-case name of a status, as metrics, logs and score files show it."""
    return name_value(trajectory_pb2.Status, status).lower()


def from_proto(score: trajectory_pb2.Score) -> Score:
    """Convert a message; a status that no reward returns becomes INTERNAL."""
    components = tuple(Component(part.name, part.raw, part.weighted) for part in score.components)
    status = _STATUS_NAMES.get(score.status, Status.INTERNAL)
    return Score(status, score.total, components, score.reward, score.detail)


def build_item(view: TrajectoryView, truth: GroundTruth) -> reward_pb2.ScoreItem:
    """Build the item from which `read_view` and `read_truth` read an equal view and truth."""
    item = reward_pb2.ScoreItem(
        spans=[trajectory_pb2.Span(role=_ROLE_NUMBERS[span.role], text=span.text) for span in view.spans],
        ground_truth=trajectory_pb2.GroundTruth(
            targets=truth.targets,
            countdown_target=truth.countdown_target,
            countdown_numbers=truth.countdown_numbers,
        ),
        end_of_turn=view.end_of_turn,
    )
    for index, turn in enumerate(view.turns, 1):
        status = trajectory_pb2.STATUS_OK if turn.answered else trajectory_pb2.STATUS_UNSPECIFIED
        item.turns.add(
            index=index,
            action=_ACTION_NUMBERS[turn.action],
            content=turn.content,
            executed=turn.answered,
            retrieval_status=status,
        )
    return item


def write_params(field: MutableMapping[str, reward_pb2.ParameterValue], params: Mapping[str, object]) -> None:
    """Write parameters into a message's map; values of other types than number, text and bool are sent as text."""
    for name, value in params.items():
        if isinstance(value, bool):
            field[name].flag = value
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            field[name].integer = value
        elif isinstance(value, int | float):
            field[name].number = value
        else:
            field[name].text = str(value)


def read_params(field: Mapping[str, reward_pb2.ParameterValue]) -> dict[str, object]:
    """Read the parameters that `write_params` wrote."""
    kinds = {name: value.WhichOneof("value") for name, value in field.items()}
    return {name: getattr(field[name], kind) for name, kind in kinds.items() if kind}
