"""The policy, its reference and the critic on verl's engines, on every process of the trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from forage_common.settings import AdvantageEstimator, Settings
from forage_trainer.data.rows import Rows, by_row, mini_batches
from forage_trainer.data.tensors import like_response
from forage_trainer.engine import lora
from forage_trainer.engine.actor_loss import ActorLoss, actor_config
from forage_trainer.engine.critic_worker import CriticWorker
from forage_trainer.engine.engine_config import decide, engine_config, model_config, optimizer_config
from forage_trainer.engine.spmd import Processes, collective
from forage_trainer.engine.verl_worker import VerlWorker, mean
from forage_trainer.weights.weights_files import Adapter

_NAN = float("nan")
_CRITIC = "critic"


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


class PolicyWorker:
    """Actor and, where a KL asks for it, reference, and for gae a critic: inference, updates, checkpoints, weights.

    What process 0 calls, the others follow (`spmd.follow`); results are those of all rows.
    """

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.run.seed)
        self.processes = Processes.join()
        trainer = settings.trainer
        self._settings = trainer.actor
        self._on_gpu = torch.cuda.is_available()
        if not self._on_gpu:
            torch.set_num_threads(trainer.threads)
        machine = decide(trainer.engine, self._on_gpu)
        tokens, path = self._settings.ppo_max_token_len_per_gpu, settings.model.path
        self._lora = trainer.lora.lora_rank > 0
        self._actor = VerlWorker(
            "language_model",
            model_config(path, machine, trainer.lora),
            engine_config(machine, tokens),
            optimizer_config(self._settings.optim, trainer.total_training_steps),
            self.processes,
        )
        self._loss = ActorLoss(actor_config(self._settings, settings.rollout.n), trainer.algorithm.rollout_correction)
        self._actor.set_loss(self._loss)
        self._with_reference = self._settings.use_kl_loss or trainer.algorithm.use_kl_in_reward
        self._reference: VerlWorker | None = None
        # With LoRA the frozen weights of the actor are the reference.
        if self._with_reference and not self._lora:
            forward = engine_config(machine, tokens, forward_only=True)
            model = model_config(path, machine)
            self._reference = VerlWorker("language_model", model, forward, None, self.processes)
        with_critic = trainer.algorithm.adv_estimator is AdvantageEstimator.GAE
        self._critic = CriticWorker(settings, machine, self.processes) if with_critic else None

    @property
    def world_size(self) -> int:
        """Processes that the engines are split over; a checkpoint is theirs alone."""
        return self.processes.size

    @property
    def parameters(self) -> int:
        """Number of parameters that a checkpoint holds: the policy's and the critic's."""
        return self._actor.parameters + (self._critic.parameters if self._critic is not None else 0)

    @collective
    def log_probs(self, batch: Rows) -> torch.Tensor:
        """The policy's log-probabilities of the response tokens, (rows, tokens)."""
        return self._actor.infer(batch, "log_probs")

    @collective
    def reference_log_probs(self, batch: Rows) -> torch.Tensor | None:
        """The initial policy's, (rows, tokens); None where there is no KL."""
        if not self._with_reference:
            return None
        if self._reference is None:
            return self._actor.infer(batch, "log_probs", no_lora_adapter=True)
        return self._reference.infer(batch, "log_probs")

    @collective
    def values(self, batch: Rows) -> torch.Tensor:
        """The critic's V of each response token, given those before it, (rows, tokens).

        Raises:
            ValueError: there is no critic.
        """
        return self._the_critic().values(batch)

    def updates_per_step(self, groups: int) -> int:
        """Optimizer updates for a batch of so many groups."""
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
            last_position: groups in the batch, trained on or not; mini-batches are cut by position.
        """
        actor, data = self._settings, batch.data.copy()
        data["advantages"] = like_response(advantages, data)
        if reference is not None:
            data["ref_log_prob"] = like_response(reference, data)
        if old is not None:
            data["old_log_probs"] = like_response(old, data)
        minis = list(mini_batches(batch.positions, last_position, actor.ppo_mini_batch_size, actor.ppo_epochs))
        self._loss.clear()
        found: list[dict[str, float]] = []
        log_probs, entropy = old, _NAN
        for number, rows in enumerate(minis):
            found.append(
                self._actor.update(
                    data,
                    rows,
                    calculate_entropy=True,
                    entropy_gradient=actor.entropy_coeff != 0,
                    update_lr_scheduler=number == len(minis) - 1,
                )
            )
            if number == 0:
                log_probs, entropy = self._seen(batch.mask, rows, old)
        return UpdateResult(
            log_probs=torch.zeros_like(batch.mask) if log_probs is None else log_probs,
            entropy=entropy,
            grad_norm=mean([m.get("grad_norm", _NAN) for m in found]),
            lr=found[-1].get("lr", _NAN),
            clip_fraction=mean([m.get("actor/pg_clipfrac", _NAN) for m in found]),
            loss=mean([m["loss"] for m in found]),
            figures={name: mean([m[key] for m in found]) for key, name in _verl_names(found[0]).items()},
        )

    @collective
    def update_critic(
        self, batch: Rows, values: torch.Tensor, returns: torch.Tensor, last_position: int
    ) -> dict[str, float]:
        """Take all of the critic's updates of one step towards `returns`; figures under verl's names (`critic/…`).

        Args:
            values, returns: (rows, tokens), values as they were before any update of this step.
            last_position: groups in the batch, trained on or not; mini-batches are cut by position.

        Raises:
            ValueError: there is no critic.
        """
        return self._the_critic().update(batch, values, returns, last_position)

    @collective
    def save(self, folder: Path, step: int) -> None:
        """verl's checkpoint: model, optimizer, learning-rate schedule and random state; the critic's below `critic`."""
        self._actor.save(folder, step)
        if self._critic is not None:
            self._critic.save(folder / _CRITIC, step)

    @collective
    def load(self, folder: Path) -> None:
        """Read back what `save` wrote."""
        self._actor.load(folder)
        if self._critic is not None:
            self._critic.load(folder / _CRITIC)

    @collective
    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All parameters by name, on the CPU, LoRA merged; a tied output head is left out. Empty but on process 0."""
        engine = self._actor.engine
        tied = bool(getattr(engine.model_config.hf_config, "tie_word_embeddings", False))
        tensors = lora.merged(engine.module, self._device) if self._lora else engine.get_per_tensor_param()[0]
        found = {}
        # Every process must walk the iterator: each tensor is gathered from all of them.
        for name, tensor in tensors:
            if self.processes.rank == 0 and not (tied and name.endswith("lm_head.weight")):
                found[name] = tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
        return found

    @collective
    def adapter(self, dtype: torch.dtype) -> Adapter:
        """The LoRA adapter alone.

        Raises:
            ValueError: the policy has none.
        """
        if not self._lora:
            raise ValueError("the policy has no adapter: trainer.lora.lora_rank is 0")
        return lora.adapter(self._actor.engine.module, self._device, dtype)

    def close(self) -> None:
        """End the other processes."""
        if self.processes.has_followers:
            # Those that are gone already need no telling.
            with contextlib.suppress(RuntimeError):
                self.processes.announce(None, {})

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")

    def _the_critic(self) -> CriticWorker:
        if self._critic is None:
            raise ValueError("there is no critic: trainer.algorithm.adv_estimator is not gae")
        return self._critic

    def _seen(self, mask: torch.Tensor, rows: list[int], old: torch.Tensor | None) -> tuple[torch.Tensor, float]:
        """Log-probabilities (unless they are known) and mean entropy of the rows whose update has just been."""
        parts = self._loss.seen
        if old is None:
            old = self.processes.sum(by_row(mask, [(which, log_probs) for which, log_probs, _ in parts]))
        entropy = by_row(mask, [(which, found) for which, _, found in parts if found is not None])
        inside = torch.zeros_like(mask)
        inside[rows] = mask[rows]
        return old, float((self.processes.sum(entropy) * inside).sum() / inside.sum())


def _verl_names(metrics: Iterable[str]) -> dict[str, str]:
    """Those of the names that are the loss's own → the same with verl's prefix."""
    bare = {"kl_loss": "actor/kl_loss", "kl_coef": "actor/kl_coef"}
    return {name: bare.get(name, name) for name in metrics if name in bare or name.startswith("actor/")}
