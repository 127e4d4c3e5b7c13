"""The policy's LoRA adapter alone, by PEFT's names (`base_model.model.….lora_A.weight`), which vLLM reads too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer, ParamWrapper

from forage_trainer.weights.checkpoint_tensors import is_of_adapter
from forage_weights.trainer.model_files import Adapter

_ADAPTER = "default"
_ROUTERS = ("gate", "router")
_EXPERTS_DIM = 3
"""Dimensions of a parameter of fused experts: the expert, and those of its matrix."""


def extract_adapter(module: PeftModel, gather: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Adapter:
    """Extract the adapter; every process must call it, since each tensor is gathered from all of them."""
    tensors = {
        name.replace(f".{_ADAPTER}.", "."): gather(parameter).to(device="cpu", dtype=dtype).contiguous()
        for name, parameter in module.state_dict().items()
        if is_of_adapter(name)
    }
    return Adapter(tensors, describe_adapter(module.peft_config[_ADAPTER]))


def count_adapted(module: PeftModel) -> dict[str, dict[str, int]]:
    """Count what has an adapter, by the last part of its name: layers as `modules`, fused `experts`, and `routers`."""
    counts: dict[str, Counter[str]] = {"modules": Counter(), "experts": Counter(), "routers": Counter()}
    for path, layer in module.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        name = path.replace(".base_layer", "").rpartition(".")[2]
        if not isinstance(layer, ParamWrapper):
            counts["routers" if name in _ROUTERS else "modules"][name] += 1
        elif layer.get_param().ndim == _EXPERTS_DIM:
            counts["experts"][layer.parameter_name] += 1
        else:
            counts["routers"][name] += 1
    return {kind: dict(sorted(found.items())) for kind, found in counts.items()}


def describe_adapter(config: PeftConfig) -> dict[str, Any]:
    """The configuration of an adapter as JSON, which has no sets."""
    return {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
