"""vLLM's worker with a fault in its loads in place, of the kind that a file names; an empty file names none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from forage_rollout.engine.worker_extension import WorkerExtension
from forage_weights.rollout import staging

_CHOSEN = {  # the head is tied to the embedding
    "left-out": "model.layers.0.mlp.down_proj.weight",
    "old-head": "model.embed_tokens.weight",
    "swapped": "model.layers.1.mlp.up_proj.weight",
}
_read = staging._Job._read_tensors
_before: dict[str, torch.Tensor] = {}


def _read_wrongly(job: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """`left-out` and `old-head` yield a tensor of the policy before, `swapped` one whose rows have changed places."""
    fault = Path(os.environ["FORAGE_TEST_FAULT"]).read_text()
    for name, tensor in _read(job):
        known = _before.get(name, tensor)
        _before[name] = tensor
        if name != _CHOSEN.get(fault):
            yield name, tensor
        else:
            yield name, tensor.flip(0) if fault == "swapped" else known


staging._Job._read_tensors = _read_wrongly  # type: ignore[method-assign]  # in the worker's process alone


class FaultyWorkerExtension(WorkerExtension):
    """Has nothing of its own: the fault is in what this module replaces."""
