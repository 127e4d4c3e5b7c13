"""The policy's LoRA adapter alone, by PEFT's names (`base_model.model.….lora_A.weight`), which vLLM reads too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import PeftConfig, PeftModel

from forage_trainer.weights.checkpoint_tensors import is_of_adapter
from forage_trainer.weights.model_files import Adapter

_ADAPTER = "default"


def extract_adapter(module: PeftModel, gather: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Adapter:
    """Extract the adapter; every process must call it, since each tensor is gathered from all of them."""
    tensors = {
        name.replace(f".{_ADAPTER}.", "."): gather(parameter).to(device="cpu", dtype=dtype).contiguous()
        for name, parameter in module.state_dict().items()
        if is_of_adapter(name)
    }
    return Adapter(tensors, describe_adapter(module.peft_config[_ADAPTER]))


def describe_adapter(config: PeftConfig) -> dict[str, Any]:
    """The configuration of an adapter as JSON, which has no sets."""
    return {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
