"""Deltas: the elements that differ between two versions of a policy, to the bit.

A file has a magic number, blocks, a JSON footer that describes them, and the footer's length. A block covers up to
`_BLOCK` elements of a tensor that has changed there, in two zstd frames:

- positions as gaps, one byte each: the number of unchanged elements before a changed one; 255 stands for 255 unchanged
  elements and no changed one;
- values as differences of the bit patterns modulo 2^width, zigzag-coded, the low bytes of all first.

Of 135 million bf16 elements with 0.3, 1 and 3 % changed by one unit in the last place this takes 0.2, 0.6 and 1.5 % of
the policy's bytes; gaps as variable-length integers take 0.24, 0.66 and 1.5 % and twice the time, a bit mask takes 0.4,
1.0 and 2.1 % and five to ten times the time to read. Level 3 of zstd saves a hundredth more.

What is read is not trusted: every length is bounded by the size of a tensor before memory is taken for it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard

from forage_runtime.devices import count_cpus
from forage_runtime.errors import ForageError
from forage_weights.parallel import map_parallel
from forage_weights.tensors import read_headers

Bits = np.ndarray[Any, Any]
"""A tensor's elements, flat, as unsigned integers of its width."""
_MAGIC = b"FORAGED1"
_BLOCK = 2**20
_ESCAPE = 255
_LARGEST_FOOTER = 100 * 2**20
_WIDTHS = (1, 2, 4, 8)


class DeltaError(ForageError):
    """A delta is damaged, or does not belong to these tensors."""


@dataclass(frozen=True)
class Delta:
    """The footer of a delta.

    Attributes:
        base: `compute_content` of the policy that it applies to; empty if not given.
        content: the same of the policy that results.
        changed: tensor name → number of changed elements; tensors without any are left out.
    """

    base: str
    content: str
    changed: Mapping[str, int]
    blocks: tuple[_Block, ...]


@dataclass(frozen=True)
class _Block:
    """Changed elements of one tensor.

    Attributes:
        elements: of the whole tensor.
        first: position in the tensor of the block's first element.
        changed: number of changed elements.
        stream: bytes of the gaps before compression.
        begin: position in the file of the compressed gaps; the compressed values follow.
    """

    name: str
    elements: int
    width: int
    first: int
    changed: int
    stream: int
    begin: int
    gap_bytes: int
    value_bytes: int

    @property
    def span(self) -> int:
        return min(_BLOCK, self.elements - self.first)


def encode_delta(
    old: Mapping[str, Bits], new: Mapping[str, Bits], out: Path, limit: int, base: str = "", content: str = ""
) -> int | None:
    """Write what differs between two versions of the same tensors.

    Args:
        out: the file, created or overwritten; the caller makes it durable.
        limit: bytes that it may have.
        base: `compute_content` of the old policy, kept in the file; likewise `content` of the new one.

    Returns:
        Bytes written; None if they would exceed the limit: then there is no file.

    Raises:
        ValueError: the two do not have the same names, sizes and widths.
    """
    different = [
        name
        for name in old.keys() | new.keys()
        if name not in old or name not in new or (old[name].dtype, old[name].size) != (new[name].dtype, new[name].size)
    ]
    if different:
        raise ValueError(f"no delta between different tensors: {sorted(different)[0]} and {len(different) - 1} more")
    spans = [(name, first) for name in sorted(new) for first in range(0, new[name].size, _BLOCK)]
    footer: dict[str, Any] = {"base": base, "content": content, "tensors": {}}
    written = len(_MAGIC)
    with out.open("wb") as stream, ThreadPoolExecutor(_count_threads(), thread_name_prefix="delta") as pool:
        try:
            stream.write(_MAGIC)
            encoded = pool.map(
                lambda span: _encode_block(*(side[span[0]][span[1] : span[1] + _BLOCK] for side in (old, new))), spans
            )
            for (name, first), block in zip(spans, encoded, strict=True):
                if block is None:
                    continue
                changed, length, gaps, values = block
                tensor = footer["tensors"].setdefault(name, [new[name].size, new[name].itemsize, []])
                tensor[2].append([first, changed, length, len(gaps), len(values)])
                written += len(gaps) + len(values)
                if written > limit:
                    break
                stream.write(gaps)
                stream.write(values)
            text = json.dumps(footer, separators=(",", ":")).encode()
            written += len(text) + 8
            if written <= limit:
                stream.write(text)
                stream.write(len(text).to_bytes(8, "little"))
                return written
        except BaseException:
            out.unlink(missing_ok=True)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    out.unlink()
    return None


def read_delta(file: Path) -> Delta:
    """Read and check a delta's footer.

    Raises:
        DeltaError: it is missing or damaged.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            if size < len(_MAGIC) + 8 or stream.read(len(_MAGIC)) != _MAGIC:
                raise DeltaError(f"{file} is no delta of a policy")
            stream.seek(size - 8)
            length = int.from_bytes(stream.read(8), "little")
            end = size - 8 - length
            if length > _LARGEST_FOOTER or end < len(_MAGIC):
                raise DeltaError(f"{file} is a damaged delta: its footer would have {length} bytes")
            stream.seek(end)
            footer = json.loads(stream.read(length))
        blocks = tuple(_read_blocks(footer["tensors"]))
        base, content = str(footer["base"]), str(footer["content"])
    except OSError as error:
        raise DeltaError(f"{file} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DeltaError(f"{file} is a damaged delta ({error})") from None
    if end != (blocks[-1].begin + blocks[-1].gap_bytes + blocks[-1].value_bytes if blocks else len(_MAGIC)):
        raise DeltaError(f"{file} is a damaged delta: its footer describes another number of bytes")
    changed: dict[str, int] = {}
    for block in blocks:
        changed[block.name] = changed.get(block.name, 0) + block.changed
    return Delta(base, content, changed, blocks)


def apply_delta(file: Path, tensors: Mapping[str, Bits]) -> None:
    """Change tensors in place from the delta's base to its result. After an error they are neither.

    Raises:
        DeltaError: the delta is damaged, or a tensor is unknown or has another size; nothing outside is written.
    """

    def apply(block: _Block, stream: BinaryIO) -> None:
        _add(block, stream, tensors[block.name][block.first : block.first + block.span])

    delta = read_delta(file)
    _check_tensors(file, delta, {name: (bits.size, bits.itemsize) for name, bits in tensors.items()})
    _map_blocks(file, delta.blocks, apply)


def patch_files(file: Path, policy: Iterable[Path]) -> None:
    """Change a policy's safetensors files in place, as `apply_delta` changes tensors in memory.

    Raises:
        DeltaError: as `apply_delta`.
        OSError: a file of the policy cannot be read or written, as where the disk is full.
    """
    # Read and written block by block: through a map each page costs a fault, which takes five times as long, and a disk
    # that has become full (a copy-on-write file system needs room for every change) ends the process with SIGBUS.
    delta = read_delta(file)
    try:
        infos = read_headers(policy)
    except ValueError as error:
        raise DeltaError(str(error)) from None
    _check_tensors(file, delta, {name: (info.elements, info.width) for name, info in infos.items()})
    with contextlib.ExitStack() as stack:
        handles: dict[Path, int] = {}
        for target in {infos[block.name].file for block in delta.blocks}:
            handles[target] = os.open(target, os.O_RDWR)
            stack.callback(os.close, handles[target])

        def patch(block: _Block, stream: BinaryIO) -> None:
            info = infos[block.name]
            handle, begin = handles[info.file], info.begin + block.first * block.width
            data = bytearray(block.span * block.width)
            if os.preadv(handle, [data], begin) != len(data):
                raise OSError(errno.EIO, f"{info.file} is shorter than its header says")
            _add(block, stream, np.frombuffer(data, f"u{block.width}"))
            rest = memoryview(data)
            while rest:
                written = os.pwrite(handle, rest, begin)
                rest, begin = rest[written:], begin + written

        _map_blocks(file, delta.blocks, patch)


def read_positions(file: Path) -> dict[str, Bits]:
    """Read which elements a delta changes: tensor name → ascending positions in the flat tensor (int64).

    Raises:
        DeltaError: the delta is damaged.
    """
    delta = read_delta(file)
    parts: dict[str, list[Bits]] = {}
    positions = _map_blocks(file, delta.blocks, lambda block, stream: _decode_gaps(block, stream) + block.first)
    for block, part in zip(delta.blocks, positions, strict=True):
        parts.setdefault(block.name, []).append(part)
    return {name: np.concatenate(found) for name, found in parts.items()}


def _check_tensors(file: Path, delta: Delta, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Return if every changed tensor has the number of elements and the width that the delta was made for."""
    for block in delta.blocks:
        if sizes.get(block.name) != (block.elements, block.width):
            raise DeltaError(
                f"{file} changes {block.name} of {block.elements} elements of {block.width} bytes: "
                f"the policy has {sizes.get(block.name, 'no such tensor')}"
            )


def _add(block: _Block, stream: BinaryIO, bits: Bits) -> None:
    positions, differences = _decode_gaps(block, stream), _decode_values(block, stream)
    # No position occurs twice, so the buffered addition adds each difference.
    bits[positions] += differences


def _count_threads() -> int:
    return min(16, count_cpus())  # more than a few only wait for memory


def _encode_block(old: Bits, new: Bits) -> tuple[int, int, bytes, bytes] | None:
    """(changed elements, bytes of the gaps, compressed gaps, compressed values); None if nothing has changed."""
    positions = np.flatnonzero(old != new)
    if not len(positions):
        return None
    # 32 bits hold a position in a block: half the memory to go through.
    gaps: Bits = np.diff(positions.astype(np.int32), prepend=np.int32(-1)) - 1
    escapes: Bits = gaps // _ESCAPE
    stream: Bits = np.full(len(gaps) + int(escapes.sum()), _ESCAPE, np.uint8)
    stream[np.cumsum(escapes + 1) - 1] = gaps - _ESCAPE * escapes
    differences = new[positions] - old[positions]
    bits = 8 * differences.itemsize
    zigzag = (differences << 1) ^ (0 - (differences >> (bits - 1)))
    planes = np.ascontiguousarray(zigzag.view(np.uint8).reshape(len(zigzag), -1).T)
    compressor = zstandard.ZstdCompressor(level=1)
    return len(positions), len(stream), compressor.compress(stream.data), compressor.compress(planes.data)


def _read_blocks(tensors: Mapping[str, Any]) -> Iterator[_Block]:
    """Check the footer's numbers; `ValueError` and its like where they cannot be right."""
    begin = len(_MAGIC)
    for name, (elements, width, entries) in tensors.items():
        before = -1
        if type(elements) is not int or width not in _WIDTHS:
            raise ValueError(f"{name} has {elements} elements of {width} bytes")
        for entry in entries:
            first, changed, stream, gap_bytes, value_bytes = entry
            block = _Block(name, elements, width, first, changed, stream, begin, gap_bytes, value_bytes)
            if any(type(number) is not int or number < 0 for number in entry) or first % _BLOCK or first <= before:
                raise ValueError(f"block {entry} of {name}")
            # A byte of the gaps stands for at least one element, so no block has more of them than elements.
            if not 0 < changed <= stream <= block.span:
                raise ValueError(f"block {entry} of {name}, which has {elements} elements")
            yield block
            before, begin = first, begin + gap_bytes + value_bytes


def _map_blocks(file: Path, blocks: Iterable[_Block], work: Any) -> list[Any]:
    """Call `work(block, open file)` in several threads; results in the order of the blocks."""

    def call(block: _Block) -> Any:
        try:
            with file.open("rb") as stream:
                stream.seek(block.begin)
                return work(block, stream)
        except (ValueError, zstandard.ZstdError) as error:
            raise DeltaError(f"{file} is a damaged delta: {block.name} from {block.first}: {error}") from None

    return map_parallel(call, blocks, _count_threads())


def _decode_gaps(block: _Block, stream: BinaryIO) -> Bits:
    """Positions within the block; afterwards the stream is at the values."""
    gaps = np.frombuffer(_decompress(stream, block.gap_bytes, block.stream), np.uint8)
    ends = gaps != _ESCAPE
    positions: Bits = np.cumsum(gaps + ends.astype(np.int32), dtype=np.int64)[ends] - 1
    if len(positions) != block.changed or positions[-1] >= block.span:
        raise ValueError("other positions than its footer says")
    return positions


def _decode_values(block: _Block, stream: BinaryIO) -> Bits:
    planes = np.frombuffer(_decompress(stream, block.value_bytes, block.width * block.changed), np.uint8)
    zigzag = np.ascontiguousarray(planes.reshape(block.width, -1).T).view(f"u{block.width}").ravel()
    differences: Bits = (zigzag >> 1) ^ (0 - (zigzag & 1))
    return differences


def _decompress(stream: BinaryIO, length: int, expected: int) -> bytes:
    data = stream.read(length)
    # zstandard takes the memory that a frame asks for before it decompresses, so the frame must ask for no more.
    if len(data) != length or zstandard.frame_content_size(data) != expected:
        raise ValueError("other sizes than its footer says")
    return bytes(zstandard.ZstdDecompressor().decompress(data, max_output_size=expected))
