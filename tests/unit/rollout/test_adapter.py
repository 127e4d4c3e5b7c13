"""LoRA adapters that are refused before an engine sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lora_adapter import MAX_RANK, announce, write_adapter

from forage_common.files.model_folder import read_model_shapes
from forage_common.v1.trajectory_pb2 import Policy
from forage_policies.announcement import PolicyError, verify_files
from forage_rollout.weights.adapter import WEIGHTS, verify_adapter


def verify_copy(policy: Policy, model: Path) -> Path:
    return verify_adapter(policy, verify_files(policy, Path(policy.uri)), read_model_shapes(model), MAX_RANK)


@pytest.fixture(scope="module")
def model(make_model: Any) -> Path:
    folder: Path = make_model(0)
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
            {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": (4, 128)},
            "not a LoRA matrix of a linear layer",
        ),
        ({"base_model.model.model.embed_tokens.lora_A.weight": (4, 128)}, "not a LoRA matrix of a linear layer"),
        ({"model.layers.0.mlp.up_proj.weight": (256, 128)}, "not a LoRA matrix of a linear layer"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (4, 128)}, "only one of the two matrices"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": (4, 128)}, r"expected \[256, 4\]"),
        ({}, "holds no matrices"),
    ],
)
def test_matrices_that_do_not_fit_the_model_are_refused(
    model: Path, tmp_path: Path, tensors: dict[str, tuple[int, ...]], sentence: str
) -> None:
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "adapter"
    write_adapter(folder, model, 1)
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, folder / WEIGHTS)
    with pytest.raises(PolicyError, match=sentence):
        verify_copy(announce(folder), model)


def test_an_adapter_is_its_two_files(model: Path, tmp_path: Path) -> None:
    policy = write_adapter(tmp_path / "adapter", model, 1)
    del policy.files[0]
    with pytest.raises(PolicyError, match=r"expected adapter_config\.json and adapter_model\.safetensors"):
        verify_copy(policy, model)


def test_an_adapter_that_is_not_finite_is_refused(model: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "adapter"
    write_adapter(folder, model, 1)
    tensors = load_file(folder / WEIGHTS)
    last = sorted(tensors)[-1]
    tensors[last][0, 0] = torch.nan
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(PolicyError, match=f"{last} is not finite at element 0"):
        verify_copy(announce(folder), model)
