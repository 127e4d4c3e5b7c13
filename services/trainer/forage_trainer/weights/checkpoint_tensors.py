"""The tensors of a model as `save_pretrained` writes them, LoRA merged: the only place that knows names on disk.

In memory transformers fuses experts and renames modules, and its minor releases do so in other ways. It therefore keeps
a conversion for each family and reverses it when it saves. PEFT merges its adapters itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightTransform, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

Convert = Callable[[torch.Tensor], torch.Tensor]
_PREFIX, _BASE, _ADAPTER = "base_model.model.", ".base_layer", "lora_"


def build_checkpoint(module: Any, gather: Convert, finish: Convert) -> dict[str, torch.Tensor]:
    """Build what `save_pretrained` would write of a model, or of a model with an adapter that is merged.

    Args:
        module: a model of transformers, or PEFT's model around one; its parameters may be sharded.
        gather: makes a parameter or buffer whole. It is called once for each, in an order that follows from the names:
            where that needs other processes, all of them must call this function.
        finish: makes of a whole tensor, merged, what is kept of it; it must not be the parameter's memory.

    Tensors are gathered one after the other, and those of the checkpoint are cut from them at once: beside the result
    there is memory for one fused parameter.
    """
    model = get_base(module)
    adapted = {id(_find_target(layer)): layer for layer in _list_adapters(module)}
    sources: dict[int, Callable[[], torch.Tensor]] = {}
    named: dict[str, Callable[[], torch.Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not is_of_adapter(name):
            layer = adapted.get(id(tensor))
            read = partial(gather, tensor) if layer is None else partial(_merge, layer, gather)
            # Names of one parameter share a source, by which tied weights are known.
            named[_name_without_adapter(name)] = sources.setdefault(id(tensor), partial(_apply, finish, read))
    return _convert(model, named)


def get_base(module: Any) -> Any:
    """Return the model of transformers, which an adapter may be around."""
    return module.get_base_model() if isinstance(module, PeftModel) else module


def cast(tensor: torch.Tensor, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    """Change the type of a tensor unless it holds integers, such as a table of experts; options are of `Tensor.to`."""
    return tensor.to(dtype=dtype if tensor.is_floating_point() else tensor.dtype, **options)


def is_of_adapter(name: str) -> bool:
    """Whether a tensor's name in memory is one of an adapter's."""
    return any(part.startswith(_ADAPTER) for part in name.split("."))


def build_skeleton(config: PretrainedConfig, class_name: str, adapter: Mapping[str, Any] | None) -> Any:
    """Build a model without weights, on the device meta.

    Args:
        class_name: of the model in transformers; another name: the one for causal language models.
        adapter: fields of PEFT's LoraConfig; None: the model has none.
    """
    family = getattr(transformers, class_name, None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config) if family is None else family._from_config(config)
        return model if adapter is None else get_peft_model(model, LoraConfig(**adapter))


def list_conversions(module: Any) -> list[str]:
    """Describe the conversions that the model was loaded with: a folder may already have had the names in memory."""
    return sorted(map(_describe, getattr(get_base(module), "_weight_conversions", None) or ()))


def set_conversions(module: Any, described: Sequence[str]) -> None:
    """Make a model be saved as one is that was loaded with the conversions described."""
    model = get_base(module)
    model._weight_conversions = [one for one in get_model_conversion_mapping(model) if _describe(one) in described]


def _convert(model: Any, named: Mapping[str, Callable[[], torch.Tensor]]) -> dict[str, torch.Tensor]:
    ignored = model._keys_to_ignore_on_save or ()
    kept = {name: source for name, source in named.items() if name not in ignored}
    stand_ins = {id(source): torch.empty(1) for source in kept.values()}
    saved = remove_tied_weights_from_state_dict({name: stand_ins[id(one)] for name, one in kept.items()}, model)
    # Sources are called by each conversion, as tensors are that a file is read for.
    converted = revert_weight_conversion(model, {name: kept[name] for name in saved})
    # A model without conversions gets its sources back.
    return {name: (one() if callable(one) else one).contiguous() for name, one in converted.items()}


def _apply(finish: Convert, read: Callable[[], torch.Tensor]) -> torch.Tensor:
    return finish(read())


def _name_without_adapter(name: str) -> str:
    return name.removeprefix(_PREFIX).replace(_BASE, "")


def _list_adapters(module: Any) -> list[LoraLayer]:
    return [layer for layer in module.modules() if isinstance(layer, LoraLayer)] if is_adapted(module) else []


def is_adapted(module: Any) -> bool:
    """Whether the model has an adapter."""
    return isinstance(module, PeftModel)


def _find_target(layer: LoraLayer) -> torch.Tensor:
    """The parameter that a layer of an adapter changes: a weight, or a parameter such as fused experts."""
    target = getattr(layer.get_base_layer(), _get_target_name(layer))
    assert isinstance(target, torch.Tensor)
    return target


def _get_target_name(layer: LoraLayer) -> str:
    return str(getattr(layer, "parameter_name", "weight"))


def _merge(layer: LoraLayer, gather: Convert) -> torch.Tensor:
    """Let PEFT merge a layer of an adapter into a whole copy of its target."""
    base, name = layer.get_base_layer(), _get_target_name(layer)
    own = [part for kind in layer.adapter_layer_names for part in getattr(layer, kind).modules()]
    whole: dict[tuple[torch.nn.Module, str], torch.Tensor] = {(base, name): gather(base._parameters[name]).clone()}
    whole |= {(part, key): gather(one) for part in own for key, one in part._parameters.items() if one is not None}
    with torch.no_grad(), _exchanged(whole):
        layer.merge()
        layer.merged_adapters.clear()
        return _find_target(layer)


@contextmanager
def _exchanged(tensors: Mapping[tuple[torch.nn.Module, str], torch.Tensor]) -> Iterator[None]:
    """Put other tensors in the places of parameters meanwhile."""
    before = {(part, name): part._parameters[name] for part, name in tensors}
    try:
        for (part, name), tensor in tensors.items():
            part._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)
        yield
    finally:
        for (part, name), parameter in before.items():
            part._parameters[name] = parameter


def _describe(conversion: WeightTransform) -> str:
    return f"{conversion.scope_prefix or ''}:{conversion!r}"
