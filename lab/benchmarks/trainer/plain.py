"""The actor's update as a plain script has it: PyTorch, transformers, AdamW, and the objective in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from forage_runtime.settings import ActorSettings
from forage_trainer.data.tensors import StepTensors


@dataclass(frozen=True)
class Row:
    """One trajectory. `known` is (4, tokens - 1): mask, advantage, reference's and engine's log-probability of each
    token but the first, 0 on the prompt."""

    ids: torch.Tensor
    prompt: int
    known: torch.Tensor


def split_rows(batch: StepTensors, advantages: torch.Tensor, reference: torch.Tensor) -> list[Row]:
    """The rows of a step, from its (rows, tokens) matrices over the response."""
    result = []
    for row, (ids, prompt) in enumerate(
        zip(batch.data["input_ids"].unbind(), batch.data["prompts"].offsets().diff().tolist(), strict=True)
    ):
        response = len(ids) - prompt
        matrices = (batch.mask, advantages, reference, batch.engine_log_probs)
        over = torch.stack([matrix[row, :response] for matrix in matrices])
        result.append(Row(ids, prompt, torch.nn.functional.pad(over, (prompt - 1, 0))))
    return result


class PlainActor:
    """A policy with its optimizer."""

    def __init__(self, folder: Path, settings: ActorSettings, cap: float, entropy: bool) -> None:
        """
        Args:
            cap: of the truncated importance weight.
            entropy: measure it too, as the trainer does for its metrics.
        """
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self._model.train()
        optim = settings.optim
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay, betas=(0.9, 0.999)
        )
        self._settings, self._cap, self._entropy = settings, cap, entropy

    def update(self, rows: Sequence[Row], cuts: Sequence[Sequence[int]], width: int = 0) -> tuple[float, float]:
        """One update over micro-batches of the given rows. Returns (loss, norm of the gradient).

        Args:
            width: tokens that every row is padded to; 0 = those of the micro-batch's longest.
        """
        tokens = sum(float(row.known[0].sum()) for row in rows)
        self._optimizer.zero_grad()
        total = 0.0
        for cut in cuts:
            loss = self._loss([rows[number] for number in cut], width) / tokens
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.optim.clip_grad)
        self._optimizer.step()
        return total, float(norm)

    def _loss(self, rows: Sequence[Row], width: int) -> torch.Tensor:
        """Sum over the micro-batch's tokens: PPO with both clips, truncated importance weights, KL to the reference."""
        settings = self._settings
        ids = pad_sequence([row.ids for row in rows], batch_first=True)
        known = pad_sequence([row.known.T for row in rows], batch_first=True)
        beyond = max(0, width - ids.shape[1])
        ids = torch.nn.functional.pad(ids, (0, beyond))
        # Logits only from the column before the first response on: a gift to padded batches, which seldom have it.
        skipped = min(row.prompt for row in rows) - 1
        mask, advantage, reference, engine = torch.nn.functional.pad(known, (0, 0, 0, beyond))[:, skipped:].unbind(-1)
        logits = self._model(input_ids=ids, logits_to_keep=ids.shape[1] - skipped, use_cache=False).logits[:, :-1]
        every = logits.log_softmax(-1)
        own = every.gather(-1, ids[:, skipped + 1 :, None])[..., 0]
        old = own.detach()
        if self._entropy:
            with torch.no_grad():
                (-(every.exp() * every).sum(-1) * mask).sum().item()
        ratio = (own - old).exp()
        clipped = ratio.clamp(1 - settings.clip_ratio, 1 + settings.clip_ratio_high)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        gain = torch.where(advantage < 0, torch.maximum(gain, settings.clip_ratio_c * advantage), gain)
        weight = (old - engine).clamp(-20, 20).exp().clamp(max=self._cap)
        log_ratio = reference - own
        kl = (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)
        return torch.where(mask > 0, settings.kl_loss_coef * kl - weight * gain, 0.0).sum()
