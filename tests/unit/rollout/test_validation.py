"""What a policy's tensors must be, and the sentences of refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from forage_proto.v1.trajectory_pb2 import Policy
from forage_weights.announcement import PolicyError
from forage_weights.rollout.preparation import verify_tensors
from forage_weights.tensors import read_headers

POLICY = Policy(version=3, epoch=2, uri="/run/policies/v3")
WHOLE: dict[str, np.ndarray[Any, Any]] = {
    "embed.weight": np.ones((4, 2), np.float32),
    "norm.weight": np.ones(2, np.float32),
    "steps": np.zeros(1, np.int64),
}


def check(tmp_path: Path, changes: dict[str, Any], dtype: str = "float32") -> None:
    """Check the model's tensors after changes; None removes one."""
    save_file(WHOLE, tmp_path / "model.safetensors")
    found = {name: tensor for name, tensor in (WHOLE | changes).items() if tensor is not None}
    save_file(found, tmp_path / "policy.safetensors")
    verify_tensors(POLICY, [tmp_path / "policy.safetensors"], read_headers([tmp_path / "model.safetensors"]), dtype)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm.weight": None}, "norm.weight is missing; 0 more differ"),
        ({"extra": np.ones(1, np.float32), "steps": None}, "extra is not expected; 1 more differ"),
        ({"norm.weight": np.ones(3, np.float32)}, r"norm.weight has shape \[3\], expected \[2\]"),
        ({"norm.weight": np.ones(2, np.int32)}, "norm.weight has dtype I32, expected BF16 or F16 or F32 or F64"),
        ({"steps": np.zeros(1, np.float32)}, "steps has dtype F32, expected I64"),
        ({"norm.weight": np.array([1, np.nan], np.float32)}, "norm.weight is not finite at element 1"),
        ({"embed.weight": np.full((4, 2), -np.inf, np.float16)}, "embed.weight is not finite at element 0"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused_with_tensor_found_and_expected(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PolicyError, match=f"policy version 3 of epoch 2 at /run/policies/v3.*{reason}"):
        check(tmp_path, changes)


def test_types_that_convert_and_a_tied_head_are_accepted(tmp_path: Path) -> None:
    check(tmp_path, {})
    check(tmp_path, {"norm.weight": np.ones(2, np.float16), "embed.weight": np.ones((4, 2), np.float64)})
    check(tmp_path, {"lm_head.weight": np.ones((4, 2), np.float32)})


@pytest.mark.parametrize(
    ("dtype", "engine", "largest", "infinite"),
    [
        (np.float32, "float16", 65519.0, 65520.0),
        (np.float64, "float16", 65519.99, 65520.0),
        (np.float32, "bfloat16", 3.3961e38, 3.3962e38),
        (np.float64, "float32", 3.4028235e38, 3.4028236e38),
    ],
)
def test_numbers_that_are_infinite_in_the_engines_type_are_refused(
    tmp_path: Path, dtype: Any, engine: str, largest: float, infinite: float
) -> None:
    check(tmp_path, {"norm.weight": np.array([largest, -largest], dtype)}, engine)
    with pytest.raises(PolicyError, match=f"norm.weight is infinite at element 1 once it is {engine}"):
        check(tmp_path, {"norm.weight": np.array([1, -infinite], dtype)}, engine)


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(PolicyError, match="no safetensors header"):
        verify_tensors(POLICY, [tmp_path / "policy.safetensors"], {}, "float32")
