"""Export of a checkpoint's policy as a Hugging Face folder, without engine or process group."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Shard

from forage_common.errors import DataError
from forage_common.security.signatures import RunSignatures, SignatureError
from forage_trainer.checkpoints.manifest import BEST, MANIFEST, STATE, list_checkpoints, read_checkpoint
from forage_trainer.files import stage_folder
from forage_trainer.weights.model_files import LORA_META, WeightsFile, write_model_folder
from forage_trainer.weights.shards import read_whole

_HEAD = "lm_head.weight"
_PREFIX, _BASE = "base_model.model.", ".base_layer.weight"
_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"


def find_checkpoint(source: Path, best: bool) -> Path:
    """Find the checkpoint that a path names: itself, or the newest (or best) one of a run.

    Raises:
        DataError: there is none.
    """
    if (source / MANIFEST).is_file():
        return source
    folder = source / "checkpoints"
    if best:
        try:
            return folder / _check_name((folder / BEST).read_text(encoding="utf-8").strip())
        except (OSError, ValueError):
            raise DataError(
                f"{folder} names no best checkpoint: a validation names one, see trainer.test_freq"
            ) from None
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise DataError(f"{source} is neither a checkpoint (no {MANIFEST}) nor a run with checkpoints: see runs/")
    return checkpoints[-1]


def _check_name(text: str) -> str:
    if not re.fullmatch(r"step_\d+", text, re.ASCII):
        raise ValueError(f"{text[:80]!r} is no checkpoint's name")
    return text


def export_policy(
    checkpoint: Path,
    target: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    signatures: RunSignatures | None = None,
) -> tuple[WeightsFile, ...]:
    """Write the checkpoint's policy to `target`, which is complete or absent. Returns the files of weights.

    Raises:
        DataError: the checkpoint is damaged, or not signed as it must be, or `target` exists.
    """
    if target.exists():
        raise DataError(f"{target} exists: name a folder that does not")
    try:
        manifest = read_checkpoint(checkpoint, signatures)
    except SignatureError as error:
        raise DataError(f"{error}: take another") from None
    state = checkpoint / STATE
    source = state / "huggingface"
    tied = bool(json.loads((source / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings", False))
    weights = {
        name: tensor.to(dtype).contiguous()
        for name, tensor in read_weights(state, manifest.world_size).items()
        if not (tied and name == _HEAD)
    }
    with stage_folder(target) as folder:
        return write_model_folder(folder, source, weights, shard_bytes)


def read_weights(state: Path, world_size: int) -> dict[str, torch.Tensor]:
    """Read the policy's whole tensors onto the CPU, LoRA merged.

    Raises:
        DataError: a file is missing, or the layout is another.
    """
    folder = state / "model"
    whole = read_whole(folder) if folder.is_dir() else _merge_former(state, world_size)
    return _merge_lora(whole, state / LORA_META) if any(name.endswith(_DOWN) for name in whole) else whole


def _merge_former(state: Path, world_size: int) -> dict[str, torch.Tensor]:
    """Merge the parts that every process wrote before version 0.2, in verl's layout."""
    ranks: list[Mapping[str, torch.Tensor]] = []
    for rank in range(world_size):
        file = state / f"model_world_size_{world_size}_rank_{rank}.pt"
        if not file.is_file():
            raise DataError(f"{file} is missing: the checkpoint is not one of {world_size} FSDP processes")
        ranks.append(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    return {name: _merge_parts(name, [rank[name] for rank in ranks]) for name in ranks[0]}


def _merge_parts(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    if len(first.placements) != 1:
        raise DataError(f"{name} is sharded over {len(first.placements)} dimensions of processes: one can be exported")
    placement = first.placements[0]
    local = [part._local_tensor for part in parts if isinstance(part, DTensor)]
    return torch.cat(local, dim=placement.dim) if isinstance(placement, Shard) else local[0]


def _merge_lora(weights: Mapping[str, torch.Tensor], meta: Path) -> dict[str, torch.Tensor]:
    """Compute W + alpha / r * B A, under the names of the model without an adapter."""
    try:
        adapter = json.loads(meta.read_text(encoding="utf-8"))
        scaling = adapter["lora_alpha"] / adapter["r"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise DataError(f"{meta} cannot be read ({error!r}): it must hold r and lora_alpha of the adapter") from None
    merged = {}
    for name, weight in weights.items():
        layer = name.removesuffix(_BASE)
        if layer != name and layer + _DOWN in weights:
            weight = weight + scaling * (weights[layer + _UP] @ weights[layer + _DOWN])
            name = f"{layer}.weight"
        if "lora_" not in name:
            merged[name.removeprefix(_PREFIX).replace(".base_layer.", ".")] = weight
    return merged
