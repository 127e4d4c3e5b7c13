"""A file of safetensors that one thread writes while another digests it, from the tensors' own memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNED = 8
_PIECE = 4 << 20
"""Bytes, small enough to be in a cache still when the second thread comes to them."""


def write_safetensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write tensors of one floating-point type, as safetensors' "Format" has it, and flush them to the disk.

    Returns: the file's SHA-256, in hex.

    Raises:
        OSError: the disk refuses.
        ValueError: a tensor's type cannot be published.
    """
    digest = hashlib.sha256()
    with file.open("wb") as out, ThreadPoolExecutor(1) as beside:
        for piece in _pieces(tensors):
            beside.submit(digest.update, piece)
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(_header(tensors))
    for tensor in tensors.values():
        view = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
        for begin in range(0, len(view), _PIECE):
            yield view[begin : begin + _PIECE]


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Length in 8 bytes, then JSON, padded with blanks."""
    tree: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is of {tensor.dtype}: expected one of {', '.join(map(str, _NAMES))}")
        begin, end = end, end + tensor.nbytes
        tree[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text
