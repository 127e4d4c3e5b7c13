"""LoRA of the policy: its adapter, and its weights as a model without one.

The adapters' names are PEFT's (`base_model.model.….lora_A.weight`), which vLLM reads too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch.distributed.tensor import DTensor

from forage_trainer.weights.weights_files import Adapter

_ADAPTER = "default"
_PREFIX, _BASE = "base_model.model.", ".base_layer"


def merged(module: PeftModel, device: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight, with W + scaling * B A where there is an adapter, by the names of the model without one.

    Every process must walk the iterator: each tensor is gathered from all of them.
    """
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    for name, parameter in module.state_dict().items():
        if "lora_" in name:
            continue
        weight = _whole(parameter, device)
        layer = layers.get(name.removesuffix(f"{_BASE}.weight")) if name.endswith(f"{_BASE}.weight") else None
        if layer is not None:
            down, up = (_whole(part[_ADAPTER].weight, device) for part in (layer.lora_A, layer.lora_B))
            weight = weight + layer.scaling[_ADAPTER] * (up @ down)
        yield name.removeprefix(_PREFIX).replace(_BASE, ""), weight


def adapter(module: PeftModel, device: Any, dtype: torch.dtype) -> Adapter:
    """The adapter alone; every process must ask for it."""
    config = module.peft_config[_ADAPTER].to_dict()
    tensors = {
        name.replace(f".{_ADAPTER}.", "."): _whole(parameter, device).to(device="cpu", dtype=dtype).contiguous()
        for name, parameter in module.state_dict().items()
        if "lora_" in name
    }
    return Adapter(tensors, {name: _plain(value) for name, value in config.items()})


def _whole(parameter: torch.Tensor, device: Any) -> torch.Tensor:
    parameter = parameter.detach().to(device)
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value
