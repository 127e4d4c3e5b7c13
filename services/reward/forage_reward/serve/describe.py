"""The description of the service: rewards, their parameters and uses, the version, and a configuration digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from forage_proto.v1 import reward_pb2
from forage_reward.reward import AnyReward
from forage_reward.wire import write_params
from forage_runtime.settings import RewardRoute, RewardSettings


def describe_rewards(rewards: Mapping[str, AnyReward], settings: RewardSettings) -> reward_pb2.DescribeResponse:
    """Describe every reward."""
    response = reward_pb2.DescribeResponse(version=version("forage-reward"), config_digest=config_digest(settings))
    for name, reward in rewards.items():
        description = response.rewards.add(name=name, summary=reward.summary, user=name in settings.user)
        description.parameters.extend(_list_parameters(reward.params))
        description.uses.extend(
            _list_uses(name, settings.routes, False) + _list_uses(name, settings.shadow_routes, True)
        )
    return response


def config_digest(settings: RewardSettings) -> str:
    """Return the sha256 of all settings that determine a score; the content of user code is not part of it."""
    tree = settings.model_dump(mode="json", include={"routes", "user", "shadow"})
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _list_parameters(params: type[BaseModel]) -> list[reward_pb2.RewardParameter]:
    parameters = []
    for name, field in params.model_fields.items():
        annotation = field.annotation
        kind = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
        default = "" if field.default is PydanticUndefined else json.dumps(field.default, default=str)
        parameters.append(
            reward_pb2.RewardParameter(name=name, type=kind, default_value=default, doc=field.description or "")
        )
    return parameters


def _list_uses(name: str, routes: Mapping[str, RewardRoute], shadow: bool) -> list[reward_pb2.RewardUse]:
    uses = []
    for source, route in routes.items():
        is_alone = len(route) == 1 and route[0].is_plain
        for part in route:
            if part.name == name:
                uses.append(_build_use(source, "" if is_alone else part.title, part.weight, part.params, shadow))
    return uses


def _build_use(
    source: str, component: str, weight: float, params: Mapping[str, object], shadow: bool
) -> reward_pb2.RewardUse:
    use = reward_pb2.RewardUse(data_source=source, component=component, weight=weight, shadow=shadow)
    write_params(use.params, params)
    return use
