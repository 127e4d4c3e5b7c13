"""What is published of a model, against what `save_pretrained` writes of it. Imports torch."""

from __future__ import annotations

from pathlib import Path

import torch
from model_families import build_family
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from forage_trainer.weights.checkpoint_tensors import build_checkpoint
from forage_trainer.weights.model_files import write_model_folder


def read_saved(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a model folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def move_weights(model: torch.nn.Module, seed: int = 5) -> None:
    """Change every parameter a little, as training does."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter  # of the only process: whole
            local.add_(0.02 * torch.randn(parameter.shape, generator=draw))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def check_published(kind: str, folder: Path) -> None:
    """Train a family a little, publish it and read it back."""
    build_family(kind).save_pretrained(folder / "start")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
    move_weights(model)
    published = build_checkpoint(model, torch.Tensor.detach, torch.Tensor.clone)
    model.save_pretrained(folder / "expected")
    assert_equal(published, read_saved(folder / "expected"))
    (folder / "published").mkdir()
    write_model_folder(folder / "published", folder / "start", published, 1 << 40)
    again, report = AutoModelForCausalLM.from_pretrained(
        folder / "published", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ignored = set(model._keys_to_ignore_on_save or ())
    trained = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    assert_equal({name: tensor for name, tensor in again.state_dict().items() if name not in ignored}, trained)
