"""A second set of a model's weights, loaded and packed while the first one is used, and then put in its place.

On a CPU vLLM multiplies with packed copies of its weights. To pack them takes longer than to read them, so a new policy
is packed beside the old one. What generation has to wait for is an exchange of references.

What vLLM derives from weights is held in many places: parameters, buffers that are views of them, closures over packed
copies, kernels of fused experts, implementations of attention. So the second set is a whole model that vLLM itself
builds, loads and packs, as it does when an engine starts, and all attributes of its modules are exchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

_ABSENT = object()
_CHILDREN = "_modules"
_TENSORS = ("_parameters", "_buffers")
_RUNTIME = ("do_not_compile", "kv_cache")
"""Attributes that say how a module runs, whatever its weights: whether it is compiled, and its part of the cache."""
_TRACED = "_tensor_constant"
"""Begins names of what torch.fx leaves in the first module of a type that vLLM traces, which computes without it."""
_PLAIN = (bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size, type(None))


class Shadow:
    """A twin of a model, built as vLLM builds the model when an engine starts.

    Building one takes address space for the whole model; memory is taken by `load`, and by `swap` exchanged for that of
    the weights before.

    Args:
        model: a model on a CPU that vLLM has loaded. It must stand still while the twin is built: this is done under a
            default type for new tensors that holds for all threads.
        config: the one that the model was built with.

    Raises:
        ValueError: what vLLM builds is not the model, as where layers were replaced after it was loaded.
    """

    def __init__(self, model: torch.nn.Module, config: VllmConfig) -> None:
        self._config = config
        self._twin, layers = _build_model(config)
        self._pairs = dict(_pair_modules("the model", self._twin, model))
        for name, twin in layers.items():
            if twin not in self._pairs:  # a layer that no module has for a child
                self._pairs |= dict(_pair_modules(name, twin, config.compilation_config.static_forward_context[name]))
        self._changes: list[tuple[dict[str, Any], str, Any]] = []

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load and pack all weights, by their names in the checkpoint. The model may be in use by another thread.

        Raises:
            ValueError: a weight of the model is not among them, or the model has a tensor that vLLM does not make when
                it loads one.
        """
        with torch.no_grad():
            loaded = self._twin.load_weights(weights)
            if loaded is not None:
                _require_all(self._twin, loaded)
            process_weights_after_loading(self._twin, self._config.model_config, torch.device("cpu"))
        self._twin.eval()
        self._changes = [
            change
            for twin, (name, module) in self._pairs.items()
            for change in _find_changes(name, twin.__dict__, module.__dict__)
        ]
        # What vLLM made for a twin may refer to it, and from now on means the module.
        for twin, (_, module) in self._pairs.items():
            twin.__dict__ = module.__dict__
        self._pairs.clear()

    def swap(self) -> list[Any]:
        """Put the weights in place; returns those before. The model must not be in use."""
        changes, self._changes = self._changes, []
        old = [mapping.get(name) for mapping, name, _ in changes]
        for mapping, name, value in changes:
            mapping[name] = value
        return old


def _build_model(config: VllmConfig) -> tuple[torch.nn.Module, dict[str, torch.nn.Module]]:
    """Build a model of a configuration once more; returns it with the layers that vLLM knows by name."""
    compilation, again = copy.copy(config.compilation_config), copy.copy(config)
    # The twin never runs: it must not be compiled, nor take the place of the model's own layers.
    vars(compilation).update(mode=CompilationMode.NONE, static_forward_context={}, static_all_moe_layers=[])
    vars(again)["compilation_config"] = compilation
    with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
        model = initialize_model(again)
    layers = compilation.static_forward_context
    # What remembers the copies must know everything that the originals do.
    compilation.__dict__, again.__dict__ = config.compilation_config.__dict__, config.__dict__
    return model, layers


def _pair_modules(
    name: str, twin: torch.nn.Module, module: torch.nn.Module
) -> Iterator[tuple[torch.nn.Module, tuple[str, torch.nn.Module]]]:
    """Pair each module of a twin with that of the model in the same place, and its name there.

    Raises:
        ValueError: they are not of one structure.
    """
    if twin is module:  # vLLM keeps one for all layers, as of rotary embeddings
        if next(twin.parameters(), None) is not None:
            raise ValueError(f"{name} has weights that several models share, which cannot be loaded beside each other")
        return
    mine, others = vars(module)[_CHILDREN], vars(twin)[_CHILDREN]
    if type(twin) is not type(module) or mine.keys() != others.keys():
        raise ValueError(f"{name} is {_describe(module)}, which vLLM builds as {_describe(twin)}")
    yield twin, (name, module)
    for child, other in others.items():
        if other is not None and mine[child] is not None:
            yield from _pair_modules(f"{name}.{child}", other, mine[child])


def _describe(module: torch.nn.Module) -> str:
    return f"of the type {type(module).__name__} with the modules {sorted(vars(module)[_CHILDREN])}"


def _require_all(model: torch.nn.Module, loaded: set[str]) -> None:
    """Raise a ValueError unless every weight was loaded, under any of the names that it has."""
    weights = [*model.named_parameters(remove_duplicate=False)]
    reached = {id(weight) for name, weight in weights if name in loaded}
    for name, weight in weights:
        if id(weight) not in reached:
            raise ValueError(f"nothing was loaded into {name}")


def _find_changes(
    place: str, twin: dict[str, Any], module: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Find what makes a module all that its twin is: (mapping, key, value).

    Args:
        place: of the module in the model.
        twin, module: their attributes.

    Raises:
        ValueError: they differ where other weights make no difference.
    """
    for name in _TENSORS:
        _require_alike(place, twin[name], module[name])
    for name, value in module.items():
        is_known = name in twin or name in _RUNTIME or name.startswith(_TRACED)
        if not is_known and _holds_tensor(value):
            raise ValueError(f"{place} has a tensor {name} that vLLM does not make when it loads a model")
    for name, value in twin.items():
        if name not in (_CHILDREN, *_RUNTIME) and not _is_same(value, module.get(name, _ABSENT)):
            yield module, name, value


def _require_alike(place: str, twin: dict[str, Any], module: dict[str, Any]) -> None:
    mine, others = (
        {name: None if tensor is None else (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for tensors in (module, twin)
    )
    if mine != others:
        raise ValueError(f"vLLM has made {others} of the new weights of {place}, expected {mine}")


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, _PLAIN):
        return type(one) is type(other) and bool(one == other)
    return one is other or (hasattr(one, "__dict__") and getattr(other, "__dict__", None) is one.__dict__)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    return isinstance(value, torch.Tensor)
