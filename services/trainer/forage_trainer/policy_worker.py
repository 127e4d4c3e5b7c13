"""The policy and its reference as verl training workers, driven in this process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    import forage_trainer.verl_cpu  # noqa: F401  (registers the CPU platform and engine)

from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.metric.utils import Metric
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import response_from_nested

from forage_common.settings import ActorSettings, Settings
from forage_trainer.actor_loss import ActorLoss
from forage_trainer.tensors import StepTensors, like_response, select

_NAN = float("nan")


@dataclass(frozen=True)
class UpdateResult:
    """log_probs: (rows, tokens), before any update of this step; entropy: mean over tokens trained on, or NaN.

    figures: means over the updates of what verl measures, under its names (`actor/…`).
    """

    log_probs: torch.Tensor
    entropy: float
    grad_norm: float
    lr: float
    clip_fraction: float
    loss: float
    figures: dict[str, float]


def join_process_group() -> None:
    """Make this process a group of its own, unless a launcher (torchrun) has said otherwise."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    launched = "RANK" in os.environ
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if launched:
        dist.init_process_group(backend)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


class PolicyWorker:
    """Actor and, where a KL asks for it, reference: log-probabilities, updates, checkpoints, weights."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.run.seed)
        self._actor_settings = settings.trainer.actor
        self._on_gpu = torch.cuda.is_available()
        if not self._on_gpu:
            torch.set_num_threads(settings.trainer.threads)
        join_process_group()
        self._total_steps = settings.trainer.total_training_steps
        path = settings.model.path
        self._actor = self._worker(path, forward_only=False)
        algorithm = settings.trainer.algorithm
        with_reference = self._actor_settings.use_kl_loss or algorithm.use_kl_in_reward
        self._reference = self._worker(path, forward_only=True) if with_reference else None
        self._loss = ActorLoss(self._actor_config(settings.rollout.n), algorithm.rollout_correction)
        self._actor.set_loss_fn(self._loss)

    @property
    def parameters(self) -> int:
        """Number of parameters of the policy."""
        return sum(p.numel() for p in self._actor.engine.module.parameters())

    def log_probs(self, batch: StepTensors) -> torch.Tensor:
        """The policy's log-probabilities of the response tokens, (rows, tokens)."""
        return self._infer(self._actor, batch)

    def reference_log_probs(self, batch: StepTensors) -> torch.Tensor | None:
        """The initial policy's, (rows, tokens); None where there is no KL."""
        return None if self._reference is None else self._infer(self._reference, batch)

    def updates_per_step(self, groups: int) -> int:
        """Optimizer updates for a batch of so many groups."""
        mini = self._actor_settings.ppo_mini_batch_size
        return self._actor_settings.ppo_epochs * -(-groups // mini)

    def update(
        self,
        batch: StepTensors,
        advantages: torch.Tensor,
        reference: torch.Tensor | None,
        old: torch.Tensor | None,
        last_position: int,
    ) -> UpdateResult:
        """Take all updates of one step.

        Args:
            advantages, reference, old: (rows, tokens). `old` may be None if there is a single update.
            last_position: groups in the batch, trained on or not; mini-batches are cut by position.
        """
        data = batch.data.copy()
        data["advantages"] = like_response(advantages, data)
        if reference is not None:
            data["ref_log_prob"] = like_response(reference, data)
        if old is not None:
            data["old_log_probs"] = like_response(old, data)
        minis = list(self._mini_batches(batch.positions, last_position))
        self._loss.clear()
        found: list[dict[str, Any]] = []
        first: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        for number, rows in enumerate(minis):
            mini = select(data, rows)
            tu.assign_non_tensor(
                mini,
                global_batch_size=len(rows),
                calculate_entropy=True,
                entropy_gradient=self._actor_settings.entropy_coeff != 0,
                update_lr_scheduler=number == len(minis) - 1,
            )
            found.append(_plain(tu.get(self._actor.train_batch(mini), "metrics")))
            if number == 0:
                first = self._loss.seen
        log_probs = old if old is not None else _by_row(batch.mask, [(rows, lp) for rows, lp, _ in first])
        entropies = [(rows, e) for rows, _, e in first if e is not None]
        return UpdateResult(
            log_probs=log_probs,
            entropy=_masked_mean(entropies, batch.mask),
            grad_norm=_mean([m.get("grad_norm", _NAN) for m in found]),
            lr=found[-1].get("lr", _NAN),
            clip_fraction=_mean([m.get("actor/pg_clipfrac", _NAN) for m in found]),
            loss=_mean([m["loss"] for m in found]),
            figures={name: _mean([m[key] for m in found]) for key, name in _verl_names(found[0]).items()},
        )

    def save(self, folder: Path, step: int) -> None:
        """verl's checkpoint: model, optimizer, learning-rate schedule and random state."""
        self._actor.save_checkpoint(str(folder), global_step=step)

    def load(self, folder: Path) -> None:
        """Read back what `save` wrote."""
        self._actor.load_checkpoint(str(folder))

    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All parameters by name, on the CPU; a tied output head is left out."""
        tied = bool(getattr(self._actor.engine.model_config.hf_config, "tie_word_embeddings", False))
        tensors, _ = self._actor.engine.get_per_tensor_param()
        # Every process must walk the iterator: each tensor is gathered from all of them.
        return {
            name: tensor.detach().to(device="cpu", dtype=dtype).contiguous().clone()
            for name, tensor in tensors
            if not (tied and name.endswith("lm_head.weight"))
        }

    def _infer(self, worker: TrainingWorker, batch: StepTensors) -> torch.Tensor:
        data = batch.data.copy()
        tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=False)
        found = tu.get(worker.infer_batch(data), "log_probs")
        response = response_from_nested(found, batch.data["response_mask"])
        return torch.nested.to_padded_tensor(response, padding=0.0, output_size=batch.mask.shape)

    def _mini_batches(self, positions: Sequence[int], groups: int) -> Iterator[list[int]]:
        size = self._actor_settings.ppo_mini_batch_size
        for _ in range(self._actor_settings.ppo_epochs):
            for begin in range(0, groups, size):
                rows = [row for row, place in enumerate(positions) if begin <= place < begin + size]
                if rows:
                    yield rows

    def _worker(self, path: Path, forward_only: bool) -> TrainingWorker:
        actor = self._actor_settings
        tokens = actor.ppo_max_token_len_per_gpu
        precision = "bf16" if self._on_gpu else "fp32"
        # One model configuration a worker: verl writes into it.
        model = HFModelConfig(
            path=str(path),
            override_config={"attn_implementation": "flash_attention_2" if self._on_gpu else "sdpa"},
            use_remove_padding=self._on_gpu,
            enable_gradient_checkpointing=self._on_gpu,
        )
        engine = FSDPEngineConfig(
            strategy="fsdp2",
            forward_only=forward_only,
            model_dtype="fp32",
            use_torch_compile=self._on_gpu,
            mixed_precision={"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_dynamic_bsz=True,
            max_token_len_per_gpu=tokens,
            infer_max_token_len_per_gpu=tokens,
            micro_batch_size_per_gpu=1,
            infer_micro_batch_size_per_gpu=1,
        )
        worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=model,
                engine_config=engine,
                optimizer_config=None if forward_only else self._optimizer(actor),
                checkpoint_config=CheckpointConfig(),
            )
        )
        worker.reset()
        return worker

    def _optimizer(self, actor: ActorSettings) -> FSDPOptimizerConfig:
        return FSDPOptimizerConfig(
            lr=actor.optim.lr,
            weight_decay=actor.optim.weight_decay,
            clip_grad=actor.optim.clip_grad,
            lr_warmup_steps=actor.optim.lr_warmup_steps,
            total_training_steps=self._total_steps,
            lr_scheduler_type="constant",
        )

    def _actor_config(self, samples: int) -> FSDPActorConfig:
        actor = self._actor_settings
        return FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=samples,
            ppo_mini_batch_size=actor.ppo_mini_batch_size,
            ppo_micro_batch_size_per_gpu=1,
            use_dynamic_bsz=True,
            ppo_max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu,
            clip_ratio=actor.clip_ratio,
            clip_ratio_low=actor.clip_ratio,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
            use_kl_loss=actor.use_kl_loss,
            kl_loss_coef=actor.kl_loss_coef,
            kl_loss_type=actor.kl_loss_type,
            entropy_coeff=actor.entropy_coeff,
            loss_agg_mode=actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor,
        )


def _plain(metrics: dict[str, Any]) -> dict[str, float]:
    """verl's metrics of one update (numbers, `Metric`s, or lists of them by process and micro-batch) as numbers."""
    numbers = {}
    for name, value in metrics.items():
        values = (
            [v for part in value for v in (part if isinstance(part, list) else [part])]
            if isinstance(value, list)
            else [value]
        )
        if values and isinstance(values[0], Metric):
            numbers[name] = float(Metric.aggregate_dp(values))
        else:
            numbers[name] = _mean([float(v) for v in values])
    return numbers


def _verl_names(metrics: Iterable[str]) -> dict[str, str]:
    """Those of the names that are the loss's own → the same with verl's prefix."""
    bare = {"kl_loss": "actor/kl_loss", "kl_coef": "actor/kl_coef"}
    return {name: bare.get(name, name) for name in metrics if name in bare or name.startswith("actor/")}


def _by_row(like: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    padded = torch.zeros_like(like)
    for rows, jagged in parts:
        width = int(jagged.offsets().diff().max())
        padded[rows.cpu(), :width] = torch.nested.to_padded_tensor(jagged, padding=0.0).cpu()
    return padded


def _masked_mean(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor) -> float:
    if not parts:
        return _NAN
    rows = torch.cat([rows.cpu() for rows, _ in parts])
    chosen = torch.zeros_like(mask)
    chosen[rows] = mask[rows]
    return float((_by_row(mask, parts) * chosen).sum() / chosen.sum())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else _NAN
