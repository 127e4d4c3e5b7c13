"""Export of a checkpoint's policy as a Hugging Face folder, without engine or process group."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from forage_runtime.errors import DataError
from forage_runtime.files.folders import stage_folder
from forage_runtime.security.signatures import RunSignatures, SignatureError
from forage_trainer.checkpoints.manifest import BEST, MANIFEST, STATE, list_checkpoints, read_checkpoint
from forage_trainer.weights.checkpoint_tensors import build_checkpoint, build_skeleton, cast, set_conversions
from forage_trainer.weights.shards import read_whole
from forage_weights.trainer.model_files import CONFIGURATION, LORA_META, MODEL_META, WeightsFile, write_model_folder

_DOWN = ".lora_A.default.weight"
_PREFIX = "base_model.model."
_ADAPTER_FIELDS = (
    "r",
    "lora_alpha",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "rank_pattern",
    "alpha_pattern",
)
"""What trainer.lora and verl say of an adapter, and what PEFT makes of it for fused experts."""


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
        read_checkpoint(checkpoint, signatures)
    except SignatureError as error:
        raise DataError(f"{error}: take another") from None
    state = checkpoint / STATE
    weights = read_weights(state, dtype)
    with stage_folder(target) as folder:
        return write_model_folder(folder, state / CONFIGURATION, weights, shard_bytes)


def read_weights(state: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read what `save_pretrained` would write of the policy, onto the CPU, LoRA merged.

    Raises:
        DataError: a file is missing, or the layout is another.
    """
    whole = read_whole(state / "model")
    module = _build_skeleton(state, whole)
    names = {id(tensor): name for name, tensor in module.state_dict(keep_vars=True).items() if name in whole}
    if strange := whole.keys() - set(names.values()) - _list_tied(module):
        raise DataError(f"{state} holds {min(strange)}, which its configuration's model lacks: take another checkpoint")

    def take(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in names:
            lacking = next(name for name, one in module.state_dict(keep_vars=True).items() if one is tensor)
            raise DataError(f"{state} lacks {lacking}: take another checkpoint")
        return whole.pop(names[id(tensor)])  # what has been converted is not held twice

    return build_checkpoint(module, take, lambda tensor: cast(tensor, dtype))


def _build_skeleton(state: Path, whole: Mapping[str, torch.Tensor]) -> Any:
    """Build the model that was saved, without its weights."""
    config = AutoConfig.from_pretrained(state / CONFIGURATION)
    meta = state / MODEL_META
    known = json.loads(meta.read_text(encoding="utf-8")) if meta.is_file() else {}
    family = known.get("class") or next(iter(config.architectures or ()), "")
    is_adapted = any(name.endswith(_DOWN) for name in whole)
    module = build_skeleton(config, family, _read_adapter(state / LORA_META) if is_adapted else None)
    if "conversions" in known:
        set_conversions(module, known["conversions"])
    return module


def _read_adapter(meta: Path) -> dict[str, Any]:
    """Read the configuration of an adapter."""
    try:
        found = json.loads(meta.read_text(encoding="utf-8"))
        needed = {name: found[name] for name in ("r", "lora_alpha", "target_modules")}
        return needed | {name: found[name] for name in _ADAPTER_FIELDS if name in found}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{meta} cannot be read ({error!r}): it must hold r, lora_alpha and target_modules of the adapter"
        ) from None


def _list_tied(module: Any) -> set[str]:
    """Names of parameters that also have another name."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {name for same in names.values() if len(same) > 1 for name in same}
