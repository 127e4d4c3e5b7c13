"""The one typed tree of settings.

Read from a YAML file, then the environment (`FORAGE__TRAINER__TOTAL_TRAINING_STEPS=10`), then the command line
(`trainer.total_training_steps=10`); later sources win. Unknown keys are errors that name the nearest known key.
Names follow verl's where verl has one.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from forage_common.errors import SettingsError

ENV_PREFIX = "FORAGE__"
Address = Annotated[str, Field(pattern=r"^[^:/\s]+:\d{1,5}$", description="host:port")]


class Section(BaseModel):
    """A node of the tree: immutable, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class EncoderPrecision(StrEnum):
    INT8 = "int8"
    FP32 = "fp32"


class RetrievalMode(StrEnum):
    """How passages are found."""

    BM25 = "bm25"
    DENSE = "dense"
    HYBRID = "hybrid"


class WeightUpdate(StrEnum):
    """What a new policy does to trajectories that run."""

    IN_FLIGHT = "in_flight"
    DRAIN = "drain"


class WeightTransport(StrEnum):
    """How new weights reach the engines."""

    FILESYSTEM = "filesystem"
    NCCL = "nccl"


class AdvantageEstimator(StrEnum):
    """Which advantage the actor is trained on."""

    GRPO = "grpo"


class RunSettings(Section):
    id: str = Field("local", pattern=r"^[A-Za-z0-9._-]+$", description="names the run's folder and its keys in Redis")
    dir: Path = Field(Path("runs"), description="folder of run folders")
    seed: int = Field(0, ge=0)

    @property
    def folder(self) -> Path:
        return self.dir / self.id


class RedisSettings(Section):
    url: str = "redis://127.0.0.1:18600/0"
    timeout_s: float = Field(10.0, gt=0, description="of one command")
    reclaim_idle_s: float = Field(10.0, gt=0, description="a worker silent for so long loses its entries to another")


class ModelSettings(Section):
    path: Path = Field(Path("models/tiny-policy"), description="a Hugging Face folder: the initial policy")


class DataSettings(Section):
    train_files: tuple[Path, ...] = (Path("data/world/train.parquet"),)
    val_files: tuple[Path, ...] = (Path("data/world/test.parquet"),)
    corpus: Path = Path("data/world/corpus.jsonl")
    train_batch_size: int = Field(16, ge=1, description="prompts (groups) an optimizer step")
    val_max_samples: int = Field(-1, description="-1 = all")


class EncoderSettings(Section):
    model: str = Field("minilm", description="minilm (bundled), or a folder in Hugging Face's layout")
    convention: str = Field(
        "auto", description="prefixes, pooling and length: minilm, e5, bge, …; auto = by the model's name"
    )
    precision: EncoderPrecision = EncoderPrecision.INT8
    url: str = Field("", description="a text-embeddings-inference endpoint that encodes queries instead")
    timeout_s: float = Field(10.0, gt=0, description="of one call to url")


class RerankSettings(Section):
    model: str = Field("", description="folder of a cross-encoder in Hugging Face's layout; empty = none")
    url: str = Field("", description="a text-embeddings-inference endpoint with /rerank; empty = none")
    depth: int = Field(20, ge=1, description="passages a query that are judged again")
    timeout_s: float = Field(10.0, gt=0, description="of one call to url")


class RetrieverSettings(Section):
    http_address: Address = "127.0.0.1:18610"
    grpc_address: Address = "127.0.0.1:18611"
    index: Path | None = Field(
        None, description="an index folder made by `forage index build`; unset = built from data.corpus"
    )
    mode: RetrievalMode = RetrievalMode.HYBRID
    topk: int = Field(3, ge=1, description="passages a query, where the request does not say")
    faiss_factory: str = Field("Flat", description="FAISS index factory string of the dense index")
    filter_fields: tuple[str, ...] = Field((), description="corpus fields that requests may filter by")
    ef_search: int = Field(128, ge=1, description="candidates that an HNSW graph keeps")
    nprobe: int = Field(32, ge=1, description="cells that an IVF index visits")
    refine: int = Field(
        0,
        ge=0,
        description="exact scores for the best refine x topk, where vectors are stored; 0 = by itself",
    )
    rrf_k: int = Field(60, ge=1, description="damping of reciprocal rank fusion")
    bm25_weight: float = Field(2.0, ge=0, description="of the BM25 ranking in hybrid mode")
    dense_weight: float = Field(1.0, ge=0, description="of the dense ranking in hybrid mode")
    title_weight: float = Field(4.0, ge=0, description="of passages whose title is the query, in hybrid mode")
    encoder: EncoderSettings = EncoderSettings()
    rerank: RerankSettings = RerankSettings()
    shards: tuple[Address, ...] = Field(
        (), description="gRPC addresses of retrievers, each with a part of the corpus; this one merges their answers"
    )
    max_waiting: int = Field(8192, ge=1, description="queries in the queue; beyond it 503 with Retry-After")
    queue_timeout_s: float = Field(30.0, gt=0, description="a query that waited longer is given up")
    cache_dir: Path = Field(
        Path(".cache/retriever"), description="built indexes, by digest of what they were built from"
    )
    threads: int = Field(1, ge=1)


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
    hang_timeout_s: float = Field(60.0, gt=0, description="an engine that samples nothing for so long is replaced")


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
    engine: EngineSettings = EngineSettings()
    engine_replicas: ReplicaSettings = ReplicaSettings()
    agent_replicas: ReplicaSettings = ReplicaSettings()
    weights: WeightSettings = WeightSettings()


class AlgorithmSettings(Section):
    adv_estimator: AdvantageEstimator = AdvantageEstimator.GRPO
    norm_adv_by_std_in_grpo: bool = True
    rollout_is_threshold: float | None = Field(
        2.0, gt=1, description="cap of the trainer-to-engine importance weight of a token; null = no correction"
    )


class OptimSettings(Section):
    lr: float = Field(1e-6, gt=0)
    lr_warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.01, ge=0)
    clip_grad: float = Field(1.0, gt=0)


class ActorSettings(Section):
    optim: OptimSettings = OptimSettings()
    ppo_mini_batch_size: int = Field(16, ge=1, description="prompts an update; divides data.train_batch_size")
    ppo_epochs: int = Field(1, ge=1)
    clip_ratio: float = Field(0.2, gt=0)
    clip_ratio_high: float = Field(0.28, gt=0)
    loss_agg_mode: str = Field("token-mean", pattern="^(token-mean|seq-mean-token-sum|seq-mean-token-mean)$")
    use_kl_loss: bool = True
    kl_loss_coef: float = Field(0.001, ge=0)
    kl_loss_type: str = Field("low_var_kl", pattern="^(kl|abs|mse|low_var_kl)$")
    entropy_coeff: float = 0.0
    ppo_max_token_len_per_gpu: int = Field(8192, ge=1)


class TrainerSettings(Section):
    health_address: Address = "127.0.0.1:18641"
    algorithm: AlgorithmSettings = AlgorithmSettings()
    actor: ActorSettings = ActorSettings()
    total_training_steps: int = Field(100, ge=1)
    max_staleness: int = Field(1, ge=0, description="batches that may be outstanding beyond the one being trained on")
    save_freq: int = Field(5, ge=1, description="steps a checkpoint; groups are acknowledged with it")
    max_ckpt_to_keep: int = Field(2, ge=1)
    test_freq: int = Field(-1, description="steps a validation; -1 = only before and after")
    val_before_train: bool = True
    resume: bool = True
    batch_timeout_s: float = Field(600.0, gt=0, description="wait for a batch before giving up with an error")
    threads: int = Field(2, ge=1, description="of torch, on CPU")


class Settings(Section):
    """Everything a run can be told."""

    run: RunSettings = RunSettings()
    redis: RedisSettings = RedisSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    retriever: RetrieverSettings = RetrieverSettings()
    reward: RewardSettings = RewardSettings()
    rollout: RolloutSettings = RolloutSettings()
    trainer: TrainerSettings = TrainerSettings()

    def to_yaml(self) -> str:
        """The resolved tree, as a file that `load` reads back to an equal tree."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Resolve settings from a YAML file, the environment and `a.b=c` overrides, in this order.

    Raises:
        SettingsError: a key is unknown or a value does not fit; the message names both and the remedy.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        tree = _read(file)
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX):
            _put(tree, name.removeprefix(ENV_PREFIX).lower().split("__"), _scalar(value), name)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise SettingsError(f"'{override}' is not a setting: write key.key=value, for instance run.seed=1")
        _put(tree, key.split("."), _scalar(value), override)
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_sentence(error)) from None


def from_arguments(arguments: Sequence[str]) -> Settings:
    """Settings of a service process: `[--config FILE] [key.key=value …]`."""
    rest = list(arguments)
    file = None
    if rest[:1] == ["--config"]:
        if len(rest) < 2:
            raise SettingsError("--config needs a file: write --config configs/demo.yaml")
        file = Path(rest[1])
        rest = rest[2:]
    return load(file, rest)


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text()) or {}
    except OSError as error:
        raise SettingsError(
            f"settings file {file} cannot be read ({error.strerror}): give an existing YAML file"
        ) from None
    except yaml.YAMLError as error:
        raise SettingsError(f"settings file {file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise SettingsError(f"settings file {file} must hold a mapping of sections, not a {type(tree).__name__}")
    return tree


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _put(tree: dict[str, Any], path: list[str], value: Any, source: str) -> None:
    node = tree
    for key in path[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise SettingsError(f"{source}: '{key}' is a value, not a section")
        node = child
    node[path[-1]] = value


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    name = ".".join(path)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _keys(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known here: {', '.join(known)}"
        return f"unknown setting '{name}': {hint}{more}"
    return f"setting '{name}' is {first['input']!r}: {first['msg']}{more}"


def _keys(path: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Settings
    for key in path:
        field = model.model_fields.get(key)
        if field is None:
            return []
        candidates = [field.annotation, *get_args(field.annotation)]
        sections = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not sections:
            return []
        model = sections[0]
    return sorted(model.model_fields)
