"""The critic of PPO: a value model on verl's engine, with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import verl.utils.model
from transformers import AutoModelForTokenClassification
from verl.workers.config import CriticConfig
from verl.workers.utils.losses import value_loss

from forage_runtime.settings import Settings, TrainerSettings, TrainingEngineSettings
from forage_trainer.data.rows import split_mini_batches
from forage_trainer.data.tensors import Rows
from forage_trainer.engine.engine_config import build_engine_config, build_model_config, build_optimizer_config
from forage_trainer.engine.spmd import Processes
from forage_trainer.engine.verl_worker import VerlWorker, hand_out, mean


class CriticWorker:
    """A value model that starts from a policy's weights with a head of zeros, or from a trained value model.

    worker: its model, engine and optimizer.
    """

    def __init__(self, settings: Settings, engine: TrainingEngineSettings, processes: Processes) -> None:
        trainer = settings.trainer
        self._actor = trainer.actor  # whose batches it takes
        self._processes = processes
        policy = settings.model.path
        model = build_model_config(trainer.critic.path or policy, engine, tokenizer=policy)
        with _use_configured_attention():
            self.worker = VerlWorker(
                "value_model",
                model,
                build_engine_config(engine, trainer.actor.ppo_max_token_len_per_gpu),
                build_optimizer_config(trainer.critic_optim, trainer.total_training_steps),
                processes,
            )
        if not model.hf_config.architectures[0].endswith("ForTokenClassification"):
            _zero_head(self.worker.engine.module)
        self.worker.set_loss(partial(value_loss, build_critic_config(trainer)))

    def values(self, batch: Rows) -> torch.Tensor:
        """See `PolicyWorker.values`."""
        return self.worker.infer(batch, "values")

    def update(self, batch: Rows, values: torch.Tensor, returns: torch.Tensor, last_position: int) -> dict[str, float]:
        """See `PolicyWorker.update_critic`."""
        size, epochs = self._actor.ppo_mini_batch_size, self._actor.ppo_epochs
        cuts = split_mini_batches(batch.positions, last_position, size, epochs)
        minis = [rows for rows in cuts if any(map(batch.is_trained, rows))]
        given = hand_out(self._processes, batch, minis, {"values": values, "returns": returns})
        updates = [
            self.worker.update(batch, rows, given, update_lr_scheduler=number == len(minis) - 1)
            for number, rows in enumerate(minis)
        ]
        metrics = {
            name: mean([update[name] for update in updates]) for name in updates[0] if name.startswith("critic/")
        }
        return metrics | {
            "critic/grad_norm": mean([u["grad_norm"] for u in updates]),
            "critic/lr": updates[-1]["lr"],
        }


def build_critic_config(trainer: TrainerSettings) -> CriticConfig:
    """Build verl's configuration of the critic's loss."""
    actor = trainer.actor
    return CriticConfig(
        strategy="fsdp2",
        ppo_micro_batch_size_per_gpu=1,
        ppo_mini_batch_size=actor.ppo_mini_batch_size,
        use_dynamic_bsz=True,
        ppo_max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu,
        cliprange_value=trainer.critic.cliprange_value,
        loss_agg_mode="token-mean" if actor.loss_agg_mode == "seq-mean-token-sum-norm" else actor.loss_agg_mode,
    )


def _zero_head(module: Any) -> None:
    """Zero the head on every process, so that values start at 0; transformers initializes it at random."""
    body = f"{module.base_model_prefix}."
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not name.startswith(body):
                parameter.zero_()


@contextmanager
def _use_configured_attention() -> Iterator[None]:
    """Load the value model with the attention of its configuration; verl always uses FlashAttention."""
    original = verl.utils.model.load_valuehead_model
    verl.utils.model.load_valuehead_model = _load_value_model
    try:
        yield
    finally:
        verl.utils.model.load_valuehead_model = original


def _load_value_model(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )
