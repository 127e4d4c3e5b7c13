"""The policy, its reference and the critic on verl's engines, on every process of the trainer."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from forage_runtime.errors import DataError, UserError
from forage_runtime.files.served_lora import get_served_lora_rank
from forage_runtime.settings import AdvantageEstimator, Settings
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.data.rows import split_mini_batches
from forage_trainer.data.tensors import Rows, StepTensors
from forage_trainer.engine.actor_loss import ActorLoss, build_actor_config
from forage_trainer.engine.critic_worker import CriticWorker
from forage_trainer.engine.engine_config import (
    build_engine_config,
    build_model_config,
    build_optimizer_config,
    resolve_engine,
)
from forage_trainer.engine.scoring import SHARED_SHARE
from forage_trainer.engine.spmd import Processes, collective
from forage_trainer.engine.verl_worker import VerlWorker, collect, hand_out, mean
from forage_trainer.folder_digests import describe_rank
from forage_trainer.weights.adapter import count_adapted, extract_adapter
from forage_trainer.weights.checkpoint_tensors import build_checkpoint, cast
from forage_trajectory.trajectory import ColumnFolder
from forage_weights.trainer.model_files import Adapter

_NAN = float("nan")
_CRITIC = "critic"


@dataclass(frozen=True)
class UpdateResult:
    """The result of a step's updates.

    log_probs: (rows, tokens), before any update of this step; entropy: mean over the tokens trained on, or NaN.
    entropies: (rows, tokens), of the rows of the first update, before it; None if there was none.
    shared_share: share of the rows' tokens that were not computed, since rows share them.
    metrics: means of verl's metrics over the updates, under verl's names (`actor/…`).
    """

    log_probs: torch.Tensor
    entropy: float
    grad_norm: float
    lr: float
    clip_fraction: float
    loss: float
    metrics: dict[str, float]
    entropies: torch.Tensor | None = None
    shared_share: float = 0.0


class PolicyWorker:
    """The actor, the reference policy where a KL needs it, and the critic for gae.

    Calls of rank 0 are repeated by the other ranks (`spmd.follow`), each with the rows of its share; rank 0 returns the
    results of all rows.
    """

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.run.seed)
        trainer = settings.trainer
        self.processes = Processes.join(trainer.collective_timeout_s, settings.run.folder / "columns")
        self._threads = ThreadPoolExecutor(1, "digests")
        self._settings = trainer.actor
        self._on_gpu = torch.cuda.is_available()
        if not self._on_gpu:
            torch.set_num_threads(trainer.threads)
        resolved = resolve_engine(trainer.engine, self._on_gpu, self.processes.size)
        if trainer.ref.param_offload and not self._on_gpu:
            raise UserError("trainer.ref.param_offload needs a GPU, and there is none: leave it out")
        self._param_dtype = resolved.param_dtype
        tokens, path = self._settings.ppo_max_token_len_per_gpu, settings.model.path
        self._lora, self._targets = trainer.lora.lora_rank > 0, trainer.lora.target_modules
        self._actor = VerlWorker(
            "language_model",
            build_model_config(path, resolved, trainer.lora),
            build_engine_config(resolved, tokens),
            build_optimizer_config(self._settings.optim, trainer.total_training_steps),
            self.processes,
        )
        if self._lora and self.processes.rank == 0:
            self._report_adapter(get_served_lora_rank(settings), settings.rollout.engine.max_lora_rank)
        self._loss = ActorLoss(
            build_actor_config(self._settings, settings.rollout.n), trainer.algorithm.rollout_correction
        )
        self._actor.set_loss(self._loss)
        self._has_reference = self._settings.use_kl_loss or trainer.algorithm.use_kl_in_reward
        self._reference: VerlWorker | None = None
        # With LoRA the actor without its adapter is the reference.
        if self._has_reference and not self._lora:
            forward = build_engine_config(resolved, tokens, True, trainer.ref.param_offload)
            model = build_model_config(path, resolved)
            self._reference = VerlWorker("language_model", model, forward, None, self.processes)
            self._reference.copy_buffers(self._actor)
        has_critic = trainer.algorithm.adv_estimator is AdvantageEstimator.GAE
        self._critic = CriticWorker(settings, resolved, self.processes) if has_critic else None
        self.processes.announce_life()

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.processes.size

    @property
    def dtype(self) -> str:
        """What the policy's passes compute in, as PyTorch names it."""
        return "bfloat16" if self._param_dtype == "bf16" else "float32"

    @property
    def columns(self) -> ColumnFolder | None:
        """The folder in which other ranks read the columns of rows; None where there is no other rank."""
        return self.processes.columns if self.processes.has_followers else None

    @property
    def parameters(self) -> int:
        """Number of parameters that a checkpoint holds: the policy's and the critic's."""
        return self._actor.parameters + (self._critic.worker.parameters if self._critic is not None else 0)

    @collective
    def log_probs(self, batch: Rows) -> torch.Tensor:
        """Compute the policy's log-probabilities of the response tokens, (rows, tokens)."""
        return self._actor.infer(batch, "log_probs")

    @collective
    def log_probs_and_entropies(self, batch: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the same, and the entropies of the distributions that the tokens are of, in one pass."""
        log_probs, entropies = self._actor.infer_together(batch, "log_probs", "entropy")
        return log_probs, entropies

    @collective
    def reference_log_probs(self, batch: Rows) -> torch.Tensor | None:
        """Compute the initial policy's log-probabilities, (rows, tokens); None where no KL needs them."""
        if not self._has_reference:
            return None
        if self._reference is None:
            return self._actor.infer(batch, "log_probs", no_lora_adapter=True)
        return self._reference.infer(batch, "log_probs")

    @collective
    def values(self, batch: Rows) -> torch.Tensor:
        """Compute the critic's V of each response token, given the tokens before it, (rows, tokens).

        Raises:
            ValueError: there is no critic.
        """
        return self._require_critic().values(batch)

    def updates_per_step(self, groups: int) -> int:
        """Number of optimizer updates for a batch of so many groups."""
        return self._settings.ppo_epochs * -(-groups // self._settings.ppo_mini_batch_size)

    @collective
    def update(
        self,
        batch: Rows,
        advantages: torch.Tensor,
        reference: torch.Tensor | None,
        old: torch.Tensor | None,
        last_position: int,
    ) -> UpdateResult:
        """Take all updates of one step.

        Args:
            advantages, reference, old: (rows, tokens). `old` may be None if there is a single update.
            last_position: number of positions in the batch, trained on or not; mini-batches are cut by position.
        """
        actor = self._settings
        cuts = split_mini_batches(batch.positions, last_position, actor.ppo_mini_batch_size, actor.ppo_epochs)
        minis = [rows for rows in cuts if any(map(batch.is_trained, rows))]
        given = {"advantages": advantages, "ref_log_prob": reference, "old_log_probs": old}
        values = hand_out(self.processes, batch, minis, given)
        self._loss.clear()
        updates: list[dict[str, float]] = []
        log_probs, entropy, entropies = old, _NAN, None
        for number, rows in enumerate(minis):
            updates.append(
                self._actor.update(
                    batch,
                    rows,
                    values,
                    calculate_entropy=True,
                    entropy_gradient=actor.entropy_coeff != 0,
                    update_lr_scheduler=number == len(minis) - 1,
                )
            )
            if number == 0:
                log_probs, entropies = self._collect_passes(batch, old)
                entropy = _average_entropy(batch, rows, entropies)
        return UpdateResult(
            log_probs=torch.zeros(batch.shape) if log_probs is None else log_probs,
            entropy=entropy,
            grad_norm=mean([m.get("grad_norm", _NAN) for m in updates]),
            lr=updates[-1].get("lr", _NAN),
            clip_fraction=mean([m.get("actor/pg_clipfrac", _NAN) for m in updates]),
            loss=mean([m["loss"] for m in updates]),
            metrics={name: mean([m[key] for m in updates]) for key, name in _map_loss_metrics(updates[0]).items()},
            entropies=entropies,
            shared_share=mean([m.get(SHARED_SHARE, 0.0) for m in updates]),
        )

    @collective
    def update_critic(
        self, batch: Rows, values: torch.Tensor, returns: torch.Tensor, last_position: int
    ) -> dict[str, float]:
        """Take all of the critic's updates of one step towards `returns`.

        Returns: means of verl's metrics over the updates, under verl's names (`critic/…`).

        Args:
            values, returns: (rows, tokens); values before any update of this step, which bound the clipping.
            last_position: number of positions in the batch, trained on or not; mini-batches are cut by position.

        Raises:
            ValueError: there is no critic.
        """
        return self._require_critic().update(batch, values, returns, last_position)

    @collective
    def save(self, folder: Path) -> None:
        """Write model, optimizer, learning-rate schedule and random state; the critic's in critic/.

        Every rank above 0 then describes its files on a thread, see `describe_rank`.
        """
        self._actor.save(folder)
        if self._critic is not None:
            self._critic.worker.save(folder / _CRITIC)
        if self.processes.rank > 0:
            self._threads.submit(self._describe, folder)

    @collective
    def load(self, folder: Path) -> None:
        """Load a checkpoint of `save`, by any number of processes.

        Raises:
            DataError: it is of another model, or not complete.
        """
        if self._critic is not None and not (folder / _CRITIC).is_dir():
            raise DataError(
                f"{folder} has no critic, which trainer.algorithm.adv_estimator=gae needs: set it as it was when the "
                "run began, or give another run.id"
            )
        self._actor.load(folder)
        if self._critic is not None:
            self._critic.worker.load(folder / _CRITIC)

    @collective
    def move_to_gpu(self) -> None:
        """Move parameters, gradients and optimizers back to the GPU; on a CPU they are where they were."""
        for worker in self._workers:
            worker.move("device")

    @collective
    def move_to_host(self) -> int:
        """Move parameters, gradients and optimizers to the host's memory.

        Returns:
            Bytes of this process's GPU that are free now and were not before; 0 on a CPU.
        """
        before = torch.accelerator.get_memory_info()[0] if self._on_gpu else 0
        for worker in self._workers:
            worker.move("cpu")
        if not self._on_gpu:
            return 0
        # The copies are asynchronous, and nobody else may use the memory before they have ended.
        torch.accelerator.synchronize()
        gc.collect()
        torch.accelerator.empty_cache()
        return max(0, int(torch.accelerator.get_memory_info()[0] - before))

    @property
    def _workers(self) -> list[VerlWorker]:
        critic = self._critic.worker if self._critic is not None else None
        return [worker for worker in (self._actor, self._reference, critic) if worker is not None]

    @collective
    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return what `save_pretrained` would write, on the CPU, LoRA merged; {} except on rank 0."""
        is_kept = self.processes.rank == 0

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            whole = self._gather(tensor)
            return whole if is_kept else torch.empty_like(whole, device="meta")

        def finish(whole: torch.Tensor) -> torch.Tensor:
            return cast(whole, dtype, device="cpu" if is_kept else "meta", copy=True)

        weights = build_checkpoint(self._actor.engine.module, gather, finish)
        return weights if is_kept else {}

    @collective
    def adapter(self, dtype: torch.dtype) -> Adapter:
        """Return the LoRA adapter.

        Raises:
            ValueError: the policy has none.
        """
        if not self._lora:
            raise ValueError("the policy has no adapter: trainer.lora.lora_rank is 0")
        return extract_adapter(self._actor.engine.module, self._gather, dtype)

    def _report_adapter(self, served: int, asked: int) -> None:
        """Log what is adapted, and whether engines get the adapter or merged policies.

        Raises:
            UserError: they would get an adapter that they cannot serve.
        """
        module = self._actor.engine.module
        counts = count_adapted(module)
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        get_logger().info("adapter_trained", **counts, parameters=trained, merged=not served)
        changed = [kind for kind in ("experts", "routers") if counts[kind]]
        if served and changed:
            raise UserError(
                f"the adapter has {' and '.join(changed)}, of which engines serve none: set "
                "rollout.engine.max_lora_rank=0, so that whole policies are published"
            )
        if asked and not served:
            reason = f"the model has experts, and trainer.lora.target_modules={self._targets} may change them"
            get_logger().warning("merged_policies_published", reason=reason, max_lora_rank=asked)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a parameter whole, on this process's device; every process must do so."""
        tensor = tensor.detach().to(self._device)
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _describe(self, folder: Path) -> None:
        try:
            describe_rank(folder, self.processes.rank)
        except OSError as error:  # rank 0 reads the files itself, or has ended
            get_logger().warning("digests_left_to_rank_0", reason=repr(error))

    def close(self) -> None:
        """End the other processes."""
        self.processes.close()

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")

    def _require_critic(self) -> CriticWorker:
        if self._critic is None:
            raise ValueError("there is no critic: trainer.algorithm.adv_estimator is not gae")
        return self._critic

    def _collect_passes(self, batch: Rows, old: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Collect log-probabilities (unless `old` has them) and entropies of the last update's rows."""
        passes = self._loss.passes
        if old is None:
            old = collect(self.processes, batch, [(numbers, log_probs) for numbers, log_probs, _ in passes])
        entropies = [(numbers, values) for numbers, _, values in passes if values is not None]
        return old, collect(self.processes, batch, entropies)


def _average_entropy(batch: Rows, rows: Sequence[int], entropies: torch.Tensor) -> float:
    """Mean over the tokens of the rows that are trained on; NaN on ranks that do not have them all."""
    if not isinstance(batch, StepTensors):
        return _NAN
    inside = torch.zeros_like(batch.mask)
    inside[rows] = batch.mask[rows]
    return float((entropies * inside).sum() / inside.sum())


def _map_loss_metrics(names: Iterable[str]) -> dict[str, str]:
    """Select the names of the loss's metrics, and map each to the same with verl's prefix."""
    bare = {"kl_loss": "actor/kl_loss", "kl_coef": "actor/kl_coef"}
    return {name: bare.get(name, name) for name in names if name in bare or name.startswith("actor/")}
