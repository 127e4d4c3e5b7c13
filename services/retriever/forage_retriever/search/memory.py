"""The cost of a FAISS index: bytes of memory and disk by factory string, and which cheaper index would fit.

Sizes follow FAISS's own layout: codes, 8 bytes of id per passage in IVF lists, and the links of HNSW graphs. A served
index is mapped from its file, so most of it is page cache: shared between processes, and evicted when memory is short,
which costs speed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

GIB = 2**30
_TRAINING_ROWS = 100_000
_ROWS_A_CELL = 40
"""FAISS warns below 39."""

_CELL_BYTES = 4
_BLOCKS_BYTES = 2**30
"""Memory of the blocks of a build that writes its file piece by piece: thrice those codes that are sorted."""

_FAST_SCAN_BLOCK = 32
_RABITQ_FACTORS = 8
"""Bytes per passage in addition to its bits: two floats."""

_RABITQ_MORE_FACTORS = 12
"""Further bytes per passage with more than one bit per dimension: three floats."""


@dataclass(frozen=True)
class Needs:
    """Bytes that an index needs.

    Attributes:
        held_bytes: memory that the process allocates.
        mapped_bytes: part of the file that searches read; page cache, for full speed.
        vectors_bytes: stored vectors for exact scores; on disk, a query reads a few pages.
        build_bytes: memory while it is built.
        scratch_bytes: room on the disk while it is built, beside the passages' vectors and its own files.
    """

    held_bytes: int
    mapped_bytes: int
    vectors_bytes: int
    build_bytes: int
    scratch_bytes: int

    @property
    def ram_bytes(self) -> int:
        """Memory to serve it at full speed."""
        return self.held_bytes + self.mapped_bytes

    @property
    def disk_bytes(self) -> int:
        """Size of its files."""
        return self.ram_bytes + self.vectors_bytes


@dataclass(frozen=True)
class _Parts:
    """The parts of a factory string on which sizes depend."""

    dimension: int
    transform_bytes: int
    cells: int
    links: int
    code_bytes: float
    codebook_bytes: int
    fast_scan: bool
    refine_bytes: int
    is_streamed: bool


def estimate_needs(factory: str, dimension: int, passages: int, vector_bytes: int | None = None) -> Needs:
    """Estimate the bytes of an index of this factory string over so many passages.

    `vector_bytes` is the size of one number in `vectors.npy`, 0 without: by default float16 where the codes are smaller
    than a byte per dimension, or of fewer dimensions. Unknown parts are counted as `Flat`, an upper bound.
    """
    parts = _parse_factory(factory, dimension)
    held = parts.transform_bytes + parts.codebook_bytes + 4 * parts.cells * parts.dimension
    rows = passages
    if parts.fast_scan:
        rows += _FAST_SCAN_BLOCK * (parts.cells or 1) // 2  # the last block of a cell is half full on average
    codes = math.ceil(rows * parts.code_bytes) + parts.refine_bytes * passages
    mapped = 8 * passages if parts.cells else 0
    if parts.links:
        mapped += math.ceil(passages * (8 * parts.links + 12 + 4 * parts.links / max(parts.links - 1, 1)))
    if parts.fast_scan:
        held, mapped = held + codes + mapped, 0
    else:
        mapped += codes
    if vector_bytes is None:
        lossy = parts.code_bytes < dimension or parts.dimension < dimension
        vector_bytes = 2 if lossy and not parts.refine_bytes else 0
    trained = bool(parts.cells or parts.codebook_bytes)
    sample = 4 * dimension * min(count_training_rows(parts.cells), passages) if trained else 0
    scratch = math.ceil(passages * (parts.code_bytes + _CELL_BYTES)) if parts.is_streamed and parts.cells else 0
    kept = held + min(_BLOCKS_BYTES, 3 * codes) if parts.is_streamed else held + mapped
    return Needs(held, mapped, vector_bytes * dimension * passages, kept + 2 * sample, scratch)


def count_training_rows(cells: int) -> int:
    """Number of vectors to train an index of so many cells on (0 = no cells)."""
    return max(_TRAINING_ROWS, _ROWS_A_CELL * cells)


def list_fitting(dimension: int, passages: int, ram_bytes: int) -> list[tuple[str, Needs]]:
    """Factory strings that fit into so much memory, the most accurate first."""
    cells = 2 ** max(round(math.log2(4 * math.sqrt(max(passages, 1)))), 2)
    products = next((count for count in range(dimension // 4, 0, -1) if dimension % count == 0), 1)
    candidates = ("Flat", "SQfp16", "HNSW32", f"IVF{cells},SQ8", f"IVF{cells},RaBitQ", f"IVF{cells},PQ{products}x4fs")
    costs = [(factory, estimate_needs(factory, dimension, passages)) for factory in candidates]
    return [(factory, cost) for factory, cost in costs if cost.ram_bytes <= ram_bytes]


def describe_shortage(factory: str, dimension: int, passages: int, available_bytes: int) -> str:
    """A sentence with what the index needs, what is free, and which type would fit."""
    cost = estimate_needs(factory, dimension, passages)
    text = (
        f"a {factory} index over {passages} passages of {dimension} dimensions needs"
        f" {_format_bytes(cost.ram_bytes)} of memory"
        f" ({_format_bytes(cost.held_bytes)} of its own, {_format_bytes(cost.mapped_bytes)} of page cache), of which"
        f" {_format_bytes(available_bytes)} are free"
    )
    fitting = [(name, cost) for name, cost in list_fitting(dimension, passages, available_bytes) if name != factory]
    if not fitting:
        return f"{text}: cut the corpus into shards (`forage index build --shards`)"
    name, cost = fitting[0]
    return f"{text}: {name} would fit with {_format_bytes(cost.ram_bytes)}, or cut the corpus into shards"


def _format_bytes(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.0f} MiB"


def _parse_factory(factory: str, dimension: int) -> _Parts:
    inner, transform, cells, links, coarse = dimension, 0, 0, 0, 0
    code, codebook, fast_scan, refine = 4.0 * dimension, 0, False, 0
    for part in re.split(r",(?![^(]*\))", factory.replace(" ", "")):
        if match := re.fullmatch(r"(PCAW?R?|RR|ITQ)(\d*)", part):
            out = int(match[2] or inner)
            transform += 4 * inner * (out + 1)
            if match[1] != "RR":
                transform += 4 * inner * (inner + 2)  # kept from training
            inner, code = out, 4.0 * out
        elif match := re.fullmatch(r"OPQ\d+(?:_(\d+))?", part):
            out = int(match[1] or inner)
            transform += 4 * inner * (out + 1)
            inner, code = out, 4.0 * out
        elif match := re.fullmatch(r"(?:IVF|IMI)(\d+)(?:_HNSW(\d+))?.*", part):
            cells, coarse = int(match[1]), int(match[2] or 0)
        elif match := re.fullmatch(r"(?:HNSW|NSG)(\d+)(?:_?(.*))?", part):
            links = int(match[1])
            code, codebook, fast_scan = _parse_codec(match[2] or "Flat", inner) or (code, codebook, fast_scan)
        elif part in ("RFlat", "Refine(Flat)"):
            refine = 4 * dimension
        elif match := re.fullmatch(r"Refine\((.+)\)", part):
            refine = round((_parse_codec(match[1], dimension) or (4.0 * dimension,))[0])
        else:
            code, codebook, fast_scan = _parse_codec(part, inner) or (code, codebook, fast_scan)
    codebook += cells * (8 * coarse + 16) if coarse else 0
    # As `faiss_stream` has it: without cells only codes of numbers, for FAISS writes something behind other codes.
    plain = re.fullmatch(r"Flat|SQ\w+", factory.replace(" ", "")) is not None
    streamed = plain or (bool(cells) and not (links or fast_scan or refine))
    return _Parts(inner, transform, cells, links, code, codebook, fast_scan, refine, streamed)


def _parse_codec(name: str, dimension: int) -> tuple[float, int, bool] | None:
    """Bytes per vector, bytes of codebooks, and whether codes are laid out for fast scan; None = unknown."""
    if name == "Flat":
        return 4.0 * dimension, 0, False
    if match := re.fullmatch(r"SQ(?:(\d)|fp16|bf16)(?:_.*)?", name):
        return float(math.ceil(dimension * int(match[1] or 16) / 8)), 8 * dimension, False
    if match := re.fullmatch(r"PQ(\d+)(?:x(\d+))?(fsr?)?(?:_\d+)?(?:np)?", name):
        count, bits = int(match[1]), int(match[2] or 8)
        return float(math.ceil(count * bits / 8)), 4 * dimension * 2**bits, bool(match[3])
    if match := re.fullmatch(r"RaBitQ(\d?)(fs)?(\d?)(?:_\d+)?", name):
        bits = int(match[1] or match[3] or 1)
        factors = _RABITQ_FACTORS + (_RABITQ_MORE_FACTORS if bits > 1 else 0)
        return float(math.ceil(dimension / 8) + math.ceil(dimension * (bits - 1) / 8) + factors), 0, bool(match[2])
    return None
