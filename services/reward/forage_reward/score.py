"""The result of a reward: a status, a total and the components that add up to it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

NO_TARGETS = "ground_truth.targets is empty: give at least one accepted answer"
"""Detail of an item without accepted answers, for a reward that compares with them."""


class Status(StrEnum):
    """Whether `Score.total` is a value. Trajectories that are neither OK nor ABSTAIN leave loss and baseline."""

    OK = "ok"
    ABSTAIN = "abstain"
    INVALID_INPUT = "invalid_input"
    TIMEOUT = "timeout"
    INTERNAL = "internal"


class Component(NamedTuple):
    """One rule's contribution: its value (`raw`) and what that adds to the total (`weighted`).

    A name that starts with "_" is for logs: it adds nothing, and nothing is ever trained on it.
    """

    name: str
    raw: float
    weighted: float


class Score(NamedTuple):
    """The result of one reward for one trajectory; `detail` says which rule applied, or why there is no value."""

    status: Status
    total: float
    components: tuple[Component, ...]
    reward: str
    detail: str


def sum_components(reward: str, components: tuple[Component, ...], detail: str) -> Score:
    """Build an OK score whose total is the sum of its weighted components."""
    return Score(Status.OK, sum(component.weighted for component in components), components, reward, detail)


def withhold_score(status: Status, reward: str, detail: str) -> Score:
    """Build a score without a value; `status` says why. Its total of 0 is a placeholder, never a reward."""
    return Score(status, 0.0, (), reward, detail)
