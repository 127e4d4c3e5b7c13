"""Safetensors files as bits, and elements that are not finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from policy_files import write_tensors

from forage_weights.tensors import (
    Tensor,
    find_non_finite,
    open_tensors,
    read_header,
    read_headers,
)


def test_only_a_writable_map_changes_the_file(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    write_tensors(file, {"a": np.arange(6, dtype=np.uint16).reshape(2, 3)})
    with pytest.raises(ValueError, match="read-only"):
        open_tensors(file)["a"].bits[0] = 9
    tensors = open_tensors(file, writable=True)
    tensors["a"].bits[0] = 9
    assert open_tensors(file)["a"].bits.tolist() == [9, 1, 2, 3, 4, 5]


def test_headers_of_all_shards_are_read_without_their_tensors(tmp_path: Path) -> None:
    write_tensors(tmp_path / "1.safetensors", {"a": np.zeros((2, 3), np.uint16)})
    write_tensors(tmp_path / "2.safetensors", {"b": np.zeros(4, np.uint32)})
    infos = read_headers([tmp_path / "1.safetensors", tmp_path / "2.safetensors"])
    assert {name: (info.file.name, info.dtype, info.shape) for name, info in infos.items()} == {
        "a": ("1.safetensors", "BF16", (2, 3)),
        "b": ("2.safetensors", "F32", (4,)),
    }
    with pytest.raises(ValueError, match="holds a a second time"):
        read_headers([tmp_path / "1.safetensors", tmp_path / "1.safetensors"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "F4"}, "dtype 'F4'"),
        ({"shape": [5]}, "8 bytes for BF16 of shape"),
        ({"shape": [-4]}, "has shape"),
        ({"shape": [True, 4]}, "has shape"),
        ({"data_offsets": [2, 10]}, "begins at byte"),
        ({"data_offsets": [0, 8.0]}, "has shape"),
        ({"data_offsets": None}, "damaged safetensors header"),
        ({"shape": [2**62, 0], "data_offsets": [0, 0]}, "its header describes"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    entry = {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]} | change
    text = json.dumps({"a": entry}).encode()
    (tmp_path / "m").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=message):
        open_tensors(tmp_path / "m")


def test_a_file_that_is_cut_off_or_absent_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    write_tensors(file, {"a": np.zeros(100, np.uint16)})
    data = file.read_bytes()
    for length in (0, 4, 8, 30, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"m\.safetensors"):
            read_header(file)
    file.write_bytes(data + b"\0")
    with pytest.raises(ValueError, match="header describes"):
        read_header(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_header(tmp_path / "absent")


@pytest.mark.parametrize(
    ("dtype", "bits", "expected"),
    [
        ("F32", np.array([1, np.nan, np.inf], np.float32).view(np.uint32), 1),
        ("F32", np.array([-1, -np.inf], np.float32).view(np.uint32), 1),
        ("F32", np.array([0xFF800001], np.uint32), 0),
        ("F32", np.array([0x7F7FFFFF, 0xFF7FFFFF, 0x80000000, 1], np.uint32), None),
        ("BF16", np.array([0x7F7F, 0xFF7F, 0x8000, 1], np.uint16), None),
        ("BF16", np.array([0x7F7F, 0x7F80], np.uint16), 1),
        ("BF16", np.array([0x7F7F, 0xFF80], np.uint16), 1),
        ("BF16", np.array([0xFFFF], np.uint16), 0),
        ("F16", np.array([65504, -65504], np.float16).view(np.uint16), None),
        ("F16", np.array([65504, np.nan], np.float16).view(np.uint16), 1),
        ("F64", np.array([1e308, -np.inf]).view(np.uint64), 1),
        ("F64", np.array([1e308, -1e308]).view(np.uint64), None),
        ("I16", np.array([0xFFFF, 0x7FFF], np.uint16), None),
        ("BF16", np.zeros(0, np.uint16), None),
    ],
)
def test_the_first_element_that_is_not_finite_is_found(dtype: str, bits: Any, expected: int | None) -> None:
    assert find_non_finite(Tensor(dtype, bits.shape, bits)) == expected


def test_elements_that_are_not_finite_are_found_anywhere() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        values = random.standard_normal(400_000, dtype=np.float32)
        bad = np.sort(random.integers(0, len(values), 2))
        values[bad] = random.choice([np.nan, np.inf, -np.inf], 2)
        assert find_non_finite(Tensor("F32", values.shape, values.view(np.uint32))) == bad[0]
    good = Tensor("F32", (3,), np.ones(3, np.float32).view(np.uint32))
    assert find_non_finite(good) is None
