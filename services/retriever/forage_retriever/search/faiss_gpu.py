"""FAISS on GPUs, where faiss-gpu is installed: an index divided over all of them, and one thread that owns each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import faiss
import numpy as np
from numpy.typing import NDArray

from forage_retriever import devices
from forage_retriever.search import faiss_build
from forage_retriever.search.memory import GIB
from forage_runtime.errors import UserError
from forage_runtime.settings import RetrieverSettings
from forage_runtime.telemetry.logs import get_logger

MAX_NEIGHBOURS = 2048
"""Limit of a GPU index, of neighbours and of cells per query."""

SCRATCH_BYTES = 2**30
"""Memory of each GPU that FAISS may use while it searches."""

_PADDED = 1.1
"""Cells are padded to 32 vectors on a GPU."""

_BLOCK_BYTES = 64 * 2**20

Result: TypeAlias = "tuple[NDArray[np.float32], NDArray[np.int64]]"


class Devices(Protocol):
    """Devices that parts of an index are moved to. All calls of one device come from one thread.

    Attributes:
        count: how many there are.
        halves: whether flat indexes keep their vectors in half precision there.
    """

    count: int
    halves: bool

    def measure_free(self, device: int) -> int:
        """Free bytes."""
        ...

    def create_flat(self, device: int, dimension: int) -> Any:
        """An empty flat index over inner products."""
        ...

    def move(self, device: int, index: Any) -> Any:
        """A copy of an index.

        Raises:
            RuntimeError: FAISS cannot search this type there, or memory is short.
        """
        ...


class Gpus:
    """The GPUs that CUDA shows; see `Devices`."""

    halves = True

    def __init__(self, count: int) -> None:
        self.count = count
        self._resources: dict[int, Any] = {}

    def measure_free(self, device: int) -> int:
        import torch  # every environment for GPUs has it, and FAISS does not tell

        return int(torch.cuda.mem_get_info(device)[0])

    def create_flat(self, device: int, dimension: int) -> Any:
        config = faiss.GpuIndexFlatConfig()
        config.device, config.useFloat16 = device, True
        return faiss.GpuIndexFlatIP(self._open(device), dimension, config)

    def move(self, device: int, index: Any) -> Any:
        options = faiss.GpuClonerOptions()
        options.indicesOptions = faiss.INDICES_64_BIT
        return faiss.index_cpu_to_gpu(self._open(device), device, index, options)

    def _open(self, device: int) -> Any:
        if device not in self._resources:
            self._resources[device] = faiss.StandardGpuResources()
            self._resources[device].setTempMemory(SCRATCH_BYTES)
        return self._resources[device]


@dataclass(frozen=True)
class DevicePart:
    """A part of an index on a device; row 0 of it is row `first` of the whole."""

    index: Any
    first: int
    owner: ThreadPoolExecutor


class DividedIndex:
    """An index on devices. Any thread may search; each device's owner serves calls one after another.

    Attributes:
        halves: whether scores are of vectors in half precision.
        devices: how many it is divided over, or copied to.
    """

    def __init__(self, parts: Sequence[DevicePart], transforms: Sequence[Any], halves: bool, copies: bool) -> None:
        """`transforms` are applied to queries first; `copies` have all rows each, and share the queries of a call."""
        self._parts = parts
        self._transforms = transforms
        self._copies = copies
        self.halves = halves
        self.devices = len(parts)

    def search(self, vectors: NDArray[np.float32], k: int, nprobe: int, ef_search: int) -> Result:
        """Scores and rows [n, k] of up to `MAX_NEIGHBOURS` neighbours; -1 with -inf where there are no more.

        `nprobe` matters to IVF indexes only, `ef_search` to graphs.
        """
        vectors = faiss_build.transform_vectors(self._transforms, vectors)
        shares = np.array_split(vectors, len(self._parts)) if self._copies else [vectors] * len(self._parts)
        asked = [
            part.owner.submit(_search_part, part, share, k, nprobe, ef_search)
            for part, share in zip(self._parts, shares, strict=True)
            if len(share)
        ]
        found = [one.result() for one in asked]
        scores, rows = (np.concatenate(both, axis=0 if self._copies else 1) for both in zip(*found, strict=True))
        if len(found) > 1 and not self._copies:
            best = np.argsort(-scores, axis=1, kind="stable")[:, :k]  # of equal scores, the one of the first row
            scores, rows = np.take_along_axis(scores, best, 1), np.take_along_axis(rows, best, 1)
        return scores, rows


def count_devices() -> int:
    """Number of GPUs that FAISS can use; 0 with faiss-cpu."""
    return devices.ask_driver().gpus if hasattr(faiss, "StandardGpuResources") else 0


def open_gpus(settings: RetrieverSettings) -> Gpus | None:
    """The GPUs of the settings; None: search on CPUs.

    Raises:
        SettingsError: `retriever.device` is gpu, and none can be used.
    """
    count = devices.find_gpus(settings, hasattr(faiss, "StandardGpuResources")).gpus
    return Gpus(count) if count else None


def move_index(index: Any, places: Devices, demanded: bool) -> DividedIndex | None:
    """A copy of an index over inner products on devices; None, with a warning, where that is not possible.

    Args:
        demanded: not possible is an error.

    Raises:
        UserError: the devices cannot search this type, or lack memory, and `demanded`.
    """
    try:
        return _move(index, places)
    except (RuntimeError, MemoryError, AssertionError) as error:  # the last of PyTorch without CUDA
        reason = str(error).strip().splitlines()[-1]
        if demanded:
            raise UserError(
                f"retriever.device is gpu, and the index cannot be moved there ({reason}): choose another"
                " retriever.faiss_factory, more GPUs or shards, or set retriever.device=auto"
            ) from None
        get_logger().warning("index_stays_on_cpu", reason=reason)
        return None


def _move(index: Any, places: Devices) -> DividedIndex:
    transforms, inner = faiss_build.split_transforms(index)
    copies = isinstance(inner, faiss.IndexHNSWCagra)
    count = places.count if copies else min(places.count, max(int(inner.ntotal), 1))
    needed = estimate_bytes(inner, count)
    bounds = [int(inner.ntotal) * number // count for number in range(count + 1)]
    owners = [ThreadPoolExecutor(1, thread_name_prefix=f"gpu-{device}") for device in range(count)]

    def run(make: Callable[[int], Any]) -> list[Any]:
        """One device after the other, each on its own thread: together they would hold all of the index in memory."""
        return [owner.submit(make, device).result() for device, owner in enumerate(owners)]

    for device, free in enumerate(run(places.measure_free)):
        if needed > free:
            raise MemoryError(
                f"it needs {needed / GIB:.1f} GiB on each of {count} GPUs, and {free / GIB:.1f} GiB of GPU {device}"
                " are free"
            )

    def make(device: int) -> Any:
        if copies:
            return places.move(device, inner)
        begin, end = bounds[device : device + 2]
        if isinstance(inner, faiss.IndexIVF):
            with _with_flat_quantizer(inner):
                return places.move(device, inner if count == 1 else _select_rows(inner, begin, end))
        part = places.create_flat(device, inner.d)
        step = max(_BLOCK_BYTES // (4 * inner.d), 1)
        for first in range(begin, end, step):
            part.add(inner.reconstruct_n(first, min(step, end - first)))
        return part

    has_rows = copies or isinstance(inner, faiss.IndexIVF)  # the parts of others count from 0
    firsts = [0 if has_rows else bounds[device] for device in range(count)]
    parts = [DevicePart(*one) for one in zip(run(make), firsts, owners, strict=True)]
    return DividedIndex(parts, transforms, places.halves and _is_flat(inner), copies)


def estimate_bytes(index: Any, count: int) -> int:
    """Bytes on each of `count` devices to hold and search an index, estimated.

    Raises:
        RuntimeError: GPUs do not search this type.
    """
    if _is_flat(index):
        held = 2.0 * index.d * index.ntotal / count
    elif isinstance(index, (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer, faiss.IndexIVFPQ)):
        held = _PADDED * (index.code_size + 8) * index.ntotal / count + 4.0 * index.d * index.nlist
    elif isinstance(index, faiss.IndexHNSWCagra):
        held = (4.0 * index.d + 4.0 * index.hnsw.nb_neighbors(0)) * index.ntotal
    else:
        raise RuntimeError(
            f"{type(index).__name__} is not searched on GPUs: Flat, SQfp16, IVF with Flat, SQ or PQ codes and CAGRA are"
        )
    return int(held) + SCRATCH_BYTES


def _search_part(part: DevicePart, vectors: NDArray[np.float32], k: int, nprobe: int, ef_search: int) -> Result:
    parameters = None
    if hasattr(part.index, "nlist"):
        parameters = faiss.SearchParametersIVF(nprobe=min(nprobe, int(part.index.nlist), MAX_NEIGHBOURS))
    elif hasattr(faiss, "GpuIndexCagra") and isinstance(part.index, faiss.GpuIndexCagra):
        # What efSearch is to HNSW; cuVS takes multiples of 32.
        parameters = faiss.SearchParametersCagra(itopk_size=-(-max(ef_search, 2 * k) // 32) * 32)
    scores, rows = part.index.search(np.ascontiguousarray(vectors), k, params=parameters)
    missing = rows < 0
    return np.where(missing, np.float32(-np.inf), scores), np.where(missing, np.int64(-1), rows + part.first)


def _is_flat(index: Any) -> bool:
    if isinstance(index, faiss.IndexScalarQuantizer):
        return bool(index.sq.qtype == faiss.ScalarQuantizer.QT_fp16)
    return isinstance(index, faiss.IndexFlat)


@contextlib.contextmanager
def _with_flat_quantizer(index: Any) -> Iterator[None]:
    """Cells are found along a graph on CPUs (`IVF65536_HNSW32`), and by comparing all on GPUs."""
    graph = faiss.downcast_index(index.quantizer)
    if not isinstance(graph, faiss.IndexHNSW):
        yield
        return
    try:
        index.quantizer = graph.storage
        yield
    finally:
        index.quantizer = graph


def _select_rows(index: Any, begin: int, end: int) -> Any:
    """A copy of some rows of an IVF index, which keep their numbers."""
    shape = (index.quantizer, index.d, index.nlist)
    if isinstance(index, faiss.IndexIVFScalarQuantizer):
        part = faiss.IndexIVFScalarQuantizer(*shape, index.sq.qtype, index.metric_type, index.by_residual)
        part.sq = index.sq
    elif isinstance(index, faiss.IndexIVFPQ):
        part = faiss.IndexIVFPQ(*shape, index.pq.M, index.pq.nbits)
        part.pq, part.metric_type, part.by_residual = index.pq, index.metric_type, index.by_residual
    else:
        part = faiss.IndexIVFFlat(*shape, index.metric_type)
    part.own_fields = False  # the quantizer is that of the whole
    part.is_trained = True
    index.copy_subset_to(part, faiss.InvertedLists.SUBSET_TYPE_ID_RANGE, begin, end)
    return part
