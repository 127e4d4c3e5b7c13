"""Small policies as safetensors files, written without a machine-learning library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forage_common.v1.trajectory_pb2 import PolicyFile
from forage_policies.digests import compute_digest

DTYPES = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}


def write_tensors(file: Path, tensors: Mapping[str, np.ndarray[Any, Any]], padding: bool = True) -> PolicyFile:
    """Write arrays of bits as a safetensors file, and describe it as an announcement does."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, bits in tensors.items():
        offsets = [end, end := end + bits.nbytes]
        header[name] = {"dtype": DTYPES[bits.itemsize], "shape": list(bits.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 if padding else 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(bits.tobytes() for bits in tensors.values()))
    return PolicyFile(name=file.name, digest=compute_digest(file), bytes=file.stat().st_size)


def make_update(bits: np.ndarray[Any, Any], share: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """Change a share of the elements by one unit in the last place, as a step at a small learning rate does."""
    random = np.random.default_rng(seed)
    flat = bits.flatten()
    chosen = random.random(flat.size) < share
    steps = np.where(random.random(int(chosen.sum())) < 0.5, 1, -1).astype(f"i{flat.itemsize}")
    flat[chosen] += steps.view(flat.dtype)
    return flat.reshape(bits.shape)
