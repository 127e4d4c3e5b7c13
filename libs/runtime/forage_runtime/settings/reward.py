"""Settings of the reward service: routes, user rewards, workers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    WrapSerializer,
    field_validator,
    model_validator,
)

from forage_runtime.settings.base import Address, Params, Section, is_function_name
from forage_runtime.settings.security import UserCode


class RewardPart(Section):
    """The reward of a data source, or one of those of a list, whose weighted scores are added up."""

    name: str = Field(min_length=1, description="Name of a registered reward")
    label: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]*)?$",
        description="Name of the part in scores and metrics; empty: the reward's name",
    )
    weight: float = Field(1.0, allow_inf_nan=False, description="Factor of the part in the total")
    params: Params = Field(default_factory=dict, description="Parameters of the reward")

    @property
    def title(self) -> str:
        return self.label or self.name

    @property
    def is_plain(self) -> bool:
        """Whether its score is the reward's own."""
        return not self.label and self.weight == 1


def _accept_one(value: Any) -> Any:
    if not isinstance(value, Mapping | RewardPart | list | tuple):
        raise ValueError("expected a reward as {name: em}, or a list of them")
    return (value,) if isinstance(value, Mapping | RewardPart) else value


def _write_one(parts: tuple[RewardPart, ...], write: SerializerFunctionWrapHandler) -> Any:
    written = write(parts)
    return written[0] if len(written) == 1 else written


def _check_titles(parts: tuple[RewardPart, ...]) -> tuple[RewardPart, ...]:
    titles = [part.title for part in parts]
    for title in titles:
        if titles.count(title) > 1:
            raise ValueError(f"two parts are called {title!r}: give each a label of its own")
    return parts


RewardRoute = Annotated[
    tuple[RewardPart, ...],
    BeforeValidator(_accept_one),
    Field(min_length=1),
    AfterValidator(_check_titles),
    WrapSerializer(_write_one),
    "section or list of section",
]
"""The reward of a data source: a part, or several that are added up."""


def make_route(name: str, params: Mapping[str, float | int | str | bool] | None = None) -> tuple[RewardPart, ...]:
    """The route of a single reward."""
    return (RewardPart(name=name, params=dict(params or {})),)


def join_titles(route: Sequence[RewardPart]) -> str:
    """The reward of a route, or its parts joined by "+"."""
    return "+".join(part.title for part in route)


class UserReward(UserCode):
    """A reward function of your own; it runs in separate processes with limits, without network and files."""

    function: str = Field(
        description="FILE.py:FUNCTION, MODULE:FUNCTION, or a name in the entry point group forage.rewards"
    )
    timeout_s: float = Field(5.0, gt=0, description="Limit of one call, after which its process is restarted")
    memory_mib: int = Field(
        1024, ge=16, description="Memory that the function may use beyond that of an empty interpreter"
    )
    processes: int = Field(1, ge=1, description="Processes per worker, each with one call at a time")

    @field_validator("function")
    @classmethod
    def _check_function(cls, source: str) -> str:
        is_installed = re.fullmatch(r"[\w.-]+", source) and not source.endswith(".py")
        if not is_installed and not is_function_name(source):
            raise ValueError(
                "expected FILE.py:FUNCTION or MODULE:FUNCTION, such as my_reward.py:score, or a name in the entry "
                "point group forage.rewards"
            )
        return source


class RewardSettings(Section):
    """The reward service."""

    grpc_address: Address = Field("127.0.0.1:18620", description="Address of the gRPC API")
    health_address: Address = Field("127.0.0.1:18621", description="Address of health and metrics over HTTP")
    auth_token_file: Path | None = Field(
        None, description="File with the bearer tokens, a line each, one of which callers must send; null: no token"
    )
    routes: dict[str, RewardRoute] = Field(
        default_factory=lambda: {"world_facts": make_route("search_r1_format")},
        description="Reward of each data source (data_source in the Parquet file), or a list of some to add up",
    )
    user: dict[str, UserReward] = Field(default_factory=dict, description="Reward functions of your own, by name")
    shadow: dict[str, str] = Field(
        default_factory=dict,
        description="Data source → entry of routes that scores it a second time, only for metrics; such an entry may be"
        " no data source's",
    )
    workers: int = Field(1, ge=1, description="Processes that serve the gRPC port")

    @property
    def shadow_routes(self) -> dict[str, RewardRoute]:
        """Data source → its second reward."""
        return {source: self.routes[route] for source, route in self.shadow.items()}

    @model_validator(mode="after")
    def _check_shadow(self) -> RewardSettings:
        for source, route in self.shadow.items():
            if route not in self.routes or route == source:
                others = ", ".join(sorted({*self.routes} - {source})) or "none"
                raise ValueError(f"shadow.{source} is {route!r}: expected another entry of reward.routes ({others})")
        return self
