"""Settings of the training loop: steps, checkpoints, validation, processes."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from forage_common.settings.actor import ActorSettings, CriticSettings, LoraSettings, TrainingEngineSettings
from forage_common.settings.algorithm import AdvantageEstimator, AlgorithmSettings
from forage_common.settings.base import Address, Section
from forage_common.settings.guards import GuardSettings


class PublishSettings(Section):
    dtype: str = Field(
        "auto", pattern="^(auto|float32|bfloat16|float16)$", description="of published weights; auto = the engine's"
    )
    shard_bytes: int = Field(
        5 * 2**30, ge=1, description="largest weights file of a policy or an export; a larger tensor has its own"
    )


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
    def uses_ray(self) -> bool:
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
