"""Tensors of safetensors files as flat arrays of their bits, without a machine-learning library."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SUFFIX = ".safetensors"
_LARGEST_HEADER = 100 * 2**20
_WIDTHS = {
    1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    2: ("U16", "I16", "F16", "BF16"),
    4: ("U32", "I32", "F32"),
    8: ("U64", "I64", "F64", "C64"),
}
_WIDTH = {dtype: width for width, dtypes in _WIDTHS.items() for dtype in dtypes}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
# The bits of infinity: these and larger ones, without the sign, are infinite or not a number.
_INFINITY = {"F8_E5M2": 0x7C, "F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000, "F64": 0x7FF0000000000000}
_CACHED = 2**18  # bytes that stay in the processor's cache between two reductions


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file's header.

    Attributes:
        dtype: safetensors' name, such as "BF16".
        begin: position of its first byte in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return _WIDTH[self.dtype]


@dataclass(frozen=True)
class Tensor:
    """A tensor in memory.

    Attributes:
        dtype: safetensors' name, such as "BF16".
        bits: its elements, flat, as unsigned integers of its width.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: np.ndarray[Any, Any]


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Read the tensors of a safetensors file from its header, in the order of their bytes.

    Raises:
        ValueError: the file is missing, cut off, or no safetensors file of supported data types; the text says which.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise ValueError(f"{file}: no safetensors header")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        found = {name: _read_entry(file, name, entry, 8 + length) for name, entry in header.items()}
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror})") from None
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: damaged safetensors header ({error!r})") from None
    infos = dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].elements)))
    end = 8 + length
    for name, info in infos.items():
        if info.begin != end:
            raise ValueError(f"{file}: {name} begins at byte {info.begin}, expected {end}")
        end += info.elements * info.width
    if end != size:
        raise ValueError(f"{file} has {size} bytes, its header describes {end}")
    return infos


def _read_entry(file: Path, name: str, entry: Any, data: int) -> TensorInfo:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in _WIDTH:
        raise ValueError(f"{file}: {name} has dtype {dtype!r}, expected one of {', '.join(_WIDTH)}")
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"{file}: {name} has shape {list(shape)} at bytes {begin} to {end}")
    info = TensorInfo(file, dtype, shape, data + begin)
    if end - begin != info.elements * _WIDTH[dtype]:
        raise ValueError(f"{file}: {name} has {end - begin} bytes for {dtype} of shape {list(shape)}")
    return info


def read_headers(files: Iterable[Path]) -> dict[str, TensorInfo]:
    """Read the tensors of a policy's safetensors files from their headers.

    Raises:
        ValueError: as `read_header`, or two files hold the same tensor.
    """
    infos: dict[str, TensorInfo] = {}
    for file in files:
        found = read_header(file)
        if twice := sorted(found.keys() & infos.keys()):
            raise ValueError(f"{file} holds {twice[0]} a second time")
        infos |= found
    return infos


def open_tensors(file: Path, writable: bool = False) -> dict[str, Tensor]:
    """Map a safetensors file into memory: its tensors share the file's pages, and what is written to them is written.

    Raises:
        ValueError: as `read_header`.
        OSError: the file cannot be opened.
    """
    infos = read_header(file)
    with file.open("r+b" if writable else "rb") as stream:
        pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    return {
        name: Tensor(
            info.dtype,
            info.shape,
            np.frombuffer(pages, _UNSIGNED[info.width], count=info.elements, offset=info.begin),
        )
        for name, info in infos.items()
    }


def find_non_finite(tensor: Tensor) -> int | None:
    """Find the first element that is infinite or not a number; None if there is none, or the dtype has none."""
    if tensor.dtype not in _INFINITY:
        return None
    infinity, bits = _INFINITY[tensor.dtype], tensor.bits
    # A positive one is at least infinity as a signed number, a negative one at least minus infinity as an unsigned one:
    # two maxima and no array in between, at the speed at which memory is read.
    sign = 1 << (8 * bits.itemsize - 1)
    signed: Any = bits.view(_SIGNED[bits.itemsize])
    step = _CACHED // bits.itemsize
    for begin in range(0, len(bits), step):
        part = bits[begin : begin + step]
        if signed[begin : begin + step].max() >= infinity or part.max() >= sign | infinity:
            return begin + int(np.argmax(part & (sign - 1) >= infinity))
    return None


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
