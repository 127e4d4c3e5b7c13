"""Settings of the training loop: steps, checkpoints, validation, processes."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from forage_runtime.settings.actor import (
    ActorSettings,
    CriticSettings,
    LoraSettings,
    OptimSettings,
    ReferenceSettings,
    TrainingEngineSettings,
)
from forage_runtime.settings.algorithm import AdvantageEstimator, AlgorithmSettings
from forage_runtime.settings.base import ADDRESS, Address, Device, Section, Url, check_address
from forage_runtime.settings.guards import GuardSettings

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab"]


class PublishSettings(Section):
    """Published policies."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of published weights; auto: what the engines compute in"
    )
    shard_bytes: int = Field(
        5 * 2**30, ge=1, description="Largest weights file of a policy or an export; a larger tensor gets its own file"
    )
    direct_address: Annotated[str, AfterValidator(partial(check_address, other=r"(:\d{1,5})?"))] = Field(
        "",
        json_schema_extra={"pattern": rf"^({ADDRESS}|:\d{{1,5}})?$"},
        description="host:port where engines reach the trainer if rollout.weights.transport=direct; port 0: a free one;"
        " no host: the address from which this machine reaches Redis; empty: that, and a free port",
    )
    direct_backend: Literal["auto", "gloo"] = Field("auto", description="auto: NCCL between GPUs, else gloo (sockets)")
    full_every: int = Field(
        16,
        ge=1,
        description="Interval of whole policies; between them only what a step has changed is published, where that is"
        " a quarter or less; 1: every policy is whole",
    )
    uri: Url = Field("", description="Where engines get policies, as an fsspec URL; empty: from the run's folder")


class ProbeSettings(Section):
    """Faithfulness probes during training, of the turn that answers: on validation questions, and for a penalty."""

    freq: int = Field(0, ge=0, description="Interval of probes on validation questions; 0: never")
    trajectories: int = Field(16, ge=1, description="Validation questions that are probed, the same ones every time")
    points: int = Field(10, ge=1, description="Truncations of a chain of thought, besides the empty one")
    samples: int = Field(50, ge=1, description="Answers that are sampled per truncation")
    timeout_s: float = Field(600.0, gt=0, description="Longest wait of the training; unfinished probes are skipped")


class WatchSettings(Section):
    """Training questions that are answered greedily again and again, to see how one answer changes."""

    freq: int = Field(
        0, ge=0, description="Interval in steps, which have a checkpoint too; also before and after training; 0: never"
    )
    count: int = Field(8, ge=1, description="Questions, chosen by run.seed and the same all run long")


class RaySettings(Section):
    """The Ray cluster whose actors are the trainer's processes."""

    address: Annotated[str, AfterValidator(partial(check_address, other="(auto)?"))] = Field(
        "",
        json_schema_extra={"pattern": f"^(auto|{ADDRESS})?$"},
        description="host:port, or auto; empty: a local cluster is started",
    )


class TrainerSettings(Section):
    """The training loop; names as verl's where verl has the setting."""

    device: Device = Field(
        "auto", description="Where processes compute; auto: on GPUs where PyTorch was built for them, else on CPUs"
    )
    placement: Literal["separate", "colocated"] = Field(
        "separate",
        description="separate: GPUs of its own; colocated: the engines' GPUs, in turns: engines free their memory while"
        " the trainer computes, and the trainer while they sample",
    )
    nnodes: int = Field(1, ge=1, description="Nodes of the Ray cluster to train on")
    n_gpus_per_node: int = Field(1, ge=1, description="Processes per node, each with one GPU if device is gpu")
    ray: RaySettings = RaySettings()
    health_address: Address = Field("127.0.0.1:18641", description="Address of health and metrics over HTTP")
    algorithm: AlgorithmSettings = AlgorithmSettings()
    actor: ActorSettings = ActorSettings()
    critic: CriticSettings = CriticSettings()
    engine: TrainingEngineSettings = TrainingEngineSettings()
    ref: ReferenceSettings = ReferenceSettings()
    lora: LoraSettings = LoraSettings()
    critic_warmup: int = Field(0, ge=0, description="Initial steps that train only the critic")
    total_training_steps: int = Field(100, ge=1, description="Optimizer steps of the run")
    max_staleness: int = Field(1, ge=0, description="Batches that may be issued ahead of the one being trained on")
    batching: Literal["strict", "ready"] = Field(
        "strict",
        description="strict: a step takes the groups that were issued for it; ready: the first that are there, of all"
        " that were issued and are not older than max_staleness, so that the slowest hold up nothing",
    )
    save_freq: int = Field(5, ge=1, description="Interval of checkpoints; groups are acknowledged with a checkpoint")
    max_ckpt_to_keep: int = Field(2, ge=1, description="Newest checkpoints that are kept, besides the best one")
    upload_url: Url = Field("", description="Where checkpoints are copied to, as an fsspec URL; empty: nowhere")
    publish: PublishSettings = PublishSettings()
    guards: GuardSettings = GuardSettings()
    test_freq: int = Field(-1, description="Interval of validations; -1: only before and after training")
    validation_mode: Literal["paused", "overlapped"] = Field(
        "paused",
        description="Validation between two steps: paused: training waits for it; overlapped: training continues",
    )
    val_before_train: bool = Field(True, description="Validate the initial policy")
    watch_questions: WatchSettings = WatchSettings()
    probe: ProbeSettings = ProbeSettings()
    logger: tuple[TrackerName, ...] = Field(
        (), description="Experiment trackers that get the metrics, besides metrics.jsonl and Prometheus"
    )
    log_val_generations: int = Field(
        8, ge=0, description="Answers of each validation that trackers show as a table, always of the same questions"
    )
    project_name: str = Field("forage", min_length=1, description="Project of the trackers; experiment in MLflow")
    rollout_data_freq: int = Field(10, ge=0, description="Interval of files with a step's trajectories; 0: never")
    resume: bool = Field(True, description="Continue from the newest checkpoint in the run's folder")
    collective_timeout_s: float = Field(
        600.0, gt=0, description="Longest wait of a process of the trainer for another one, until both end and resume"
    )
    batch_timeout_s: float = Field(600.0, gt=0, description="Longest wait for a batch until the run fails")
    straggler_timeout_s: float = Field(
        0.0,
        ge=0,
        description="Time after the first group of a batch until a step goes without those that are missing; 0: never",
    )
    max_refills: int = Field(
        0, ge=0, description="Other questions tried in place of a group that algorithm.filter_groups would drop"
    )
    threads: int = Field(2, ge=1, description="CPU threads of PyTorch")

    @property
    def uses_ray(self) -> bool:
        """Whether the trainer's processes are actors of Ray."""
        return bool(self.ray.address) or self.nnodes > 1 or self.n_gpus_per_node > 1

    @property
    def critic_optim(self) -> OptimSettings:
        """The critic's optimizer: the actor's, with a learning rate and a warm-up of its own."""
        return self.actor.optim.model_copy(update=dict(self.critic.optim))

    @model_validator(mode="after")
    def _check_processes(self) -> TrainerSettings:
        if self.nnodes > 1 and not self.ray.address:
            raise ValueError(
                f"nnodes={self.nnodes} needs a Ray cluster with so many nodes: give its address in trainer.ray.address"
            )
        processes, shards = self.nnodes * self.n_gpus_per_node, self.engine.fsdp_size
        if 0 < shards < processes and processes % shards:
            raise ValueError(
                f"engine.args.fsdp_size={shards} does not divide the {processes} processes of nnodes times "
                "n_gpus_per_node: set it to a divisor, or to -1"
            )
        return self

    @model_validator(mode="after")
    def _check_data_flow(self) -> TrainerSettings:
        if self.batching == "ready" and not self.max_staleness:
            raise ValueError(
                "batching=ready chooses among the groups of max_staleness + 1 batches, and with max_staleness=0 there "
                "is nothing to choose: set max_staleness=1 or more, or batching=strict"
            )
        if self.max_refills and not self.algorithm.filter_groups:
            raise ValueError(
                "max_refills replaces the groups that filter_groups finds: "
                "set algorithm.filter_groups=true or max_refills=0"
            )
        return self

    @model_validator(mode="after")
    def _check_geo_mean(self) -> TrainerSettings:
        if self.actor.policy_loss.loss_mode != "geo_mean":
            return self
        estimator, penalty = self.algorithm.adv_estimator, self.algorithm.probe_penalty.coef
        if estimator not in (AdvantageEstimator.GRPO, AdvantageEstimator.RLOO) or penalty:
            raise ValueError(
                "actor.policy_loss.loss_mode geo_mean has one advantage a trajectory, and "
                f"{'algorithm.probe_penalty' if penalty else f'adv_estimator {estimator}'} gives each token its own: "
                "set adv_estimator=grpo or rloo without probe_penalty, or another loss_mode"
            )
        if self.algorithm.rollout_correction.mode == "icepop":
            raise ValueError(
                "rollout_correction.mode icepop leaves out single tokens, and actor.policy_loss.loss_mode geo_mean has "
                "one weight a trajectory: set rollout_correction.mode=tis, or another loss_mode"
            )
        return self

    @model_validator(mode="after")
    def _check_kl(self) -> TrainerSettings:
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
