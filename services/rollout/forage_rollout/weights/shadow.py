"""A second set of a model's weights, loaded and packed while the first one is used, and then put in its place.

On a CPU vLLM multiplies with packed copies of its weights. To pack them takes longer than to read them, so a new policy
is packed beside the old one. What generation has to wait for is an exchange of references.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs, sanitize_layer_refs
from vllm.model_executor.model_loader.utils import process_weights_after_loading

_GONE = object()


class Shadow:
    """A twin of every module of a model: their settings are the same objects, their weights are others.

    Building one takes memory for the whole model, which `swap` exchanges for that of the weights before.

    Args:
        model: a model on a CPU that vLLM has loaded; it may be in use by another thread.
    """

    def __init__(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        self._model_config = model_config
        self._before = {module: dict(module.__dict__) for module in model.modules()}
        self._twins: dict[torch.nn.Module, Any] = {module: object.__new__(type(module)) for module in self._before}
        tensors: dict[int, torch.Tensor] = {}
        for module, twin in self._twins.items():
            self._fill_twin(module, twin, tensors)
        self._twin = self._twins[model]
        self._changes: list[tuple[dict[str, Any], str, Any]] = []

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load and pack all weights, by their names in the checkpoint.

        Raises:
            ValueError: a weight of the model is not among them.
        """
        with torch.no_grad():
            loaded = self._twin.load_weights(weights)
            if missing := loaded is not None and sorted(dict(self._twin.named_parameters()).keys() - loaded):
                raise ValueError(f"nothing was loaded into {missing[0]}")
            process_weights_after_loading(self._twin, self._model_config, torch.device("cpu"))
        self._changes = [change for module, twin in self._twins.items() for change in self._find_changes(module, twin)]
        # The weights' loaders were bound to twins, which would live as long as they do.
        for twin in self._twins.values():
            twin.__dict__.clear()

    def swap(self) -> list[Any]:
        """Put the weights in place; returns those before. The model must not be in use."""
        changes, self._changes = self._changes, []
        old = [mapping.get(name) for mapping, name, _ in changes]
        for mapping, name, value in changes:
            if value is _GONE:
                mapping.pop(name, None)
            else:
                mapping[name] = value
        return old

    def _fill_twin(self, module: torch.nn.Module, twin: Any, tensors: dict[int, torch.Tensor]) -> None:
        """Give a twin the attributes of its module, with tensors of its own that look as they did before packing.

        Args:
            tensors: id of a tensor in use → its twin, which modules with tied weights share.
        """
        before = self._before[module]
        twin.__dict__.update(before)
        twin.__dict__.pop("_already_called_process_weights_after_loading", None)
        children = before["_modules"].items()
        twin._modules = {name: None if child is None else self._twins[child] for name, child in children}
        twin._non_persistent_buffers_set = set(before["_non_persistent_buffers_set"])
        if "quant_method" in before:
            twin.__dict__["quant_method"] = copy.copy(before["quant_method"])
        parameters, _ = get_layerwise_info(module).restore_metadata
        # vLLM records no biases: they are never packed.
        biases = {name: tensor for name, tensor in before["_parameters"].items() if name == "bias"}
        twin._parameters = {}
        for name, recorded in {**biases, **parameters}.items():
            used = before["_parameters"].get(name)
            key = id(recorded if used is None else used)
            if recorded is not None and key not in tensors:
                meta = recorded if recorded.is_meta else sanitize_layer_refs(to_meta_tensor(recorded), module)
                tensors[key] = restore_layer_refs(materialize_meta_tensor(meta), twin)
            twin._parameters[name] = None if recorded is None else tensors[key]
        buffers = before["_buffers"].items()
        twin._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in buffers}

    def _find_changes(self, module: torch.nn.Module, twin: Any) -> list[tuple[dict[str, Any], str, Any]]:
        """What makes the module use its twin's weights: (mapping, key, value)."""
        before, after = self._before[module], dict(twin.__dict__)
        changes: list[tuple[dict[str, Any], str, Any]] = []
        for name in before["_parameters"].keys() | after["_parameters"].keys():
            changes.append((module._parameters, name, after["_parameters"].get(name, _GONE)))
        for name, buffer in after["_buffers"].items():
            if not _are_equal(before["_buffers"].get(name), buffer):
                changes.append((module._buffers, name, buffer))
        for tensor in (change[2] for change in changes):
            _rebind(tensor, twin, module)
        kept = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
        if _hold_the_same(before.get("quant_method"), after.get("quant_method")):
            kept.add("quant_method")
        changes += [
            (module.__dict__, name, value)
            for name, value in after.items()
            if name not in kept and before.get(name, _GONE) is not value
        ]
        return changes


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _hold_the_same(one: Any, other: Any) -> bool:
    """Whether two copies of an object still have the same attributes."""
    mine, others = getattr(one, "__dict__", {}), getattr(other, "__dict__", {})
    return mine.keys() == others.keys() and all(mine[name] is others[name] for name in mine)


def _rebind(tensor: Any, twin: Any, module: torch.nn.Module) -> None:
    for name, value in getattr(tensor, "__dict__", {}).items():
        if isinstance(value, MethodType) and value.__self__ is twin:
            tensor.__dict__[name] = value.__func__.__get__(module)
