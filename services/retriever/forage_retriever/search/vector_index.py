"""Vector search: a FAISS index in a folder, with the vectors for exact scores where the folder has them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from forage_retriever.devices import count_threads
from forage_retriever.search import faiss_build, faiss_gpu, flat_scan
from forage_retriever.search.flat_scan import FlatScan
from forage_retriever.search.results import (
    Results,
    append_results,
    bound_rounding,
    list_extras,
    list_rungs,
    sort_results,
)
from forage_retriever.search.vectors import VECTORS_FILE, map_vectors
from forage_runtime.errors import SettingsError
from forage_runtime.settings import RetrieverSettings

AUTOMATIC_REFINE = 40
"""Candidates per requested neighbour that are scored exactly, where the index has stored vectors."""

MIN_CANDIDATES = 400
"""Minimum number of candidates per query that are scored exactly: of a million MiniLM vectors in RaBitQ codes, 100, 200
and 400 candidates contain 0.992, 0.996 and 1.000 of the exact top 3; scoring 400 takes 0.4 ms."""

EXACT_ROWS = 2000
"""Rows passing a filter up to which they are scored exactly: of a million vectors, scoring 1,000 takes 1.3 ms per query
and a filtered search 2.4 ms; scoring 4,096 takes 9.8 ms and the search 3.2 ms."""

_HALF_REFINE, _HALF_MORE = 2, 14
"""Candidates per neighbour, and in addition, that are scored exactly where vectors are in half precision: only near
ties change places."""

_BLOCK_ROWS = 16_384

# FAISS multiplies matrices where queries x dimensions reach this number; below, it reads all vectors once per query.
# Its default of 128,000 is 334 queries of 384 dimensions, but the product is faster from 4 to 8 queries on.
faiss.cvar.distance_compute_blas_threshold = 2000


@dataclass(frozen=True)
class Effort:
    """How thoroughly a query is searched. Passed with each call: setting it on the shared index would be a race.

    Attributes:
        ef_search: candidates that an HNSW graph keeps; FAISS's default of 16 silently loses a third of the neighbours.
        nprobe: cells that an IVF index visits.
        refine: candidates per requested neighbour that are scored exactly; 1 = none, 0 = automatic.
    """

    ef_search: int
    nprobe: int
    refine: int

    @classmethod
    def from_settings(cls, settings: RetrieverSettings) -> Effort:
        return cls(settings.ef_search, settings.nprobe, settings.refine)


@dataclass(frozen=True)
class _Scope:
    """Which rows a search may find, how many these are, and how thoroughly it looks."""

    mask: NDArray[np.bool_] | None
    passing: int
    effort: Effort


class VectorIndex:
    """A vector index. Thread-safe. Rows are [n, k], best first; -1 with a score of -inf where there are no more.

    Attributes:
        passages: number of vectors.
        dimension: length of a vector.
        stores_vectors: whether the folder has the vectors, for exact scores.
        cells: number of cells of an IVF index; 0 = none.
        has_graph: whether it is searched along an HNSW graph.
        gpus: how many hold it; searches without a filter run there.
    """

    def __init__(self, folder: Path, settings: RetrieverSettings, places: faiss_gpu.Devices | None = None) -> None:
        """Map the files of a folder, and copy the index to GPUs.

        Args:
            places: None: the GPUs of the settings.

        Raises:
            UserError: a file is missing or damaged, or GPUs are demanded and cannot be used.
            SettingsError: refinement is set, but no vectors are stored.
        """
        self._index = faiss_build.read_index(folder / faiss_build.INDEX_FILE)
        self._stored = map_vectors(folder / VECTORS_FILE) if (folder / VECTORS_FILE).exists() else None
        self._effort = Effort.from_settings(settings)
        self._threads = count_threads(settings)
        inner = faiss_build.unwrap_index(self._index)
        self.passages = int(self._index.ntotal)
        self.dimension = int(self._index.d)
        self.stores_vectors = self._stored is not None
        self.cells = int(inner.nlist) if isinstance(inner, faiss.IndexIVF) else 0
        self.has_graph = isinstance(inner, faiss.IndexHNSW)
        if self._stored is None and self._effort.refine > 1:
            raise SettingsError(
                f"retriever.refine is {self._effort.refine}, but {folder} stores no vectors to refine by:"
                " set it to 0, or build the index with them"
            )
        places = places or faiss_gpu.open_gpus(settings)
        self._gpu = faiss_gpu.move_index(self._index, places, settings.device == "gpu") if places else None
        self._scan = _create_flat_scan(self._index, self._threads)
        self._reconstructs = self._stored is None and _can_reconstruct(self._index)
        is_flat = isinstance(faiss.downcast_index(self._index), faiss.IndexFlat)
        self._is_exact = is_flat and not (self._gpu is not None and self._gpu.halves)
        refines = self.stores_vectors or isinstance(faiss.downcast_index(self._index), faiss.IndexRefine)
        self._depends_on_depth = self.has_graph or refines or self._gpu is not None
        self._selects = _can_select(self._index)
        self._ranks_by_distance = faiss_build.ranks_by_distance(self._index)
        self._transforms, self._codes = faiss_build.split_transforms(self._index)
        top = faiss.downcast_index(self._index)
        self._graph = (
            top if isinstance(top, faiss.IndexHNSW) and _can_select(faiss.downcast_index(top.storage)) else None
        )

    @property
    def gpus(self) -> int:
        return self._gpu.devices if self._gpu is not None else 0

    def search(
        self,
        vectors: NDArray[np.float32],
        topk: int,
        mask: NDArray[np.bool_] | None = None,
        effort: Effort | None = None,
    ) -> Results:
        """Scores and rows of the greatest inner products with vectors [n, dimension], among rows that pass `mask`.

        Equal scores are in the order of rows. The results for a smaller `topk`, and for a vector in another batch, are
        the head of these.
        """
        faiss.omp_set_num_threads(self._threads)  # OpenMP keeps this number per calling thread
        effort = effort or self._effort
        passing = self.passages if mask is None else int(np.count_nonzero(mask))
        k = min(topk, passing)
        if not len(vectors) or not k:
            return np.empty((len(vectors), k), np.float32), np.empty((len(vectors), k), np.int64)
        vectors = np.ascontiguousarray(vectors, np.float32)
        if mask is not None and passing <= EXACT_ROWS and (self._stored is not None or self._reconstructs):
            return self._score_rows(vectors, np.flatnonzero(mask), k)
        scope = _Scope(mask, passing, effort)
        if self._is_exact:
            return self._search_exactly(vectors, k, scope)
        best: Results | None = None
        for rung in list_rungs(k) if self._depends_on_depth else [k]:
            more = self._search_rung(vectors, min(rung, passing), scope)
            best = append_results(best, more, min(rung, passing))
        assert best is not None
        return best[0][:, :k], best[1][:, :k]

    def _search_exactly(self, vectors: NDArray[np.float32], k: int, scope: _Scope) -> Results:
        """Search an index whose scores are exact but for rounding, which changes with the number of vectors."""
        for extra in (*list_extras(k), scope.passing):
            depth = min(k + extra, scope.passing)
            scores, rows = self._find_candidates(vectors, depth, scope)
            longest = float(np.linalg.norm(self._read_vectors(np.unique(rows[:, [0, -1]])), axis=1).max())
            if depth == scope.passing or np.all(scores[:, -1] < scores[:, k - 1] - bound_rounding(vectors, longest)):
                break
        return self._refine(vectors, rows, k)

    def _search_rung(self, vectors: NDArray[np.float32], k: int, scope: _Scope) -> Results:
        """The best of at least `k` candidates, and the others after them."""
        depth = self._choose_depth(k, scope)
        scores, rows = self._search_codes(vectors, depth, scope)
        return self._refine(vectors, rows[:, :depth], depth) if depth > k else (scores, rows)

    def _search_codes(self, vectors: NDArray[np.float32], k: int, scope: _Scope) -> Results:
        """The best by the scores of the index itself, of which FAISS keeps any where the last of `k` are equal."""
        extras = list_extras(k)
        walk = k + extras[0]  # along a graph the same way, however many equal ones are asked for
        most = min(max(scope.effort.ef_search // 2, walk) if self.has_graph else scope.passing, scope.passing)
        for extra in extras:
            depth = min(k + extra, most)
            scores, rows = self._find_candidates(vectors, depth, scope, walk)
            if depth == most or not np.any(rows[scores[:, -1] == scores[:, k - 1], -1] >= 0):
                break
        return sort_results(scores, rows)

    def _choose_depth(self, k: int, scope: _Scope) -> int:
        effort = scope.effort
        if effort.refine == 1:
            return k
        if self._stored is None:
            on_halves = self._gpu is not None and self._gpu.halves and scope.mask is None and self._reconstructs
            return min(_HALF_REFINE * k + _HALF_MORE, scope.passing) if on_halves else k
        depth = effort.refine * k if effort.refine else max(AUTOMATIC_REFINE * k, MIN_CANDIDATES)
        return min(depth, scope.passing)

    def _find_candidates(self, vectors: NDArray[np.float32], k: int, scope: _Scope, walk: int = 0) -> Results:
        mask, passing, effort = scope.mask, scope.passing, scope.effort
        if mask is None:
            if self._gpu is not None and k <= faiss_gpu.MAX_NEIGHBOURS:
                return self._gpu.search(vectors, k, effort.nprobe, effort.ef_search)
            if self._scan is not None and len(vectors) >= flat_scan.MIN_QUERIES:
                return self._scan.search(vectors, k)
            return self._search_index(vectors, k, effort, walk=walk)
        if not self._selects:
            return self._post_filter(vectors, k, mask, passing, effort)
        # Only a share of the candidates passes, so the search visits as many more.
        share = passing / self.passages
        wider = Effort(math.ceil(effort.ef_search / share), math.ceil(effort.nprobe / share), effort.refine)
        selector = faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
        if self._graph is not None and _graph_costs_more(self._graph, wider.ef_search, passing):
            result: Results = self._graph.storage.search(vectors, k, params=faiss.SearchParameters(sel=selector))
            return result
        return self._search_index(vectors, k, wider, selector, walk)

    def _search_index(
        self, vectors: NDArray[np.float32], k: int, effort: Effort, selector: Any = None, walk: int = 0
    ) -> Results:
        vectors = faiss_build.transform_vectors(self._transforms, vectors)
        scores, rows = self._codes.search(vectors, k, params=build_parameters(self._codes, walk or k, effort, selector))
        if self._ranks_by_distance:
            scores = 1 - scores / 2  # the inner product of vectors of length 1
        return np.where(rows < 0, np.float32(-np.inf), scores), rows

    def _post_filter(
        self, vectors: NDArray[np.float32], k: int, mask: NDArray[np.bool_], passing: int, effort: Effort
    ) -> Results:
        """Search more and more rows and drop those that do not pass, for index types that take no filter."""
        depth = min(math.ceil(2 * k * self.passages / passing), self.passages)
        while True:
            scores, rows = self._search_index(vectors, depth, effort)
            out = (rows < 0) | ~mask[rows]
            if depth == self.passages or (~out).sum(axis=1).min() >= k:
                order = np.argsort(out, axis=1, kind="stable")[:, :k]  # passing rows first, in their order
                left = np.take_along_axis(out, order, 1)
                scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
                return np.where(left, np.float32(-np.inf), scores), np.where(left, np.int64(-1), rows)
            depth = min(4 * depth, self.passages)

    def search_exact(self, vectors: NDArray[np.float32], topk: int) -> NDArray[np.int64] | None:
        """Rows [n, topk] by exact scores of all vectors; None where the index does not have the vectors."""
        if not isinstance(faiss.downcast_index(self._index), faiss.IndexFlat) and self._stored is None:
            return None
        best: NDArray[np.int64] = np.empty((len(vectors), 0), np.int64)
        top: NDArray[np.float32] = np.empty((len(vectors), 0), np.float32)
        for begin in range(0, self.passages, _BLOCK_ROWS):
            rows = np.arange(begin, min(begin + _BLOCK_ROWS, self.passages))
            scores, nearest = self._score_rows(vectors, rows, min(topk, len(rows)))
            top, best = np.concatenate([top, scores], axis=1), np.concatenate([best, nearest], axis=1)
            order = np.argsort(-top, axis=1, kind="stable")[:, :topk]
            top, best = np.take_along_axis(top, order, 1), np.take_along_axis(best, order, 1)
        return best

    def _score_rows(self, vectors: NDArray[np.float32], rows: NDArray[np.int64], k: int) -> Results:
        """Scores and rows [n, k] of the best of a few rows, by exact scores."""
        blocks = []
        longest = 0.0
        for begin in range(0, len(rows), _BLOCK_ROWS):
            block = self._read_vectors(rows[begin : begin + _BLOCK_ROWS])
            longest = max(longest, float(np.linalg.norm(block, axis=1).max()))
            blocks.append(vectors @ block.T)
        scores = np.concatenate(blocks, axis=1)
        least = np.partition(scores, -k, axis=1)[:, -k] - bound_rounding(vectors, longest)
        return self._refine(vectors, [rows[own >= one] for own, one in zip(scores, least, strict=True)], k)

    def _refine(self, vectors: NDArray[np.float32], rows: Iterable[NDArray[np.int64]], k: int) -> Results:
        """Scores and rows [n, k] of the best of each query's own candidates, by exact scores.

        The sums are in double precision and in one order, so that a score does not depend on the other candidates.
        """
        scores: NDArray[np.float32] = np.full((len(vectors), k), -np.inf, np.float32)
        nearest: NDArray[np.int64] = np.full((len(vectors), k), -1, np.int64)
        for query, (vector, candidates) in enumerate(zip(vectors.astype(np.float64), rows, strict=True)):
            own = np.sort(candidates[candidates >= 0])  # in file order, for sequential reads
            exact = np.einsum("rd,d->r", self._read_vectors(own), vector).astype(np.float32)
            best = np.argsort(-exact, kind="stable")[:k]
            scores[query, : len(best)], nearest[query, : len(best)] = exact[best], own[best]
        return scores, nearest

    def _read_vectors(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        if self._stored is not None:
            return np.asarray(self._stored[rows], np.float32)
        vectors: NDArray[np.float32] = self._index.reconstruct_batch(rows)
        return vectors


def build_parameters(index: Any, k: int, effort: Effort, selector: Any = None) -> Any:
    """FAISS's search parameters for an index of any type."""
    index = faiss.downcast_index(index)
    selected = {} if selector is None else {"sel": selector}
    if isinstance(index, faiss.IndexPreTransform):
        nested = build_parameters(index.index, k, effort, selector)
        return faiss.SearchParametersPreTransform(index_params=nested) if nested is not None else None
    if isinstance(index, faiss.IndexRefine):
        nested = build_parameters(index.base_index, k, effort, selector)
        factor = effort.refine or AUTOMATIC_REFINE
        return faiss.IndexRefineSearchParameters(k_factor=factor, base_index_params=nested)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=max(effort.ef_search, 2 * k), **selected)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(nprobe=min(effort.nprobe, index.nlist), **selected)
    return faiss.SearchParameters(**selected) if selected else None


def _graph_costs_more(graph: Any, ef_search: int, passing: int) -> bool:
    """Whether walking the graph scores more vectors than pass the filter."""
    return bool(ef_search * graph.hnsw.nb_neighbors(0) / 2 >= passing)


def _create_flat_scan(index: Any, threads: int) -> FlatScan | None:
    """A faster scan for a large flat index; None for others."""
    index = faiss.downcast_index(index)
    inner_product = isinstance(index, faiss.IndexFlat) and index.metric_type == faiss.METRIC_INNER_PRODUCT
    if not inner_product or index.ntotal < flat_scan.MIN_ROWS:
        return None
    vectors = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)
    return FlatScan(vectors, threads)


def _can_reconstruct(index: Any) -> bool:
    """Whether the index gives the vectors back by which it searches."""
    # FAISS 1.15 gives back the first bit of each dimension of RaBitQ2 to 8 (findings/faiss-rabitq-reconstruct.sh).
    is_refined = isinstance(faiss.downcast_index(index), faiss.IndexRefine)  # by vectors of its own
    has_bits = isinstance(faiss_build.unwrap_index(index), faiss.IndexRaBitQ | faiss.IndexRaBitQFastScan)
    if not index.ntotal or (has_bits and not is_refined):
        return False
    try:
        index.reconstruct_batch(np.zeros(1, np.int64))
    except RuntimeError:  # IVF indexes do not know where a row is
        return False
    return True


def _can_select(index: Any) -> bool:
    """Whether this index type can search among selected rows only."""
    if not index.ntotal:
        return True
    nothing = np.zeros(math.ceil(index.ntotal / 8), np.uint8)  # so that no codes are read
    selector = faiss.IDSelectorBitmap(nothing)
    probe = np.zeros((1, index.d), np.float32)
    try:
        index.search(probe, 1, params=build_parameters(index, 1, Effort(1, 1, 1), selector))
    except RuntimeError:  # PQ and fast-scan codes without cells
        return False
    return True
