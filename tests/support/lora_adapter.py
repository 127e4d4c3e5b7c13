"""Random LoRA adapters in PEFT's format, announced as policies."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile
from forage_runtime.files.model_folder import read_model_shapes
from forage_weights.folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS

MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
MAX_RANK = 8
VERSIONS = itertools.count(1)


def write_adapter(folder: Path, model: Path, seed: int, rank: int = 4, **changes: Any) -> Policy:
    """A random adapter of a few linear layers, and its publication."""
    random = np.random.default_rng(seed)
    shapes = read_model_shapes(model)
    matrices = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module.endswith(MODULES):
            matrices[f"base_model.model.{module}.lora_A.weight"] = 0.2 * random.standard_normal(
                (rank, shape[1]), np.float32
            )
            matrices[f"base_model.model.{module}.lora_B.weight"] = 0.2 * random.standard_normal(
                (shape[0], rank), np.float32
            )
    folder.mkdir(parents=True)
    save_file(matrices, folder / ADAPTER_WEIGHTS)
    targets = sorted({module.rpartition(".")[2] for module in MODULES})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | changes))
    return announce(folder)


def announce(folder: Path) -> Policy:
    files = [
        PolicyFile(name=file.name, digest=hashlib.sha256(file.read_bytes()).hexdigest(), bytes=file.stat().st_size)
        for file in sorted(folder.iterdir())
    ]
    return Policy(version=next(VERSIONS), epoch=1, uri=str(folder), adapter=True, files=files)
