"""The type of published weights: what the engines compute in, so that no byte is sent which an engine rounds away."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from forage_runtime.files.served_lora import get_served_lora_rank
from forage_runtime.settings import Settings
from forage_weights.trainer.model_files import Adapter

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
"""By the names of the settings, which are vLLM's, and of PyTorch."""


class Worker(Protocol):
    """What holds the policy that is trained."""

    def weights(self, dtype: torch.dtype) -> Mapping[str, torch.Tensor]: ...

    def adapter(self, dtype: torch.dtype) -> Adapter: ...


def copy_weights(worker: Worker, settings: Settings, declared: str) -> Mapping[str, torch.Tensor] | Adapter:
    """Copy what is to be published to the CPU: the whole policy, or its adapter where engines serve it.

    Args:
        declared: as of `choose_dtype`.
    """
    dtype = choose_dtype(settings, declared)
    return worker.adapter(dtype) if get_served_lora_rank(settings) else worker.weights(dtype)


def choose_dtype(settings: Settings, declared: str) -> torch.dtype:
    """Choose the type of the next published policy.

    It is the first one of these that names a type: `trainer.publish.dtype`, `rollout.engine.dtype`, what the engines
    say that they compute in, and the model's configuration. Only before the first engine of a run has started is that
    last one asked: the policy is then the initial one, which loses nothing in the type that it has.

    Args:
        declared: what the engines say; empty before any did.
    """
    named = (settings.trainer.publish.dtype, settings.rollout.engine.dtype, declared)
    return next((_DTYPES[name] for name in named if name in _DTYPES), None) or _read_model_dtype(settings.model.path)


def _read_model_dtype(folder: Path) -> torch.dtype:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return _DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))), torch.float32)
