"""LoRA adapters that are refused before an engine sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_adapter import MAX_RANK, announce, write_adapter
from model_folders import write_weights
from safetensors.numpy import load_file, save_file

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.files.model_folder import read_model_shapes
from forage_weights.announcement import PolicyError, verify_files
from forage_weights.folders import ADAPTER_WEIGHTS
from forage_weights.rollout.adapter import verify_adapter


def verify_copy(policy: Policy, model: Path) -> Path:
    return verify_adapter(policy, verify_files(policy, Path(policy.uri)), read_model_shapes(model), MAX_RANK)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of one layer of a Qwen2."""
    folder = tmp_path_factory.mktemp("model")
    layer = "model.layers.0"
    shapes = {f"{layer}.mlp.{name}_proj.weight": [32, 16] for name in ("gate", "up")}
    shapes |= {f"{layer}.self_attn.{name}_proj.weight": [16, 16] for name in "qkvo"}
    shapes |= {f"{layer}.mlp.down_proj.weight": [16, 32], "model.embed_tokens.weight": [40, 16]}
    write_weights(folder / "model.safetensors", shapes)
    return folder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"r": 9}, "rank 9: expected 1 to rollout.engine.max_lora_rank 8"),
        ({"r": 0}, "rank 0"),
        ({"r": 5}, r"has shape \[4, \d+\], expected \[5, \d+\]"),
        ({"r": "many"}, "no usable adapter_config.json"),
        ({"lora_alpha": 0}, "would change nothing"),
        ({"use_dora": True}, "sets use_dora"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "sets rank_pattern"),
        ({"bias": "all"}, "sets bias"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    assert verify_copy(write_adapter(tmp_path / "good", model, 1), model) == tmp_path / "good"
    with pytest.raises(PolicyError, match=sentence):
        verify_copy(write_adapter(tmp_path / "adapter", model, 1, **changes), model)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (
            {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": (4, 16)},
            "not a LoRA matrix of a linear layer",
        ),
        ({"base_model.model.model.embed_tokens.lora_A.weight": (4, 16)}, "not a LoRA matrix of a linear layer"),
        ({"model.layers.0.mlp.up_proj.weight": (32, 16)}, "not a LoRA matrix of a linear layer"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (4, 16)}, "only one of the two matrices"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": (4, 16)}, r"expected \[32, 4\]"),
        ({}, "holds no matrices"),
    ],
)
def test_matrices_that_do_not_fit_the_model_are_refused(
    model: Path, tmp_path: Path, tensors: dict[str, tuple[int, ...]], sentence: str
) -> None:
    folder = tmp_path / "adapter"
    write_adapter(folder, model, 1)
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, folder / ADAPTER_WEIGHTS)
    with pytest.raises(PolicyError, match=sentence):
        verify_copy(announce(folder), model)


def test_an_adapter_is_its_two_files(model: Path, tmp_path: Path) -> None:
    policy = write_adapter(tmp_path / "adapter", model, 1)
    del policy.files[0]
    with pytest.raises(PolicyError, match=r"expected adapter_config\.json and adapter_model\.safetensors"):
        verify_copy(policy, model)


def test_an_adapter_that_is_not_finite_is_refused(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    write_adapter(folder, model, 1)
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    last = sorted(tensors)[-1]
    tensors[last][0, 0] = np.nan
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    with pytest.raises(PolicyError, match=f"{last} is not finite at element 0"):
        verify_copy(announce(folder), model)
