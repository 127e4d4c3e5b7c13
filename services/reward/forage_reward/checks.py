"""The checks of the reward service before it starts: every route, and every function of yours in its process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from forage_reward.isolation.user_rewards import UserParams, UserRewards
from forage_reward.registry import REWARDS
from forage_reward.reward import AnyReward, Reward
from forage_reward.router import resolve_route
from forage_reward.score import Score, Status, withhold_score
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_runtime.problems import Check, list_common_checks, run_checks
from forage_runtime.settings import Settings, UserReward


def list_checks(settings: Settings) -> Iterator[Check]:
    """List the checks that take no other process: a start makes these, and then loads your functions to keep them."""
    yield from list_common_checks(settings, "reward service", "reward")
    known = {**REWARDS, **{name: _stand_in(name) for name in settings.reward.user}}
    for source, route in settings.reward.routes.items():
        yield partial(resolve_route, route, known, f"reward.routes.{source}")


def list_all_checks(settings: Settings) -> Iterator[Check]:
    """List those, and the load of each of your functions in a process of its own."""
    yield from list_checks(settings)
    for name, user in settings.reward.user.items():
        yield partial(_load_function, settings, name, user)


def _load_function(settings: Settings, name: str, user: UserReward) -> None:
    one = {name: user.model_copy(update={"processes": 1})}
    UserRewards(one, REWARDS, settings.security.user_code).close()


def _stand_in(name: str) -> AnyReward:
    """A reward that a route may name, whether or not its function can be loaded."""

    def withhold(view: TrajectoryView, truth: GroundTruth, params: UserParams) -> Score:
        return withhold_score(Status.INTERNAL, name, "it is not loaded")

    return Reward(name, "your own", UserParams, withhold)


if __name__ == "__main__":
    run_checks(list_all_checks)
