"""What is being served, in words and numbers: parameters, uses, version, and a digest of the configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from forage_common.settings import RewardRoute, RewardSettings
from forage_common.v1 import reward_pb2
from forage_reward.reward import AnyReward
from forage_reward.wire import set_params


def described(rewards: Mapping[str, AnyReward], settings: RewardSettings) -> reward_pb2.DescribeResponse:
    """Every reward; callers pick."""
    response = reward_pb2.DescribeResponse(version=version("forage-reward"), config_digest=config_digest(settings))
    for name, reward in rewards.items():
        found = response.rewards.add(name=name, summary=reward.summary, user=name in settings.user)
        found.parameters.extend(_parameters(reward.params))
        found.uses.extend(_uses(name, settings.routes, False) + _uses(name, settings.shadow, True))
    return response


def config_digest(settings: RewardSettings) -> str:
    """sha256 of all settings that decide a score; what is in user code is not part of it."""
    tree = settings.model_dump(mode="json", include={"routes", "user", "shadow"})
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _parameters(params: type[BaseModel]) -> list[reward_pb2.RewardParameter]:
    found = []
    for name, field in params.model_fields.items():
        annotation = field.annotation
        kind = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
        default = "" if field.default is PydanticUndefined else json.dumps(field.default, default=str)
        found.append(
            reward_pb2.RewardParameter(name=name, type=kind, default_value=default, doc=field.description or "")
        )
    return found


def _uses(name: str, routes: Mapping[str, RewardRoute], shadow: bool) -> list[reward_pb2.RewardUse]:
    uses = []
    for source, route in routes.items():
        if route.name == name:
            uses.append(_use(source, "", 1.0, route.params, shadow))
        for part in route.components or ():
            if part.name == name:
                uses.append(_use(source, part.label or part.name, part.weight, part.params, shadow))
    return uses


def _use(
    source: str, component: str, weight: float, params: Mapping[str, object], shadow: bool
) -> reward_pb2.RewardUse:
    use = reward_pb2.RewardUse(data_source=source, component=component, weight=weight, shadow=shadow)
    set_params(use.params, params)
    return use
