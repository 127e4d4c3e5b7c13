"""Small policies as safetensors files, written without a machine-learning library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile, PolicyPart
from forage_weights.cache import CachedPolicy
from forage_weights.delta import encode_delta
from forage_weights.digests import compute_content, compute_digest
from forage_weights.storage import put_files
from forage_weights.tensors import open_tensors

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


class Publications:
    """Versions of a small policy, published at an address as a trainer does: one whole, then deltas.

    Args:
        uri: any address that fsspec understands.
        scratch: folder of this machine for files before their upload.
        elements: of each of the two tensors, one in each of two files.
    """

    def __init__(self, uri: str, scratch: Path, elements: int = 5000) -> None:
        random = np.random.default_rng(0)
        self.uri = uri
        self.tensors = {name: random.integers(0, 2**15, elements, np.uint16) for name in ("a", "b")}
        self.parts: list[PolicyPart] = []
        self._scratch = scratch
        self._version = 0

    def publish(self, delta: bool = True, share: float = 0.01) -> Policy:
        """Change the policy a little and publish it; the first is whole."""
        self._version += 1
        old = self.tensors
        self.tensors = {name: make_update(bits, share, self._version) for name, bits in old.items()}
        local, uri = self._scratch / f"v{self._version}", f"{self.uri}/v{self._version}"
        whole = {name: local / f"{name}.safetensors" for name in self.tensors}
        files = [write_tensors(file, {name: self.tensors[name]}) for name, file in whole.items()]
        content = compute_content({file.name: file.digest for file in files})
        if delta and self.parts:
            out = local / "delta"
            assert encode_delta(old, self.tensors, out, 2**30, self.parts[-1].content, content)
            published = [PolicyFile(name=out.name, digest=compute_digest(out), bytes=out.stat().st_size)]
        else:
            self.parts, published = [], files
        put_files(uri, {file.name: local / file.name for file in published})
        self.parts.append(PolicyPart(version=self._version, epoch=1, uri=uri, files=published, content=content))
        parts = self.parts if len(self.parts) > 1 else []
        return Policy(version=self._version, epoch=1, uri=uri, files=files, parts=parts)

    def is_held(self, held: CachedPolicy) -> bool:
        """Whether these files are the version published last."""
        return all(
            open_tensors(file)[file.stem].bits.tobytes() == self.tensors[file.stem].tobytes() for file in held.files
        )
