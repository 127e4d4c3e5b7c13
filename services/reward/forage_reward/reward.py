"""The definition of a reward: a name, typed parameters and a pure function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from forage_reward.score import Score
from forage_reward.trajectory import GroundTruth, TrajectoryView

Scorer = Callable[[TrajectoryView, GroundTruth], Score]


class RewardParams(BaseModel):
    """Base of all parameters: immutable, no unknown names, finite numbers, no type conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


P = TypeVar("P", bound=RewardParams)


@dataclass(frozen=True)
class Reward(Generic[P]):
    """A registered reward.

    Attributes:
        compute_score: a pure function, linear in the size of its input, without I/O unless the reward is blocking.
        blocking: calls another process or service, and may take up to its own time limit.
    """

    name: str
    summary: str
    params: type[P]
    compute_score: Callable[[TrajectoryView, GroundTruth, P], Score]
    blocking: bool = False

    def bind(self, params: Mapping[str, object]) -> Scorer:
        """Fix the parameters of the reward.

        Raises:
            pydantic.ValidationError: a parameter is unknown or has a wrong value.
        """
        fixed = self.params.model_validate(dict(params))
        compute_score = self.compute_score
        return lambda view, truth: compute_score(view, truth, fixed)


AnyReward = Reward[Any]
