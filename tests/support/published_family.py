"""What is published of a model, against what `save_pretrained` writes of it. Imports torch."""

from __future__ import annotations

from pathlib import Path

import torch
from model_families import build_family, move_weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from forage_trainer.weights.checkpoint_tensors import build_checkpoint
from forage_weights.trainer.model_files import write_model_folder


def read_saved(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a model folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def publish_family(kind: str, folder: Path) -> PreTrainedModel:
    """Write a family's tiny model to `folder`/start, train it a little and publish it to `folder`/published.

    Returns: the trained model.
    """
    start = build_family(kind)
    move_weights(start, seed=4, scale=0.08)  # so that no term is 0, and attention is not the same for all tokens
    start.save_pretrained(folder / "start")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
    move_weights(model)
    (folder / "published").mkdir()
    published = build_checkpoint(model, torch.Tensor.detach, torch.Tensor.clone)
    write_model_folder(folder / "published", folder / "start", published, 1 << 40)
    return model


def check_published(model: PreTrainedModel, folder: Path) -> None:
    """Check that `folder`/published is what `save_pretrained` writes of the model, and reads as what was trained."""
    model.save_pretrained(folder / "expected")
    assert_equal(read_saved(folder / "published"), read_saved(folder / "expected"))
    again, report = AutoModelForCausalLM.from_pretrained(
        folder / "published", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ignored = set(model._keys_to_ignore_on_save or ())
    trained = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    assert_equal({name: tensor for name, tensor in again.state_dict().items() if name not in ignored}, trained)
