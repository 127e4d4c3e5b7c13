"""Writes safetensors from the tensors' own memory: one thread writes the file while others compute its digest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from blake3 import blake3

from forage_weights.digests import PREFIX

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
