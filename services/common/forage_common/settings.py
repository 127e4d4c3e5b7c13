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


KL_KINDS = "^(kl|abs|mse|low_var_kl)$"
"""Estimates of a token's KL to the reference."""


class AdvantageEstimator(StrEnum):
    """Which advantage the actor is trained on."""

    GRPO = "grpo"
    GRPO_MULTITURN = "grpo_multiturn"
    GAE = "gae"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"

    @property
    def least_samples(self) -> int:
        """Valid samples that a prompt needs to teach something: two where they are compared with each other."""
        return 1 if self in (AdvantageEstimator.GAE, AdvantageEstimator.REINFORCE_PLUS_PLUS) else 2


class RewardPlacement(StrEnum):
    """Where a score with rewards of single turns lands; any other score is on the last state token."""

    AUTO = "auto"
    TURN_PROPORTIONAL = "turn_proportional"
    FINAL_TOKEN_ONLY = "final_token_only"


class KlControl(StrEnum):
    """What becomes of the coefficient of a KL in the reward."""

    FIXED = "fixed"
    ADAPTIVE = "adaptive"


class OffPolicyCorrection(StrEnum):
    """What is done about tokens that the engine sampled under slightly other probabilities than the trainer's."""

    NONE = "none"
    TIS = "tis"
    DECOUPLED = "decoupled"
    ICEPOP = "icepop"


class RunSettings(Section):
    id: str = Field("local", pattern=r"^[A-Za-z0-9._-]+$", description="names the run's folder and its keys in Redis")
    dir: Path = Field(Path("runs"), description="folder of run folders")
    seed: int = Field(0, ge=0)

    @property
    def folder(self) -> Path:
        return self.dir / self.id


class RedisSettings(Section):
    url: str = "redis://127.0.0.1:18600/0"
    password_file: Path | None = Field(None, description="file with the server's password, where the URL has none")
    timeout_s: float = Field(10.0, gt=0, description="of one command")
    reclaim_idle_s: float = Field(10.0, gt=0, description="a worker silent for so long loses its entries to another")


class ModelSettings(Section):
    path: Path = Field(Path("models/tiny-policy"), description="a Hugging Face folder: the initial policy")


class TrainFile(Section):
    """A Parquet file of questions; a bare path is one without a weight."""

    path: Path
    weight: float | None = Field(None, gt=0, allow_inf_nan=False, description="share of all groups, relative to others")

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str | Path) else value


class DataSettings(Section):
    train_files: tuple[TrainFile, ...] = (TrainFile(path=Path("data/world/train.parquet")),)
    val_files: tuple[Path, ...] = (Path("data/world/test.parquet"),)
    corpus: Path = Path("data/world/corpus.jsonl")
    train_batch_size: int = Field(16, ge=1, description="prompts (groups) an optimizer step")
    val_max_samples: int = Field(-1, description="-1 = all")

    @property
    def train_paths(self) -> tuple[Path, ...]:
        """The training files."""
        return tuple(file.path for file in self.train_files)

    @property
    def train_weights(self) -> tuple[float, ...]:
        """One weight a training file; none where all questions are one pool."""
        return tuple(file.weight for file in self.train_files if file.weight is not None)

    @model_validator(mode="after")
    def _weighted(self) -> DataSettings:
        if self.train_weights and len(self.train_weights) < len(self.train_files):
            without = next(file.path for file in self.train_files if file.weight is None)
            raise ValueError(f"train_files: {without} has no weight and others have: give all of them one, or none")
        return self


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
    attach: bool = Field(
        False, description="the application runs there already, as KubeRay's RayService: only stand in front"
    )
    engine: EngineSettings = EngineSettings()
    engine_replicas: ReplicaSettings = ReplicaSettings()
    agent_replicas: ReplicaSettings = ReplicaSettings()
    weights: WeightSettings = WeightSettings()

    @model_validator(mode="after")
    def _attached(self) -> RolloutSettings:
        if self.attach and not self.ray_address:
            raise ValueError("attach needs a Ray cluster whose application it stands in front of: set ray_address")
        return self


class KlControlSettings(Section):
    type: KlControl = KlControl.FIXED
    kl_coef: float = Field(0.001, ge=0, allow_inf_nan=False, description="beta, or what it starts from")
    target_kl: float = Field(0.1, gt=0, description="adaptive: mean KL of a trajectory that beta is steered to")
    horizon: int = Field(10000, ge=1, description="adaptive: trajectories over which beta moves by up to a fifth")


class CorrectionSettings(Section):
    mode: OffPolicyCorrection = Field(
        OffPolicyCorrection.TIS,
        description="weight of a token by its trainer-to-engine ratio: none; tis: cut off at rollout_is_threshold; "
        "decoupled: the ratio itself; icepop: 0 outside icepop_low to icepop_high",
    )
    rollout_is_threshold: float = Field(2.0, gt=1)
    icepop_low: float = Field(0.5, gt=0, le=1)
    icepop_high: float = Field(5.0, ge=1, allow_inf_nan=False)


class ProbePenaltySettings(Section):
    """What a probe of training's own trajectories takes from their advantages; it costs a probe each, every step."""

    coef: float = Field(0.0, ge=0, allow_inf_nan=False, description="times the overconfidence; 0 = no probes")
    trajectories_per_group: int = Field(1, ge=1, description="the first ones of each group are probed")
    points: int = Field(10, ge=1, description="truncations beside the empty thought")
    samples: int = Field(10, ge=1, description="answers at each")
    timeout_s: float = Field(120.0, gt=0, description="of all probes of a step; those that are missing then are left")


class AlgorithmSettings(Section):
    adv_estimator: AdvantageEstimator = AdvantageEstimator.GRPO
    norm_adv_by_std_in_grpo: bool = Field(True, description="false = Dr. GRPO's advantage; multi-turn GRPO too")
    turn_weight: float = Field(0.5, ge=0, allow_inf_nan=False, description="multi-turn GRPO: of the turns' part")
    gamma: float = Field(1.0, ge=0, le=1, description="discount of a token: gae, reinforce_plus_plus")
    lam: float = Field(1.0, ge=0, le=1, description="gae")
    state_masking: bool = Field(True, description="train on the model's own tokens only; false = observations too")
    reward_placement: RewardPlacement = Field(
        RewardPlacement.AUTO,
        description="of scores with turns; auto: turn_proportional where the KL is in the reward but for gae, "
        "else final_token_only",
    )
    filter_groups: bool = Field(False, description="leave out groups whose rewards are all equal")
    use_kl_in_reward: bool = False
    kl_penalty: str = Field("kl", pattern=KL_KINDS, description="kind of the KL in the reward")
    kl_ctrl: KlControlSettings = KlControlSettings()
    rollout_correction: CorrectionSettings = CorrectionSettings()
    probe_penalty: ProbePenaltySettings = ProbePenaltySettings()

    @property
    def placement(self) -> RewardPlacement:
        """Where scores with turns land, `auto` resolved."""
        if self.reward_placement is not RewardPlacement.AUTO:
            return self.reward_placement
        spread = self.use_kl_in_reward and self.adv_estimator is not AdvantageEstimator.GAE
        return RewardPlacement.TURN_PROPORTIONAL if spread else RewardPlacement.FINAL_TOKEN_ONLY

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmSettings:
        estimator = self.adv_estimator
        if self.filter_groups and estimator.least_samples == 1:
            raise ValueError(
                f"filter_groups drops groups of equal rewards, which teach {estimator} something: "
                "set filter_groups=false, or an adv_estimator that compares within a group"
            )
        if self.use_kl_in_reward and estimator is AdvantageEstimator.GRPO_MULTITURN:
            raise ValueError(
                "adv_estimator grpo_multiturn is computed from turns, where a KL in the reward would be lost: "
                "set use_kl_in_reward=false and trainer.actor.use_kl_loss=true"
            )
        return self


LOSS_AGG_MODES = "^(token-mean|seq-mean-token-sum|seq-mean-token-mean|seq-mean-token-sum-norm)$"


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
    clip_ratio_c: float = Field(3.0, gt=1, description="dual clip: most that a ratio counts where the advantage is < 0")
    loss_agg_mode: str = Field("token-mean", pattern=LOSS_AGG_MODES)
    loss_scale_factor: int | None = Field(
        None, ge=1, description="seq-mean-token-sum-norm (Dr. GRPO): what a sum over tokens is divided by"
    )
    use_kl_loss: bool = True
    kl_loss_coef: float = Field(0.001, ge=0)
    kl_loss_type: str = Field("low_var_kl", pattern=KL_KINDS)
    entropy_coeff: float = 0.0
    ppo_max_token_len_per_gpu: int = Field(8192, ge=1)

    @model_validator(mode="after")
    def _scaled(self) -> ActorSettings:
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and self.loss_scale_factor is None:
            raise ValueError(
                "loss_agg_mode seq-mean-token-sum-norm needs loss_scale_factor: give the longest response in tokens"
            )
        return self


class CriticSettings(Section):
    """Of the value model that adv_estimator gae needs."""

    path: Path | None = Field(None, description="model folder to start from; null = model.path")
    optim: OptimSettings = OptimSettings(lr=1e-5)
    ppo_mini_batch_size: int = Field(16, ge=1, description="prompts an update; divides data.train_batch_size")
    ppo_epochs: int = Field(1, ge=1)
    cliprange_value: float = Field(0.5, gt=0, description="how far a value may move in a step")
    loss_agg_mode: str = Field("token-mean", pattern="^(token-mean|seq-mean-token-sum|seq-mean-token-mean)$")
    ppo_max_token_len_per_gpu: int = Field(8192, ge=1)


class PublishSettings(Section):
    dtype: str = Field(
        "auto", pattern="^(auto|float32|bfloat16|float16)$", description="of published weights; auto = the engine's"
    )
    shard_bytes: int = Field(
        5 * 2**30, ge=1, description="largest weights file of a policy or an export; a larger tensor has its own"
    )


class GuardAction(StrEnum):
    """What happens when a guard trips."""

    IGNORE = "ignore"
    WARN = "warn"
    STOP = "stop"
    ROLLBACK = "rollback"


class NonFiniteGuard(Section):
    action: GuardAction = Field(GuardAction.ROLLBACK, description="when loss or gradient norm are NaN or infinite")


class GradNormGuard(Section):
    threshold: float = Field(10.0, gt=1, description="gradient norm, times the median of the last window steps")
    action: GuardAction = GuardAction.WARN


class KlGuard(Section):
    threshold: float = Field(1.0, gt=0, description="mean KL to the reference, nats a token")
    action: GuardAction = GuardAction.WARN


class RewardGuard(Section):
    threshold: float = Field(
        0.5, gt=0, le=1, description="share of its highest value that the mean reward of window steps may lose"
    )
    action: GuardAction = GuardAction.WARN


class EntropyGuard(Section):
    threshold: float = Field(0.01, ge=0, description="lowest mean entropy, nats a token")
    action: GuardAction = GuardAction.WARN


class DeadGroupsGuard(Section):
    threshold: float = Field(0.9, ge=0, lt=1, description="highest share of a batch's groups that teach nothing")
    action: GuardAction = GuardAction.WARN


class LogProbGuard(Section):
    threshold: float = Field(
        0.2, gt=0, description="highest mean difference of trainer's and engine's log-probabilities, nats"
    )
    action: GuardAction = GuardAction.WARN


class GuardSettings(Section):
    window: int = Field(20, ge=2, description="steps that a guard compares with; it is silent until it has seen half")
    max_rollbacks: int = Field(3, ge=0, description="of a run; one more trip stops it")
    non_finite: NonFiniteGuard = NonFiniteGuard()
    grad_norm: GradNormGuard = GradNormGuard()
    kl: KlGuard = KlGuard()
    reward: RewardGuard = RewardGuard()
    entropy: EntropyGuard = EntropyGuard()
    dead_groups: DeadGroupsGuard = DeadGroupsGuard()
    logprob: LogProbGuard = LogProbGuard()


class TrainingEngineSettings(Section):
    """Of verl's FSDP2 engines, names as verl's; null = what suits the machine."""

    attn_implementation: str | None = Field(None, pattern="^(flash_attention_2|sdpa|eager)$")
    use_remove_padding: bool | None = Field(None, description="GPU: rows packed without padding; needs flash attention")
    use_torch_compile: bool | None = None
    param_dtype: str | None = Field(None, pattern="^(bf16|fp32)$", description="of forward and backward passes")
    enable_gradient_checkpointing: bool | None = Field(None, description="recompute activations: less memory, slower")
    param_offload: bool = Field(False, description="GPU: parameters in the machine's memory while not in use")
    optimizer_offload: bool = Field(False, description="GPU: likewise, the optimizer's state")
    offload_policy: bool = Field(
        False, description="GPU: parameters, gradients, optimizer always in the machine's memory"
    )
    reshard_after_forward: bool = Field(True, description="false: parameters stay whole until the backward pass")
    fsdp_size: int = Field(-1, description="processes that one copy of the parameters is split over; -1 = all")
    entropy_from_logits_with_chunking: bool = Field(False, description="GPU: entropy in pieces: less memory")

    @model_validator(mode="after")
    def _consistent(self) -> TrainingEngineSettings:
        if self.use_remove_padding and self.attn_implementation not in (None, "flash_attention_2"):
            raise ValueError(
                f"use_remove_padding needs flash_attention_2, not attn_implementation {self.attn_implementation}"
            )
        if self.fsdp_size == 0 or self.fsdp_size < -1:
            raise ValueError(f"fsdp_size is {self.fsdp_size}: expected -1 or at least 1")
        return self


class LoggerBackend(StrEnum):
    """Who else is told a step's figures."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


class ProbeSettings(Section):
    """Of faithfulness probes on held-out questions while a policy is trained."""

    freq: int = Field(0, ge=0, description="steps a probe; 0 = never")
    trajectories: int = Field(16, ge=1, description="of the validation's questions, the same ones every time")
    points: int = Field(10, ge=1, description="truncations beside the empty thought")
    samples: int = Field(50, ge=1, description="answers at each")
    turn: str = Field("answer", pattern="^(answer|any)$", description="the turn that answered, or every turn")
    timeout_s: float = Field(600.0, gt=0, description="training waits no longer; what is missing then is left")


class LoraSettings(Section):
    """Of the policy: train low-rank adapters beside frozen weights; names as verl's."""

    lora_rank: int = Field(0, ge=0, description="0 = no LoRA")
    lora_alpha: int = Field(16, ge=1)
    target_modules: str | tuple[str, ...] = Field("all-linear", description="all-linear, or names such as q_proj")


class PartialGroups(StrEnum):
    """What becomes of a batch that lacks groups."""

    WAIT = "wait"
    DROP = "drop"


class ValidationMode(StrEnum):
    """What the trainer does during a validation that falls between two steps."""

    PAUSED = "paused"
    OVERLAPPED = "overlapped"


class Launcher(StrEnum):
    """Who starts the trainer's processes."""

    AUTO = "auto"
    PROCESS = "process"
    RAY = "ray"


class RaySettings(Section):
    """Of the Ray whose actors are the trainer's processes."""

    address: str = Field(
        "", pattern=r"^(auto|[^:/\s]+:\d{1,5})?$", description="host:port of a cluster, or auto; empty = one of its own"
    )
    wait_s: float = Field(300.0, gt=0, description="for nodes with room for all processes")


class TrainerSettings(Section):
    launcher: Launcher = Field(
        Launcher.AUTO,
        description="process: this one, or those of torchrun; ray: actors of Ray; "
        "auto: ray where ray.address, nnodes or n_gpus_per_node say so",
    )
    nnodes: int = Field(1, ge=1, description="of the Ray cluster, to train on")
    n_gpus_per_node: int = Field(
        1, ge=1, description="processes a node, each with a GPU (or CPU, where there are none)"
    )
    ray: RaySettings = RaySettings()
    health_address: Address = "127.0.0.1:18641"
    algorithm: AlgorithmSettings = AlgorithmSettings()
    actor: ActorSettings = ActorSettings()
    critic: CriticSettings = CriticSettings()
    engine: TrainingEngineSettings = TrainingEngineSettings()
    lora: LoraSettings = LoraSettings()
    critic_warmup: int = Field(0, ge=0, description="first steps in which only the critic learns")
    total_training_steps: int = Field(100, ge=1)
    max_staleness: int = Field(1, ge=0, description="batches that may be outstanding beyond the one being trained on")
    save_freq: int = Field(5, ge=1, description="steps a checkpoint; groups are acknowledged with it")
    max_ckpt_to_keep: int = Field(2, ge=1, description="newest checkpoints that stay; the best one stays besides")
    upload_url: str = Field("", description="where checkpoints are copied to, any address of fsspec; empty = nowhere")
    upload_wait_s: float = Field(600.0, ge=0, description="at the end of a run, for a copy under way")
    publish: PublishSettings = PublishSettings()
    guards: GuardSettings = GuardSettings()
    test_freq: int = Field(-1, description="steps a validation; -1 = only before and after")
    validation_mode: ValidationMode = Field(
        ValidationMode.PAUSED,
        description="between two steps: paused, or overlapped: training goes on and answers are collected meanwhile",
    )
    val_before_train: bool = True
    probe: ProbeSettings = ProbeSettings()
    logger: tuple[LoggerBackend, ...] = Field((), description="where figures go besides metrics.jsonl and Prometheus")
    project_name: str = Field("forage", min_length=1, description="of W&B, or an experiment of MLflow; runs are run.id")
    rollout_data_freq: int = Field(10, ge=0, description="steps a file of a step's trajectories; 0 = never")
    rollout_data_to_keep: int = Field(0, ge=0, description="newest of these files that stay; 0 = all")
    resume: bool = True
    batch_timeout_s: float = Field(600.0, gt=0, description="wait for a batch before giving up with an error")
    straggler_timeout_s: float = Field(
        0.0, ge=0, description="wait for the groups that a batch lacks once one is there; 0 = no limit of their own"
    )
    partial_groups: PartialGroups = Field(
        PartialGroups.WAIT, description="what then: wait (and say so), or drop those that are missing"
    )
    max_refills: int = Field(
        0, ge=0, description="other questions tried in place of one that algorithm.filter_groups would leave out"
    )
    threads: int = Field(2, ge=1, description="of torch, on CPU")

    @property
    def on_ray(self) -> bool:
        """Whether the trainer's processes are actors of Ray."""
        asked = bool(self.ray.address) or self.nnodes > 1 or self.n_gpus_per_node > 1
        return self.launcher is Launcher.RAY or (self.launcher is Launcher.AUTO and asked)

    @model_validator(mode="after")
    def _launched(self) -> TrainerSettings:
        if self.launcher is Launcher.PROCESS and self.nnodes * self.n_gpus_per_node > 1:
            raise ValueError(
                f"launcher=process takes the processes that torchrun starts, not nnodes={self.nnodes} times "
                f"n_gpus_per_node={self.n_gpus_per_node}: set both to 1, or launcher=ray"
            )
        if self.nnodes > 1 and not self.ray.address:
            raise ValueError(
                f"nnodes={self.nnodes} needs a Ray cluster with so many nodes: give its address in trainer.ray.address"
            )
        return self

    @model_validator(mode="after")
    def _data_flow(self) -> TrainerSettings:
        if self.partial_groups is PartialGroups.DROP and not self.straggler_timeout_s:
            raise ValueError("partial_groups=drop needs a time after which groups are dropped: set straggler_timeout_s")
        if self.max_refills and not self.algorithm.filter_groups:
            raise ValueError(
                "max_refills replaces the groups that filter_groups finds: "
                "set algorithm.filter_groups=true or max_refills=0"
            )
        return self

    @model_validator(mode="after")
    def _one_kl(self) -> TrainerSettings:
        if self.algorithm.use_kl_in_reward and self.actor.use_kl_loss:
            raise ValueError(
                "the KL belongs in the reward or in the loss, never in both: "
                "set algorithm.use_kl_in_reward=false or actor.use_kl_loss=false"
            )
        if self.critic_warmup and self.algorithm.adv_estimator is not AdvantageEstimator.GAE:
            raise ValueError(
                f"critic_warmup waits for a critic, and adv_estimator {self.algorithm.adv_estimator} has none: "
                "set critic_warmup=0 or algorithm.adv_estimator=gae"
            )
        return self


class TracingProtocol(StrEnum):
    """How spans travel: OTLP over gRPC or over HTTP."""

    GRPC = "grpc"
    HTTP = "http"


class TracingSettings(Section):
    """Where every service sends its spans."""

    enabled: bool = False
    endpoint: str = Field(
        "",
        pattern=r"^$|^https?://[^\s?#]+$",
        description="URL of an OpenTelemetry collector, such as http://collector:4317; "
        "empty = that of OTEL_EXPORTER_OTLP_ENDPOINT, or this machine's",
    )
    protocol: TracingProtocol = TracingProtocol.GRPC
    sample_ratio: float = Field(1.0, ge=0, le=1, description="share of the prompts whose spans are sent")


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
    tracing: TracingSettings = TracingSettings()

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
