"""Settings of the reward service: routes, user rewards, workers."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from forage_common.settings.base import Address, Section


class RewardComponent(Section):
    name: str = Field(min_length=1, description="a registered reward")
    label: str = Field(
        "", pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]*)?$", description="names it in scores; empty = the reward's name"
    )
    weight: float = Field(1.0, allow_inf_nan=False)
    params: dict[str, float | int | str | bool] = Field(default_factory=dict)


class RewardRoute(Section):
    name: str = Field("", description="a registered reward; or give components")
    params: dict[str, float | int | str | bool] = Field(default_factory=dict)
    components: tuple[RewardComponent, ...] | None = Field(
        None, min_length=1, description="rewards that add up by their weights"
    )

    @property
    def title(self) -> str:
        """The reward, or the components joined by "+"."""
        return "+".join(part.label or part.name for part in self.components or ()) or self.name

    @model_validator(mode="after")
    def _one_form(self) -> RewardRoute:
        if bool(self.name) == (self.components is not None):
            raise ValueError("give either the name of one reward or components")
        if self.components is not None and self.params:
            raise ValueError("params belong to each of the components")
        labels = [part.label or part.name for part in self.components or ()]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"two components are called {label!r}: give each a label of its own")
        return self


class UserReward(Section):
    path: Path | None = Field(None, description="a Python file; or give entry_point")
    entry_point: str = Field("", description="module:function, or a name in the entry point group forage.rewards")
    function: str = Field("score", pattern=r"^[A-Za-z_]\w*$", description="of the file")
    timeout_s: float = Field(5.0, gt=0, description="of one call; then its process is killed and started again")
    memory_mib: int = Field(1024, ge=16, description="that the function may take beyond an empty interpreter")
    processes: int = Field(1, ge=1, description="how many calls may run at once, of every worker")

    @model_validator(mode="after")
    def _one_source(self) -> UserReward:
        if (self.path is None) == (not self.entry_point):
            raise ValueError("give either path or entry_point")
        return self


class RewardSettings(Section):
    grpc_address: Address = "127.0.0.1:18620"
    health_address: Address = "127.0.0.1:18621"
    routes: dict[str, RewardRoute] = Field(
        default_factory=lambda: {"world_facts": RewardRoute(name="search_r1_format")},
        description="data_source → reward",
    )
    user: dict[str, UserReward] = Field(default_factory=dict, description="rewards of your own, by name")
    shadow: dict[str, RewardRoute] = Field(
        default_factory=dict, description="data_source → a reward that also scores, for metrics only"
    )
    shadow_queue: int = Field(1024, ge=1, description="trajectories that wait for the shadow; others are dropped")
    workers: int = Field(1, ge=1, description="processes that serve the same port")
    max_queue: int = Field(8192, ge=1, description="trajectories in hand, of every worker; beyond: RESOURCE_EXHAUSTED")
