"""Loading of a policy into the tensors of a model that stands still: what engines on GPUs do within the pause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def map_tensors(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of safetensors files as views of the files' pages, so that only what is copied is read."""
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - a safetensors file is not a dict
                yield name, opened.get_tensor(name)


def load_whole(model: torch.nn.Module, model_config: ModelConfig, files: Sequence[Path]) -> None:
    """Load all weights, layer by layer and into the tensors in use: a worker copies only its slices to its device."""
    initialize_layerwise_reload(model)
    model.load_weights(map_tensors(files))
    finalize_layerwise_reload(model, model_config)


def is_patchable(model: torch.nn.Module) -> bool:
    """Whether single elements can be replaced: nothing is derived from the weights, or kept in another order."""
    return all(
        isinstance(getattr(module, "quant_method", None), (*_PLAIN, type(None)))
        or not isinstance(module.quant_method, QuantizeMethodBase)
        for module in model.modules()
    ) and all(type(module) is Attention for module in model.modules() if is_deferred_attention_layer(module))


def load_patches(model: torch.nn.Module, patches: Sequence[CheckpointWeightPatch]) -> None:
    """Replace the elements at each tensor's positions, which must not repeat.

    Raises:
        NotImplementedError: the model converts a weight while it loads it; some may already be replaced.
    """
    load_checkpoint_weight_patches(model, patches, validate_unique_indices=False)
