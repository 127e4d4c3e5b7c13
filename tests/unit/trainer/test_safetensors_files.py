"""Files that safetensors writes are read as the bits that they hold."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from forage_weights.tensors import open_tensors


def test_tensors_are_those_that_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5).to(torch.bfloat16),
        "b": torch.randn(7),
        "c": torch.zeros(0, 4),
        "d": torch.tensor([True, False]),
        "e": torch.arange(3),
        "f": torch.tensor(1.5, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    found = open_tensors(tmp_path / "m.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tuple(tensor.shape)
        assert found[name].bits.tobytes() == tensor.flatten().view(torch.uint8).numpy().tobytes()
    assert [found[name].dtype for name in "abcdef"] == ["BF16", "F32", "F32", "BOOL", "I64", "F16"]
