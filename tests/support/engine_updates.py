"""The updates that an engine takes: the weights that each begins with, and the gradients that it is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Update:
    """weights, gradients: by the names of the model's parameters; gradients as the optimizer has them, so clipped."""

    weights: Tensors
    gradients: Tensors


@contextmanager
def record_updates(engine: Any) -> Iterator[list[Update]]:
    """Record the updates that an engine takes in this block."""
    updates: list[Update] = []

    def note(*_: Any) -> None:
        named = dict(engine.module.named_parameters())
        gradients = {name: _gather(parameter.grad) for name, parameter in named.items()}
        updates.append(Update({name: _gather(parameter) for name, parameter in named.items()}, gradients))

    hook = engine.optimizer.register_step_pre_hook(note)
    try:
        yield updates
    finally:
        hook.remove()


def read_parameters(engine: Any) -> Tensors:
    """The weights that an engine has now."""
    return {name: _gather(parameter) for name, parameter in engine.module.named_parameters()}


def take_weights(model: torch.nn.Module, update: Update) -> None:
    """Let a plain model begin an update where the engine began it."""
    model.load_state_dict(update.weights, strict=False)
    model.zero_grad()


def assert_same_gradients(model: torch.nn.Module, update: Update) -> None:
    """Compare the gradients of a plain model with an engine's: sums of some hundred float32 terms."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(
            update.gradients[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, update: Update, after: Tensors) -> None:
    """Compare the weights after an update with those that a plain optimizer makes of the same gradients.

    Not of its own: AdamW moves a weight by its learning rate however small the gradient, so where that is 0 but for
    rounding, its sign decides.
    """
    for name, parameter in model.named_parameters():
        parameter.grad = update.gradients[name].clone()
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            after[name], parameter.detach(), atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def _gather(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()
