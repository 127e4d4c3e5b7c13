"""Settings of the rollout service: sampling, environments, the engine and its replicas."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from forage_runtime.settings.base import Address, Device, Params, Section, Url
from forage_runtime.settings.security import UserCode

DEFAULT_ENVIRONMENT = "search"
"""The environment of data sources that the settings do not list."""


class EngineSettings(Section):
    """The inference engine (vLLM, names as vLLM's), or an endpoint in its place."""

    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = Field(
        "auto", description="Type of weights and activations; auto: float32 on CPU, the model's on GPU"
    )
    max_num_seqs: int = Field(128, ge=1, description="Most sequences that are sampled at once")
    max_model_len: int = Field(768, ge=16, description="Longest context, prompt and generation together")
    kv_cache_gib: float = Field(1.0, gt=0, description="CPU: size of the KV cache")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="GPU: share of its memory for the engine")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share one replica by tensor parallelism")
    max_lora_rank: int = Field(
        0, ge=0, description="Highest rank of published LoRA adapters; 0: only whole policies are loaded"
    )
    hang_timeout_s: float = Field(
        60.0, gt=0, description="Time without a sampled token until an engine is replaced; limit of an endpoint's call"
    )
    args: Annotated[dict[str, Any], "map of values"] = Field(
        default_factory=dict, description="Further arguments of vLLM's AsyncEngineArgs, by its names"
    )
    endpoint: Url = Field(
        "",
        pattern=r"^$|^https?://[^\s?#]+/v1$",
        description="URL, up to /v1, of an OpenAI-compatible server that samples instead of vLLM and is not trained",
    )
    endpoint_model: str = Field("", description="Model name at the endpoint; empty: the only one that it serves")
    endpoint_token_file: Path | None = Field(None, description="File with the bearer token of the endpoint")


class ReplicaSettings(Section):
    """Replicas of a Ray Serve deployment."""

    min: int = Field(1, ge=1, description="Fewest replicas")
    max: int = Field(1, ge=1, description="Most replicas; above min, Ray Serve adds replicas as requests queue up")

    @model_validator(mode="after")
    def _check_order(self) -> ReplicaSettings:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self


class EnvironmentRoute(UserCode):
    """The environment of a data source: a built-in one or your own, which runs in a process of its own."""

    name: str = Field(
        min_length=1, description="Built in: search, single_turn or external; or FILE.py:CLASS or MODULE:CLASS"
    )
    params: Params = Field(default_factory=dict, description="Parameters of the environment")
    timeout_s: float = Field(
        30.0, gt=0, description="Longest that your code may keep its event loop busy; then its process is restarted"
    )
    memory_mib: int = Field(
        2048, ge=16, description="Memory that your code may use beyond that of an empty interpreter"
    )

    @property
    def is_own(self) -> bool:
        """Whether it is code of the user's own."""
        return ":" in self.name

    @model_validator(mode="after")
    def _check_source(self) -> EnvironmentRoute:
        of_own = self.model_fields_set & {*UserCode.model_fields, "timeout_s", "memory_mib"}
        own_values = {name for name in of_own if getattr(self, name) != EnvironmentRoute.model_fields[name].default}
        if own_values and not self.is_own:
            raise ValueError(f"{', '.join(sorted(own_values))}: for code of your own; {self.name} is built in")
        return self

    def __str__(self) -> str:
        """What tells it from others. The folder of a file does not, as machines differ in it."""
        name = Path(self.name).name if self.is_own else self.name
        digest = hashlib.sha256(json.dumps(self.params, sort_keys=True, default=str).encode()).hexdigest()
        return f"{name} (parameters {digest[:8]})" if self.params else name


class WeightSettings(Section):
    """How engines get new policies."""

    update: Literal["in_flight", "drain"] = Field(
        "in_flight",
        description="in_flight: running trajectories continue under the new policy; drain: they finish first",
    )
    transport: Literal["filesystem", "direct"] = Field(
        "filesystem",
        description="filesystem: policies are read where they are published; direct: the trainer sends them",
    )
    canary: Literal["refuse", "warn", "off"] = Field(
        "refuse",
        description="What happens to a loaded policy that does not give the trainer's log-probabilities of a few "
        "tokens; refuse: it is not served; warn: it is",
    )
    cache_dir: Path = Field(Path(".cache/policies"), description="Folder of policies fetched from remote storage")


class RolloutSettings(Section):
    """The rollout service."""

    grpc_address: Address = Field("127.0.0.1:18630", description="Address of the gRPC API")
    health_address: Address = Field("127.0.0.1:18631", description="Address of health and metrics over HTTP")
    http_address: Address = Field("127.0.0.1:18632", description="Address of /v1/ask and the OpenAI-compatible API")
    auth_token_file: Path | None = Field(
        None, description="File with the bearer tokens, a line each, one of which callers must send; null: no token"
    )
    environments: dict[str, EnvironmentRoute] = Field(
        default_factory=dict, description="Environment of each data source; search for those not listed"
    )
    n: int = Field(8, ge=1, le=1024, description="Samples per prompt (group size)")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0: greedy; training needs 0.01 or more")
    top_p: float = Field(1.0, gt=0, le=1, description="Probability of the tokens sampled from; training needs 1")
    top_k: int = Field(
        -1, ge=-(2**31), lt=2**31, description="Most likely tokens sampled from; -1: all, which training needs"
    )
    max_turns: int = Field(3, ge=0, description="Most turns with an action; one final generation without may follow")
    max_start_length: int = Field(256, ge=1, description="Length of the initial prompt; the last tokens are kept")
    max_prompt_length: int = Field(640, ge=1, description="Length of the context of a turn; the last tokens are kept")
    max_response_length: int = Field(64, ge=1, description="Length of the generation of one turn")
    max_obs_length: int = Field(192, ge=1, description="Length of one observation; longer ones are truncated")
    max_groups_in_flight: int = Field(
        256,
        ge=1,
        description="Most groups in progress per dispatcher; below that it runs as many as engines have room for",
    )
    max_trajectories_in_flight: int = Field(
        0,
        ge=0,
        description="Most trajectories in progress per dispatcher; 0: four times engine.max_num_seqs per engine",
    )
    max_agents: int = Field(
        8,
        ge=1,
        description="Most replicas of agents; from one on, Ray Serve adds replicas as requests queue up, but no more"
        " than CPUs where the service starts its own Ray",
    )
    max_dispatchers: int = Field(
        4,
        ge=1,
        description="Most replicas of dispatchers; from one on, Ray Serve adds replicas as groups in flight grow, but"
        " no more than CPUs where the service starts its own Ray",
    )
    trajectory_timeout_s: float = Field(120.0, gt=0, description="Limit of one trajectory")
    retrieve_timeout_s: float = Field(30.0, gt=0, description="Limit of one search with all its retries")
    score_timeout_s: float = Field(60.0, gt=0, description="Limit of scoring a group with all retries")
    drain_timeout_s: float = Field(5.0, ge=0, description="Time for running trajectories to finish after SIGTERM")
    device: Device = Field(
        "auto", description="Where engines compute; auto: on GPUs where PyTorch was built for them, else on CPUs"
    )
    ray_address: str = Field("", description="Address of a Ray cluster to join; empty: a local one is started")
    use_existing_app: bool = Field(
        False, description="Serve the endpoints of a Ray Serve application that runs already, as in a RayService"
    )
    engine: EngineSettings = EngineSettings()
    engine_replicas: ReplicaSettings = ReplicaSettings()
    weights: WeightSettings = WeightSettings()

    @property
    def longest_trajectory(self) -> int:
        """Most tokens of a trajectory, its prompt included; an environment of your own may have more turns."""
        generations = (self.max_turns + 1) * self.max_response_length
        return self.max_start_length + generations + self.max_turns * self.max_obs_length

    @property
    def longest_group_s(self) -> float:
        """Seconds after which a group has ended, whatever fails: those of its trajectories and of its scores.

        Sessions (`external`) begin when a worker takes them, which may be later.
        """
        return self.trajectory_timeout_s + self.score_timeout_s

    @property
    def environment_names(self) -> dict[str, str]:
        """Data source → its environment, of those that the settings list."""
        return {source: str(route) for source, route in self.environments.items()}

    @model_validator(mode="after")
    def _check_existing_app(self) -> RolloutSettings:
        if self.use_existing_app and not self.ray_address:
            raise ValueError("use_existing_app needs the Ray cluster that runs the application: set ray_address")
        return self
