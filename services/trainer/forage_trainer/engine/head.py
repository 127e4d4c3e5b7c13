"""Log-probabilities and entropies of the tokens that a loss needs, from hidden states or from logits.

The fused way is verl's `FusedLinearForPPO` (PyTorch alone, any device): it takes the output layer and the softmax for
some tokens at a time and repeats both in the backward pass, so that the logits of a batch never exist as a whole.
verl's own model patch around it is not used: it replaces the `forward` of a class for all models of a process and
knows one temperature a batch. Here the output layer of one model computes the result in place of logits.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from verl.utils.experimental.torch_functional import FusedLinearForPPO

CHUNK_TOKENS = 512
"""Tokens of which the fused way holds logits at once: 0.3 GB as fp32 at a vocabulary of 152k, in at most six copies."""

_ROOMY = ("cpu",)
"""Devices whose memory holds what is kept of a micro-batch's logits."""


@dataclass(frozen=True)
class HeadQuery:
    """What is asked of the output layer.

    labels: (tokens,), the token after each.
    temperature: one, or one for each token.
    chosen: (tokens,), index of each token among the flattened hidden states; None: all, in order.
    entropy, entropy_gradient: whether the entropy is computed, and with a graph.
    """

    labels: torch.Tensor
    temperature: float | torch.Tensor
    chosen: torch.Tensor | None
    entropy: bool
    entropy_gradient: bool

    def choose(self, values: torch.Tensor) -> torch.Tensor:
        """Flatten (rows, columns, width) to (tokens, width) of the chosen tokens."""
        flat = values.flatten(0, -2)
        return flat if self.chosen is None else flat.index_select(0, self.chosen)


class FusedHead(torch.nn.Linear):  # type: ignore[misc, unused-ignore]
    """An output layer that answers the question it is given: (1, tokens, 2), log-probability and entropy, not logits.

    Without a question it computes logits.
    """

    question: HeadQuery | None = None

    @classmethod
    def adopt(cls, model: Any) -> FusedHead:
        """Turn the output layer of a model into one; parameters and their names stay."""
        head = model.get_output_embeddings()
        head.__class__ = cls
        assert isinstance(head, FusedHead)
        return head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        question, self.question = self.question, None
        if question is None:
            return super().forward(hidden)
        states, temperature = question.choose(hidden).to(self.weight.dtype), question.temperature
        if isinstance(temperature, torch.Tensor):
            # In the type of the temperatures: 0.7 in bf16 is 0.699, and every logit would be off by a thousandth.
            states, temperature = (states / temperature.unsqueeze(-1)).to(states.dtype), 1.0
        fused = FusedLinearForPPO(CHUNK_TOKENS)
        log_probs, entropy = fused(states, self.weight, question.labels, temperature)
        if not question.entropy_gradient:
            entropy = entropy.detach()
        return torch.stack([log_probs[None], entropy[None].to(log_probs.dtype)], -1)


def find_obstacle(model: Any) -> str | None:
    """Find out why the model's logits are not those of a bare linear layer; None if they are.

    The answer comes from a forward pass of a model of the same class and configuration without weights. A model whose
    pass reads values cannot be asked so, and counts as one that changes its logits.
    """
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        bare = type(model)(config).bfloat16()  # the only type in which layers of experts have a pass without weights
    head = bare.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.bias is not None:
        return f"the output layer is {head}"
    seen: list[torch.Tensor] = []
    head.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    ids = torch.zeros((1, 1), dtype=torch.long, device="meta")
    mask = torch.zeros((1, 1, 1, 1), dtype=torch.bfloat16, device="meta")
    try:
        with torch.no_grad():  # a mask of four dimensions is used as it is; to build one would read values
            logits = bare(input_ids=ids, attention_mask=mask, use_cache=False).logits
    except Exception as error:  # noqa: BLE001 - whatever a model's code does without values must not end the start
        return f"the model has no pass without weights ({error!r})"
    return None if len(seen) == 1 and logits is seen[0] else "the model changes what its output layer computes"


def score_logits(logits: torch.Tensor, question: HeadQuery) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log-probabilities and entropies of logits (rows, columns, vocabulary), both (tokens,).

    A GPU takes some tokens at a time and repeats that in the backward pass; a CPU's micro-batches are small enough to
    keep everything, which is faster.
    """
    chosen = question.choose(logits)
    temperatures = question.temperature
    saves_memory = logits.device.type not in _ROOMY
    size = CHUNK_TOKENS if saves_memory else max(1, len(chosen))
    parts: list[tuple[torch.Tensor, ...]] = []
    for begin in range(0, max(1, len(chosen)), size):
        part = slice(begin, begin + size)
        temperature = temperatures[part, None] if isinstance(temperatures, torch.Tensor) else temperatures
        inputs = (chosen[part], question.labels[part], temperature, question.entropy, question.entropy_gradient)
        parts.append(checkpoint(_score, *inputs, use_reentrant=False) if saves_memory else _score(*inputs))
    log_probs, *entropy = (torch.cat(values) for values in zip(*parts, strict=True))
    return log_probs, entropy[0] if entropy else None


def _score(
    logits: torch.Tensor, labels: torch.Tensor, temperature: torch.Tensor | float, entropy: bool, gradient: bool
) -> tuple[torch.Tensor, ...]:
    every = (logits.float() / temperature).log_softmax(-1)
    log_probs = every.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if not entropy:
        return (log_probs,)
    with torch.set_grad_enabled(torch.is_grad_enabled() and gradient):
        return log_probs, -(every.exp() * every).sum(-1)
