"""What a policy's tensors must be before they come near an engine: names, shapes, data types and finite values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.devices import count_cpus
from forage_weights.announcement import PolicyError, describe_policy
from forage_weights.tensors import Tensor, TensorInfo, find_non_finite, read_headers

TIED_HEAD = "lm_head.weight"
FLOATS = ("BF16", "F16", "F32", "F64")
"""Data types that convert to each other; a tensor of any other type must have that of the model."""
_READERS = 16
# By the engine's type: the bits of the smallest number of a tensor's type that is infinite there.
_TOO_LARGE = {
    "float16": {"BF16": 0x4780, "F32": 0x477FF000, "F64": 0x40EFFE0000000000},
    "bfloat16": {"F32": 0x7F7F8000, "F64": 0x47EFF00000000000},
    "float32": {"F64": 0x47EFFFFFF0000000},
}


def verify_tensors(policy: Policy, files: Iterable[Path], expected: Mapping[str, TensorInfo], dtype: str) -> None:
    """Return if the tensors are those of the served model, and finite in the type that the engine computes in.

    The output head may be missing or added: where it is tied to the embedding, some files hold it and some do not.

    Args:
        expected: headers of the model that the engine was started with.
        dtype: name of the engine's type in torch.

    Raises:
        PolicyError: the sentence names the tensor, what was found and what was expected.
    """
    try:
        found = read_headers(files)
    except ValueError as error:
        raise PolicyError(f"{describe_policy(policy)}: {error}") from None
    problems = [
        problem
        for name in sorted((found.keys() | expected.keys()) - {TIED_HEAD})
        if (problem := _compare(name, found.get(name), expected.get(name)))
    ]
    if problems:
        raise PolicyError(
            f"{describe_policy(policy)} does not fit the model that is served: {problems[0]}; "
            f"{len(problems) - 1} more differ"
        )
    verify_finite(policy, found, dtype)


def verify_finite(policy: Policy, found: Mapping[str, TensorInfo], dtype: str) -> None:
    """Return if all numbers are finite in the type that the engine computes in.

    Raises:
        PolicyError: the sentence names the tensor and the element.
    """
    threads = min(_READERS, count_cpus())
    with ThreadPoolExecutor(threads, thread_name_prefix="finite") as pool:
        for problem in pool.map(lambda name: _find_infinite(name, found[name], dtype), found):
            if problem:
                pool.shutdown(cancel_futures=True)
                raise PolicyError(f"{describe_policy(policy)}: {problem}")


def _compare(name: str, found: TensorInfo | None, expected: TensorInfo | None) -> str:
    """What is wrong with a tensor; empty if nothing is."""
    if found is None or expected is None:
        return f"{name} is missing" if found is None else f"{name} is not expected"
    if found.shape != expected.shape:
        return f"{name} has shape {list(found.shape)}, expected {list(expected.shape)}"
    if found.dtype != expected.dtype and not {found.dtype, expected.dtype} <= {*FLOATS}:
        accepted = " or ".join(FLOATS if expected.dtype in FLOATS else (expected.dtype,))
        return f"{name} has dtype {found.dtype}, expected {accepted}"
    return ""


def _find_infinite(name: str, info: TensorInfo, dtype: str) -> str:
    try:
        tensor = read_tensor(info)
    except (OSError, ValueError) as error:
        return str(error)
    position = find_non_finite(tensor)
    if position is not None:
        return f"{name} is not finite at element {position}, expected finite numbers"
    limit = _TOO_LARGE.get(dtype, {}).get(info.dtype)
    if limit is not None and info.elements:
        magnitudes = tensor.bits & ((1 << (8 * info.width - 1)) - 1)
        if magnitudes.max() >= limit:
            return f"{name} is infinite at element {magnitudes.argmax()} once it is {dtype}, expected smaller numbers"
    return ""


def read_tensor(info: TensorInfo) -> Tensor:
    """Read a tensor into memory. A map would end the process with SIGBUS where the file is cut off meanwhile.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has become shorter than its header said.
    """
    bits = np.fromfile(info.file, f"u{info.width}", info.elements, offset=info.begin)
    if len(bits) < info.elements:
        raise ValueError(f"{info.file} has become shorter while it was read")
    return Tensor(info.dtype, info.shape, bits)
