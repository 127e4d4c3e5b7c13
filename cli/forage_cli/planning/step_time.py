"""Time of a step: operations and bytes over what the GPUs are assumed to reach."""

from __future__ import annotations

from dataclasses import dataclass

from forage_cli.planning.assumptions import Assumptions
from forage_cli.planning.gpus import Gpu
from forage_cli.planning.rollout_memory import Rollout
from forage_cli.planning.shapes import Shape
from forage_cli.planning.trainer_memory import Training, count_critic_parameters, count_offloaded
from forage_cli.planning.work import Work
from forage_runtime.settings import Settings

_MASTER = 4


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and of its parts.

    Attributes:
        prefill, decode: of the sampling; tail: more, until the longest trajectory has ended.
        training: of the updates; scoring: of log-probabilities, values and the reference before them.
        publishing: until engines have the new policy; moving: of weights and optimizer to the host and back.
        is_overlapped: whether sampling and training run at the same time.
    """

    prefill: float
    decode: float
    tail: float
    scoring: float
    training: float
    publishing: float
    moving: float
    is_overlapped: bool

    @property
    def sampling(self) -> float:
        return self.prefill + self.decode + self.tail

    @property
    def updating(self) -> float:
        return self.scoring + self.training + self.publishing + self.moving

    @property
    def total(self) -> float:
        return max(self.sampling, self.updating) if self.is_overlapped else self.sampling + self.updating

    @property
    def rollout_idle(self) -> float:
        """Share of a step in which the engines' GPUs do nothing for the run."""
        return 1 - self.sampling / self.total

    @property
    def trainer_idle(self) -> float:
        """The same of the trainer's."""
        return 1 - self.updating / self.total


def estimate_step(
    settings: Settings,
    shape: Shape,
    gpu: Gpu,
    work: Work,
    training: Training,
    rollout: Rollout,
    assumed: Assumptions,
    is_colocated: bool,
) -> StepTime:
    """The time of a step that needs no checkpoint, validation or other wait."""
    is_overlapped = settings.trainer.max_staleness > 0 and not is_colocated
    prefill, decode, tail = _estimate_sampling(shape, gpu, work, rollout, assumed)
    forward = work.trajectories * work.length * shape.count_flops(work.length)
    passes = _count_training_passes(training)
    rate = training.gpus * gpu.flops * assumed.mfu
    epochs = settings.trainer.actor.ppo_epochs
    scored = int(training.reads_old) + int(_has_reference(settings)) + int(training.has_critic)
    trained = epochs * passes
    if training.has_critic:
        trained += epochs * (4 if training.is_recomputed else 3)
    return StepTime(
        prefill=prefill,
        decode=decode,
        tail=0.0 if is_overlapped else tail,
        scoring=scored * forward / rate + _estimate_streaming(shape, work, training, assumed),
        training=trained * forward / rate + _estimate_optimizer(gpu, shape, training, assumed),
        publishing=_estimate_publishing(settings, shape, training, assumed),
        moving=_estimate_moving(settings, shape, training, rollout, assumed, is_colocated),
        is_overlapped=is_overlapped,
    )


def _estimate_sampling(
    shape: Shape, gpu: Gpu, work: Work, rollout: Rollout, assumed: Assumptions
) -> tuple[float, float, float]:
    """Prefill, decode, and the time that the longest trajectory takes beyond both."""
    size, batch = rollout.tensor_parallel, max(1, rollout.concurrency)
    own = -(-work.trajectories // rollout.engines)
    # The samples of a prompt share its tokens in the prefix cache.
    read = own * (work.prompt / work.samples + work.observed)
    prefill = read * shape.count_flops(work.length) / (size * gpu.flops * assumed.prefill_mfu)
    steps = max(own * work.generated / batch, work.generated)
    decode = steps * _estimate_decode(shape, gpu, size, min(batch, own), work.length, assumed)
    alone = work.longest_generated * _estimate_decode(shape, gpu, size, 1, work.length, assumed)
    longest = alone + work.longest_searches * assumed.search_s
    return prefill, decode, max(0.0, longest - prefill - decode)


def _estimate_decode(shape: Shape, gpu: Gpu, size: int, batch: int, length: float, assumed: Assumptions) -> float:
    """Seconds of one decoding step of `batch` sequences."""
    read = 2 * shape.parameters / size + batch * (length / 2) * shape.count_kv_bytes(2, size)
    memory = read / (gpu.bandwidth * assumed.bandwidth_use)
    compute = batch * shape.count_flops(length) / (size * gpu.flops * assumed.prefill_mfu)
    return max(memory, compute) + assumed.decode_overhead_s


def _count_training_passes(training: Training) -> float:
    """Forward passes that an update is worth: the backward pass is two, one where only adapters have gradients."""
    backward = 1 if training.adapter else 2
    return 1 + backward + (1 if training.is_recomputed else 0)


def _has_reference(settings: Settings) -> bool:
    return settings.trainer.actor.use_kl_loss or settings.trainer.algorithm.use_kl_in_reward


def _estimate_optimizer(gpu: Gpu, shape: Shape, training: Training, assumed: Assumptions) -> float:
    """AdamW reads and writes parameters and moments, and reads gradients."""
    touched = 7 * _MASTER * training.trained
    if training.has_critic:
        touched += 7 * _MASTER * count_critic_parameters(shape)
    return training.updates * touched / training.shards / (gpu.bandwidth * assumed.bandwidth_use)


def _estimate_streaming(shape: Shape, work: Work, training: Training, assumed: Assumptions) -> float:
    """A reference on the host is read for every micro-batch."""
    if not training.streams_reference:
        return 0.0
    passes = -(-work.trajectories * work.length // (training.tokens * training.gpus))
    return passes * training.width * shape.parameters / training.shards / assumed.pcie


def _estimate_publishing(settings: Settings, shape: Shape, training: Training, assumed: Assumptions) -> float:
    """The policy is written once and read by the engines of a machine once."""
    size = 2 * (training.adapter if settings.rollout.engine.max_lora_rank else shape.parameters)
    return 2 * size / assumed.disk


def _estimate_moving(
    settings: Settings, shape: Shape, training: Training, rollout: Rollout, assumed: Assumptions, is_colocated: bool
) -> float:
    state = count_offloaded(training, shape)
    if training.is_offloaded:
        return training.updates * 2 * state / assumed.pcie
    engine = settings.trainer.engine
    if not (is_colocated or engine.param_offload or engine.optimizer_offload):
        return 0.0
    moved = 2 * state
    if is_colocated:
        moved += 2 * shape.parameters // rollout.tensor_parallel
    return moved / assumed.pcie
