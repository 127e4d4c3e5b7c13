"""Rewards by name. A new reward is one file in `rewards/` and one line in `REWARDS`."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from forage_reward.reward import AnyReward, Scorer
from forage_reward.rewards import countdown, em, f1, llm_judge, math, search_r1_format, structured, subem
from forage_runtime.errors import SettingsError

REWARDS: Mapping[str, AnyReward] = {
    reward.name: reward
    for reward in (
        em.REWARD,
        subem.REWARD,
        f1.REWARD,
        search_r1_format.REWARD,
        structured.REWARD,
        countdown.REWARD,
        math.REWARD,
        llm_judge.REWARD,
    )
}


def bind_reward(
    name: str, params: Mapping[str, object], where: str, rewards: Mapping[str, AnyReward] | None = None
) -> Scorer:
    """Validate the parameters of the reward `name` and bind them.

    Args:
        where: the setting that names the reward, for error messages.
        rewards: the known rewards, `REWARDS` by default.

    Raises:
        SettingsError: an unknown reward or parameter, or an invalid value.
    """
    rewards = REWARDS if rewards is None else rewards
    reward = rewards.get(name)
    if reward is None:
        raise SettingsError(
            f"{where} asks for the reward '{name}', which does not exist: known are {', '.join(rewards)}"
        )
    try:
        return reward.bind(params)
    except ValidationError as error:
        first = error.errors()[0]
        parameter = ".".join(str(part) for part in first["loc"])
        known = ", ".join(reward.params.model_fields)
        value = "not shown, as it may hold a password" if "@" in str(first["input"]) else repr(first["input"])
        problem = "does not exist" if first["type"] == "extra_forbidden" else f"is {value}: {first['msg']}"
        raise SettingsError(f"{where}.params.{parameter} {problem} (parameters of {name}: {known})") from None
