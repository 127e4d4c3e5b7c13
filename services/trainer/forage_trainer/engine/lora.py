"""The policy's LoRA adapter, alone or merged into the weights.

Tensors of an adapter have PEFT's names (`base_model.model.….lora_A.weight`), which vLLM reads too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch.distributed.tensor import DTensor

from forage_trainer.weights.model_files import Adapter

_ADAPTER = "default"
_PREFIX, _BASE = "base_model.model.", ".base_layer"


def merge_adapter(module: PeftModel, device: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight, with W + scaling * B A where it has an adapter, by the names of the model without one.

    Every process must consume the iterator: each tensor is gathered from all of them.
    """
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    for name, parameter in module.state_dict().items():
        if "lora_" in name:
            continue
        weight = _gather(parameter, device)
        layer = layers.get(name.removesuffix(f"{_BASE}.weight")) if name.endswith(f"{_BASE}.weight") else None
        if layer is not None:
            down, up = (_gather(part[_ADAPTER].weight, device) for part in (layer.lora_A, layer.lora_B))
            weight = weight + layer.scaling[_ADAPTER] * (up @ down)
        yield name.removeprefix(_PREFIX).replace(_BASE, ""), weight


def extract_adapter(module: PeftModel, device: Any, dtype: torch.dtype) -> Adapter:
    """Extract the adapter; every process must call it, since each tensor is gathered from all of them."""
    config = module.peft_config[_ADAPTER].to_dict()
    tensors = {
        name.replace(f".{_ADAPTER}.", "."): _gather(parameter, device).to(device="cpu", dtype=dtype).contiguous()
        for name, parameter in module.state_dict().items()
        if "lora_" in name
    }
    # JSON has no sets.
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    return Adapter(tensors, plain)


def _gather(parameter: torch.Tensor, device: Any) -> torch.Tensor:
    parameter = parameter.detach().to(device)
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
