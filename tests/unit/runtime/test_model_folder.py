"""A model folder that is not one is refused with a sentence that names the file and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_folders import write_smallest_model, write_weights

from forage_runtime.errors import DataError
from forage_runtime.files.model_folder import check_model_folder, read_context, read_model_shapes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_smallest_model(tmp_path)


def test_a_complete_folder_is_accepted(folder: Path) -> None:
    check_model_folder(folder)
    assert read_model_shapes(folder) == {"embed": (4, 2), "norm": (2,)}


def test_weights_in_several_files_are_accepted(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_weights(folder / "one.safetensors", {"embed": [4, 2]})
    write_weights(folder / "two.safetensors", {"norm": [2]})
    index = {"weight_map": {"embed": "one.safetensors", "norm": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_model_folder(folder)
    assert read_model_shapes(folder) == {"embed": (4, 2), "norm": (2,)}


BREAK: dict[str, Callable[[Path], object]] = {
    "does not exist": shutil.rmtree,
    "no readable config.json": lambda f: (f / "config.json").unlink(),
    "config.json is not JSON": lambda f: (f / "config.json").write_text("{"),
    "config.json has no 'architectures'": lambda f: (f / "config.json").write_text("{}"),
    "no readable tokenizer.json": lambda f: (f / "tokenizer.json").unlink(),
    "no chat template": lambda f: (f / "tokenizer_config.json").write_text("{}"),
    "model.safetensors: No such file": lambda f: (f / "model.safetensors").unlink(),
    "no safetensors header": lambda f: (f / "model.safetensors").write_bytes(b"x" * 100),
    "damaged safetensors header": lambda f: (f / "model.safetensors").write_bytes((3).to_bytes(8, "little") + b"{{{"),
    "but the header describes": lambda f: (f / "model.safetensors").write_bytes(
        (f / "model.safetensors").read_bytes()[:-1]
    ),
}


@pytest.mark.parametrize("sentence", BREAK)
def test_a_folder_that_is_not_a_model_is_refused_with_a_remedy(sentence: str, folder: Path) -> None:
    BREAK[sentence](folder)
    with pytest.raises(DataError, match=r"set model\.path to a complete Hugging Face folder") as refusal:
        check_model_folder(folder)
    assert sentence in str(refusal.value)
    assert str(folder) in str(refusal.value)


def configure_quantization(folder: Path, config: dict[str, object]) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "quantization_config": config}))


@pytest.mark.parametrize(
    ("config", "kind", "found"),
    [
        ({"quant_method": "gguf", "gguf_file": "x.gguf"}, "F32", "'gguf', but the tensors beside it are F32"),
        ({"quant_method": "gguf"}, "U8", "'gguf', but the tensors beside it are U8"),
        ({"quant_method": "fp8"}, "BF16", "'fp8', but the tensors beside it are BF16"),
        ({"bits": 4}, "F32", "{'bits': 4}, but the tensors beside it are F32"),
    ],
)
def test_a_configuration_that_says_quantized_beside_tensors_that_are_not_is_refused(
    folder: Path, config: dict[str, object], kind: str, found: str
) -> None:
    configure_quantization(folder, config)
    write_weights(folder / "model.safetensors", {"embed": [4, 2]}, kind)
    with pytest.raises(DataError, match=r"config\.json says quantization_config .*delete quant") as refusal:
        check_model_folder(folder)
    assert found in str(refusal.value)
    check_model_folder(folder, weights=False)


@pytest.mark.parametrize(
    ("config", "kind", "name"),
    [
        ({"quant_method": "fp8"}, "F8_E4M3", "embed"),
        ({"quant_method": "compressed-tensors"}, "BF16", "embed.weight_scale"),
        ({"quant_method": "bitnet", "quantization_mode": "online"}, "BF16", "embed"),
        ({"quant_method": "mxfp4"}, "U8", "experts.gate_up_proj_blocks"),
    ],
)
def test_a_quantized_folder_is_accepted(folder: Path, config: dict[str, object], kind: str, name: str) -> None:
    configure_quantization(folder, config)
    write_weights(folder / "model.safetensors", {name: [4, 2]}, kind)
    check_model_folder(folder)


def test_the_shipped_policy_is_accepted(repository: Path) -> None:
    check_model_folder(repository / "models/tiny-policy")


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 1024}, 1024),
        ({"n_positions": 512}, 512),
        ({"text_config": {"max_position_embeddings": 2048}, "max_position_embeddings": 1}, 2048),
        ({"max_position_embeddings": 1024, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
        ({"max_position_embeddings": 1024, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 1024),
        ({"max_position_embeddings": 8192, "rope_parameters": {"full": {"rope_type": "default"}, "local": {}}}, 8192),
        ({"max_position_embeddings": 1024, "model_max_length": 4096}, None),
        ({}, None),
    ],
)
def test_the_positions_of_a_model_are_read(config: dict[str, Any], tokens: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_context(tmp_path) == tokens
