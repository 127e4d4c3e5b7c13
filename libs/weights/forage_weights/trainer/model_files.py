"""Model folders in the Hugging Face layout: safetensors (one file or indexed shards), configuration, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forage_runtime.files.model_folder import WEIGHTS
from forage_weights.digests import compute_digest
from forage_weights.folders import DESCRIPTION, SIGNED
from forage_weights.trainer.safetensors_file import digest_safetensors, write_safetensors

INDEX = f"{WEIGHTS}.index.json"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
CONFIGURATION = "huggingface"
"""Folder of a checkpoint with the configuration and tokenizer of its model."""
LORA_META = "lora_train_meta.json"
"""PEFT's configuration of a checkpoint's adapter."""
MODEL_META = "model_meta.json"
"""Class and conversions of a checkpoint's model."""
_STEM, _SUFFIX = Path(WEIGHTS).stem, Path(WEIGHTS).suffix
_COPIED = {".json", ".txt", ".jinja", ".model"}


@dataclass(frozen=True)
class WeightsFile:
    """A file of weights. digest: as of `forage_weights.digests`."""

    name: str
    digest: str
    bytes: int


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter. tensors: by PEFT's names, on the CPU; config: the content of PEFT's adapter_config.json."""

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]


def write_model_folder(
    folder: Path, source: Path, weights: Mapping[str, torch.Tensor], shard_bytes: int
) -> tuple[WeightsFile, ...]:
    """Fill a folder with `weights`, and with configuration and tokenizer of `source`. Returns the files of weights.

    The configuration names the dtype of the weights. Weights of more than `shard_bytes` are split into shards.

    Raises:
        OSError: the disk is full or fails.
    """
    copy_configuration(source, folder)
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    config = set_dtype(json.loads((source / "config.json").read_text(encoding="utf-8")), dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shards = dict(_name_shards(weights, shard_bytes))
    if len(shards) > 1:
        places = {tensor: name for name, part in shards.items() for tensor in part}
        total = sum(tensor.nbytes for tensor in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    files = []
    for name, part in shards.items():
        digest = write_safetensors(folder / name, part)
        files.append(WeightsFile(name, digest, (folder / name).stat().st_size))
    return tuple(files)


def copy_configuration(source: Path, folder: Path) -> None:
    """Copy the files of a model folder that are not weights: configuration, tokenizer, chat template."""
    for file in sorted(source.iterdir()):
        if file.suffix in _COPIED and not file.name.endswith(".index.json") and file.name not in (DESCRIPTION, SIGNED):
            shutil.copyfile(file, folder / file.name)


def digest_model_files(weights: Mapping[str, torch.Tensor], shard_bytes: int) -> tuple[WeightsFile, ...]:
    """Describe the files of weights that `write_model_folder` would write."""
    return tuple(WeightsFile(name, *digest_safetensors(part)) for name, part in _name_shards(weights, shard_bytes))


def _name_shards(
    weights: Mapping[str, torch.Tensor], shard_bytes: int
) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """Yield each file's name and tensors."""
    cuts = split_shards({name: tensor.nbytes for name, tensor in weights.items()}, shard_bytes)
    for number, cut in enumerate(cuts, 1):
        name = WEIGHTS if len(cuts) == 1 else f"{_STEM}-{number:05}-of-{len(cuts):05}{_SUFFIX}"
        yield name, {tensor: weights[tensor] for tensor in cut}


def write_adapter_folder(folder: Path, adapter: Adapter) -> tuple[WeightsFile, ...]:
    """Fill a folder with an adapter in PEFT's layout. Returns its two files.

    Raises:
        OSError: the disk is full or fails.
    """
    config = (json.dumps(adapter.config, indent=2) + "\n").encode()
    (folder / ADAPTER_CONFIG).write_bytes(config)
    digest = write_safetensors(folder / ADAPTER_WEIGHTS, adapter.tensors)
    return (
        WeightsFile(ADAPTER_CONFIG, compute_digest(config), len(config)),
        WeightsFile(ADAPTER_WEIGHTS, digest, (folder / ADAPTER_WEIGHTS).stat().st_size),
    )


def split_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Split names, in their order, before the one that would make a shard larger than `limit` bytes."""
    cuts: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if cuts[-1] and filled + size > limit:
            cuts.append([])
            filled = 0
        cuts[-1].append(name)
        filled += size
    return cuts


def set_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a model configuration that names the dtype of its weights."""
    return {**{k: v for k, v in config.items() if k != "torch_dtype"}, "dtype": str(dtype).removeprefix("torch.")}
