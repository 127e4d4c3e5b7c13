"""How fast the parts of a publication work through a policy's bytes, on so many cores of this machine.

`python rates.py CORES MEGABYTES` prints one line of JSON: bytes of the whole policy a second, the best of three, for

- copy: from memory to memory, by one thread;
- hash: the digest that trainer and engines compute of the whole policy;
- sha256: the digest that they computed before, which is bound to one thread;
- encode: a delta in which 1 % of the bfloat16 elements differ by one step;
- patch: that delta applied in place to the files of the base, in memory (/dev/shm);
- finite: the engines' look for numbers that are not finite.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from forage_weights.delta import encode_delta, patch_files
from forage_weights.digests import compute_digest
from forage_weights.parallel import map_parallel
from forage_weights.tensors import SUFFIX, Tensor, find_non_finite

_TENSOR = 16 << 20
"""Elements of a tensor."""
_CHANGED = 0.01
_ROUNDS = 3


def measure(cores: int, megabytes: int) -> dict[str, float]:
    """Measure every part on so many cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # before any library starts its threads
    generator = np.random.default_rng(0)
    count = max(1, megabytes * 10**6 // 2 // _TENSOR)
    # Small weights: exponents of bfloat16 that a trained model has, and nothing that is not finite.
    old = {f"w{number}": generator.integers(0x3A00, 0x3D00, _TENSOR, "u2") for number in range(count)}
    new = {name: bits.copy() for name, bits in old.items()}
    for bits in new.values():
        bits[generator.choice(_TENSOR, int(_CHANGED * _TENSOR), replace=False)] += 1
    size = 2 * _TENSOR * count
    spare = {name: bits.copy() for name, bits in old.items()}

    def copy() -> None:
        for name, bits in old.items():
            np.copyto(spare[name], bits)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        weights, delta = Path(folder) / f"w{SUFFIX}", Path(folder) / "delta"
        save_file({name: bits.view("f2") for name, bits in old.items()}, weights)
        tensors = [Tensor("BF16", (_TENSOR,), bits) for bits in new.values()]
        parts: dict[str, Callable[[], object]] = {
            "copy": copy,
            "hash": lambda: compute_digest(weights),
            "sha256": lambda: hashlib.sha256(weights.read_bytes()),
            "encode": lambda: encode_delta(old, new, delta, size),
            "patch": lambda: patch_files(delta, [weights]),
            "finite": lambda: map_parallel(find_non_finite, tensors, cores),
        }
        return {name: size / min(_time(part) for _ in range(_ROUNDS)) for name, part in parts.items()}


def _time(part: Callable[[], object]) -> float:
    began = time.perf_counter()
    part()
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, sys.argv[1:3]))))
