"""What a reward is: a name, typed parameters and a pure function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from forage_reward.score import Score
from forage_reward.trajectory import GroundTruth, TrajectoryView

Scorer = Callable[[TrajectoryView, GroundTruth], Score]


class RewardParams(BaseModel):
    """Base of all parameters: immutable, closed to unknown names, finite numbers, no conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


P = TypeVar("P", bound=RewardParams)


@dataclass(frozen=True)
class Reward(Generic[P]):
    """A registered reward.

    Attributes:
        judge: pure, linear in its input, and without input or output, unless the reward is blocking.
        blocking: asks another process or service, so it may take up to a time limit of its own.
    """

    name: str
    summary: str
    params: type[P]
    judge: Callable[[TrajectoryView, GroundTruth, P], Score]
    blocking: bool = False

    def bind(self, params: Mapping[str, object]) -> Scorer:
        """The reward with its parameters fixed.

        Raises:
            pydantic.ValidationError: a parameter is unknown or does not fit.
        """
        fixed = self.params.model_validate(dict(params))
        judge = self.judge
        return lambda view, truth: judge(view, truth, fixed)


AnyReward = Reward[Any]
