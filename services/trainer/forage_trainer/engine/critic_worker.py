"""The critic of PPO: a value model on verl's engine, with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import verl.utils.model
from transformers import AutoModelForTokenClassification
from verl.workers.config import CriticConfig
from verl.workers.utils.losses import value_loss

from forage_common.settings import CriticSettings, Settings
from forage_trainer.data.rows import Rows, mini_batches
from forage_trainer.data.tensors import like_response
from forage_trainer.engine.engine_config import Machine, engine_config, model_config, optimizer_config
from forage_trainer.engine.spmd import Processes
from forage_trainer.engine.verl_worker import VerlWorker, mean


class CriticWorker:
    """Starts from a policy's weights with a head of zeros, or from a value model as it is."""

    def __init__(self, settings: Settings, machine: Machine, processes: Processes) -> None:
        self._settings = settings.trainer.critic
        policy = settings.model.path
        model = model_config(self._settings.path or policy, machine, tokenizer=policy)
        with _own_attention():
            self._worker = VerlWorker(
                "value_model",
                model,
                engine_config(machine, self._settings.ppo_max_token_len_per_gpu),
                optimizer_config(self._settings.optim, settings.trainer.total_training_steps),
                processes,
            )
        if not model.hf_config.architectures[0].endswith("ForTokenClassification"):
            _zero_head(self._worker.engine.module)
        self._worker.set_loss(partial(value_loss, _critic_config(self._settings)))

    @property
    def parameters(self) -> int:
        """How many the value model has."""
        return self._worker.parameters

    def values(self, batch: Rows) -> torch.Tensor:
        """V of each response token, given those before it, (rows, tokens)."""
        return self._worker.infer(batch, "values")

    def update(self, batch: Rows, values: torch.Tensor, returns: torch.Tensor, last_position: int) -> dict[str, float]:
        """Take all updates of one step; figures under verl's names (`critic/…`), means over the updates.

        Args:
            values, returns: (rows, tokens), values as they were before any update of this step.
            last_position: groups in the batch, trained on or not; mini-batches are cut by position.
        """
        data = batch.data.copy()
        data["values"] = like_response(values, data)
        data["returns"] = like_response(returns, data)
        size, epochs = self._settings.ppo_mini_batch_size, self._settings.ppo_epochs
        minis = list(mini_batches(batch.positions, last_position, size, epochs))
        found = [
            self._worker.update(data, rows, update_lr_scheduler=number == len(minis) - 1)
            for number, rows in enumerate(minis)
        ]
        figures = {name: mean([one[name] for one in found]) for name in found[0] if name.startswith("critic/")}
        return figures | {
            "critic/grad_norm": mean([one["grad_norm"] for one in found]),
            "critic/lr": found[-1]["lr"],
        }

    def save(self, folder: Path, step: int) -> None:
        """verl's checkpoint of the value model."""
        self._worker.save(folder, step)

    def load(self, folder: Path) -> None:
        """Read back what `save` wrote."""
        self._worker.load(folder)


def _critic_config(critic: CriticSettings) -> CriticConfig:
    return CriticConfig(
        strategy="fsdp2",
        ppo_micro_batch_size_per_gpu=1,
        ppo_mini_batch_size=critic.ppo_mini_batch_size,
        use_dynamic_bsz=True,
        ppo_max_token_len_per_gpu=critic.ppo_max_token_len_per_gpu,
        cliprange_value=critic.cliprange_value,
        loss_agg_mode=critic.loss_agg_mode,
    )


def _zero_head(module: Any) -> None:
    """Values of 0 to begin with, on every process: verl leaves the head as transformers drew it."""
    body = f"{module.base_model_prefix}."
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not name.startswith(body):
                parameter.zero_()


@contextmanager
def _own_attention() -> Iterator[None]:
    """verl loads every value model with FlashAttention; load it with the attention of its configuration."""
    theirs = verl.utils.model.load_valuehead_model
    verl.utils.model.load_valuehead_model = _load_value_model
    try:
        yield
    finally:
        verl.utils.model.load_valuehead_model = theirs


def _load_value_model(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )
