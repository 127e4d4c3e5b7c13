"""Settings of the rollout service: sampling, environments, the engine and its replicas."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field, model_validator

from forage_common.settings.base import Address, Section


class WeightUpdate(StrEnum):
    """What a new policy does to trajectories that run."""

    IN_FLIGHT = "in_flight"
    DRAIN = "drain"


class WeightTransport(StrEnum):
    """How new weights reach the engines."""

    FILESYSTEM = "filesystem"
    NCCL = "nccl"


class EngineSettings(Section):
    dtype: str = Field("auto", description="auto: float32 on CPU, the model's own on GPUs")
    enforce_eager: bool = True
    max_num_seqs: int = Field(128, ge=1)
    max_model_len: int = Field(768, ge=16)
    block_size: int = Field(32, ge=1)
    kv_cache_gib: float = Field(1.0, gt=0, description="CPU only")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    tensor_parallel_size: int = Field(1, ge=1)
    max_lora_rank: int = Field(0, ge=0, description="largest rank of a published LoRA adapter; 0 = whole policies only")
    hang_timeout_s: float = Field(
        60.0,
        gt=0,
        description="an engine that samples nothing for so long is replaced; an endpoint has so long for a generation",
    )
    endpoint: str = Field(
        "",
        pattern=r"^$|^https?://[^\s?#]+/v1$",
        description="URL, up to /v1, of an OpenAI-compatible server that samples in vLLM's place; it is not trained",
    )
    endpoint_model: str = Field("", description="its name there; empty = the only one that is served")
    endpoint_token_file: Path | None = Field(None, description="file with the bearer token that it asks for")


class ReplicaSettings(Section):
    min: int = Field(1, ge=1)
    max: int = Field(1, ge=1, description="above min: replicas are added as the queue grows")
    target_ongoing: float = Field(64.0, gt=0, description="requests a replica that autoscaling aims at")
    upscale_delay_s: float = Field(10.0, ge=0)
    downscale_delay_s: float = Field(300.0, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> ReplicaSettings:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self


class EnvironmentRoute(Section):
    name: str = Field("", description="a built-in environment: search or single_turn; or give path or entry_point")
    path: Path | None = Field(None, description="a Python file with an environment of your own")
    entry_point: str = Field("", description="module:class of an environment of your own")
    params: dict[str, float | int | str | bool] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_source(self) -> EnvironmentRoute:
        if bool(self.name) + bool(self.path) + bool(self.entry_point) != 1:
            raise ValueError("give exactly one of name, path and entry_point")
        return self


class WeightSettings(Section):
    update: WeightUpdate = Field(
        WeightUpdate.IN_FLIGHT,
        description="in_flight: trajectories go on under the new policy; drain: they end under the old one first",
    )
    transport: WeightTransport = WeightTransport.FILESYSTEM
    cache_dir: Path = Field(Path(".cache/policies"), description="policies fetched from other than local folders")


class RolloutSettings(Section):
    grpc_address: Address = "127.0.0.1:18630"
    health_address: Address = "127.0.0.1:18631"
    http_address: Address = Field("127.0.0.1:18632", description="/v1/ask and the OpenAI-compatible endpoints")
    auth_token_file: Path | None = Field(
        None, description="file with the bearer token that HTTP and gRPC callers must present; unset = none"
    )
    environments: dict[str, EnvironmentRoute] = Field(
        default_factory=dict, description="data_source → environment; search where none is given"
    )
    n: int = Field(8, ge=1, description="samples a prompt")
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, description="-1 = all")
    max_turns: int = Field(3, ge=0, description="turns with search; one last generation without may follow")
    max_start_length: int = Field(256, ge=1, description="tokens of the first prompt that are kept")
    max_prompt_length: int = Field(640, ge=1, description="tokens of context that a turn sees")
    max_response_length: int = Field(64, ge=1, description="tokens of one generation")
    max_obs_length: int = Field(192, ge=1, description="tokens of one observation")
    max_groups_in_flight: int = Field(32, ge=1)
    max_trajectories_in_flight: int = Field(0, ge=0, description="0 = four times engine.max_num_seqs for each replica")
    trajectory_timeout_s: float = Field(120.0, gt=0)
    retrieve_timeout_s: float = Field(30.0, gt=0, description="with all retries")
    score_timeout_s: float = Field(60.0, gt=0, description="with all retries")
    drain_timeout_s: float = Field(5.0, ge=0, description="on SIGTERM: running trajectories may end within")
    ray_address: str = Field("", description="of a Ray cluster to join; empty = a small one of its own")
    use_existing_app: bool = Field(
        False,
        description="serve the endpoints of a Ray Serve application that runs already, as KubeRay's RayService",
    )
    engine: EngineSettings = EngineSettings()
    engine_replicas: ReplicaSettings = ReplicaSettings()
    agent_replicas: ReplicaSettings = ReplicaSettings()
    weights: WeightSettings = WeightSettings()

    @model_validator(mode="after")
    def _existing_app_has_cluster(self) -> RolloutSettings:
        if self.use_existing_app and not self.ray_address:
            raise ValueError(
                "use_existing_app needs the address of the Ray cluster that runs the application: set ray_address"
            )
        return self
