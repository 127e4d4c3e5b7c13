"""Model folders in the Hugging Face layout: safetensors (one file or indexed shards), configuration, tokenizer.

Safetensors are written from the tensors' own memory: one thread writes the file while others compute its digest.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from forage_runtime.files.model_folder import WEIGHTS
from forage_weights.digests import PREFIX, compute_digest
from forage_weights.folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, DESCRIPTION, SIGNED

INDEX = f"{WEIGHTS}.index.json"
CONFIGURATION = "huggingface"
"""Folder of a checkpoint with the configuration and tokenizer of its model."""
LORA_META = "lora_train_meta.json"
"""PEFT's configuration of a checkpoint's adapter."""
MODEL_META = "model_meta.json"
"""Class and conversions of a checkpoint's model."""
_STEM, _SUFFIX = Path(WEIGHTS).stem, Path(WEIGHTS).suffix
_COPIED = {".json", ".txt", ".jinja", ".model"}
_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The integers are tables in a model's buffers, such as the experts of each token."""
_ALIGNED = 8
_PIECE = 4 << 20
"""Bytes; small enough that the second thread still finds them in a cache."""


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


def write_safetensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write tensors in the safetensors format and flush them to the disk.

    Returns: the file's digest.

    Raises:
        OSError: the disk is full or fails.
        ValueError: a tensor's dtype cannot be published.
    """
    digest = blake3(max_threads=blake3.AUTO)
    with file.open("wb") as out, ThreadPoolExecutor(1) as digester:
        for piece in _split_pieces(tensors):
            digester.submit(digest.update, piece)
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    return f"{PREFIX}{digest.hexdigest()}"


def write_unsynced(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors in the safetensors format; neither flushed to the disk nor digested.

    Raises:
        OSError: the disk is full or fails.
    """
    with file.open("wb") as out:
        for piece in _split_pieces(tensors, metadata):
            out.write(piece)


def digest_safetensors(tensors: Mapping[str, torch.Tensor]) -> tuple[str, int]:
    """Compute the digest and the bytes of the file that `write_safetensors` would write.

    Raises:
        ValueError: a tensor's dtype cannot be published.
    """
    digest = blake3(max_threads=blake3.AUTO)
    size = 0
    for piece in _split_pieces(tensors):
        digest.update(piece)
        size += len(piece)
    return f"{PREFIX}{digest.hexdigest()}", size


def _split_pieces(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[memoryview]:
    yield memoryview(_build_header(tensors, metadata or {}))
    for tensor in tensors.values():
        view = memoryview(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        for begin in range(0, len(view), _PIECE):
            yield view[begin : begin + _PIECE]


def _build_header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Build the header: its length in 8 bytes, then JSON, padded with blanks."""
    tree: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is of {tensor.dtype}: expected one of {', '.join(map(str, _NAMES))}")
        begin, end = end, end + tensor.nbytes
        tree[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text
