"""FAISS on GPUs, where faiss-gpu is installed: one thread owns the index, which serves one caller at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from forage_common.telemetry.logs import get_logger

MAX_NEIGHBOURS = 2048
"""Limit of a GPU index per query."""


def count_devices() -> int:
    """Number of GPUs that FAISS can use; 0 with faiss-cpu."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


class GpuIndex:
    """An index on the first GPU. Any thread may search; the owner thread serves calls one after another."""

    def __init__(self, resources: Any, index: Any, owner: ThreadPoolExecutor) -> None:
        self._resources = resources  # FAISS frees the GPU's memory with it
        self._index = index
        self._owner = owner
        self.ntotal = int(index.ntotal)

    def search(self, vectors: NDArray[np.float32], k: int, nprobe: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Scores and rows [n, k]; `nprobe` matters to IVF indexes only."""
        return self._owner.submit(self._search, vectors, min(k, MAX_NEIGHBOURS), nprobe).result()

    def _search(self, vectors: NDArray[np.float32], k: int, nprobe: int) -> tuple[NDArray[Any], NDArray[Any]]:
        parameters = None
        if hasattr(self._index, "nlist"):
            parameters = faiss.SearchParametersIVF(nprobe=min(nprobe, self._index.nlist))
        scores, rows = self._index.search(vectors, k, params=parameters)
        return scores, rows


def move_to_gpu(index: Any) -> GpuIndex | None:
    """A copy on the first GPU; None without a GPU, for types that GPUs cannot search, and where memory is short."""
    if not count_devices():
        return None
    owner = ThreadPoolExecutor(1, thread_name_prefix="faiss-gpu")

    def move() -> GpuIndex:
        resources = faiss.StandardGpuResources()
        return GpuIndex(resources, faiss.index_cpu_to_gpu(resources, 0, index), owner)

    try:
        return owner.submit(move).result()
    except RuntimeError as error:
        get_logger().warning("index_stays_on_cpu", reason=str(error).strip().splitlines()[-1])
        owner.shutdown(wait=False)
        return None
