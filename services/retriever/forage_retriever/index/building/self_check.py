"""The check at the end of a stage: sampled passages find themselves in the files that were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forage_retriever.corpus.store import Corpus
from forage_runtime.errors import UserError
from forage_runtime.settings import RetrieverSettings
from forage_runtime.telemetry.logs import get_logger

SAMPLE = 64
LEAST_SHARE = 0.5
"""Below this share something is broken: codes of 4 bits and one cell of a hundred still find nine of ten."""

_TOPK = 10
_NPROBE = 64
_TIE = 1e-3


def check_vectors(folder: Path, vectors: NDArray[Any], factory: str) -> None:
    """Check that sampled vectors [n, d] are found in the dense index of a folder that was built over them.

    A vector is found where its row is among the first ten, or the first scores as high: equal passages are common.

    Raises:
        UserError: less than half are found.
    """
    from forage_retriever.search.vector_index import VectorIndex

    index = VectorIndex(folder, RetrieverSettings(nprobe=_NPROBE, ef_search=_NPROBE, device="cpu"))
    if index.passages != len(vectors):
        raise UserError(f"index {folder} holds {index.passages} vectors, not {len(vectors)}: build it again")
    rows = _sample(len(vectors))
    wanted = np.asarray(vectors[rows], np.float32)
    _, found = index.search(wanted, _TOPK)
    # By the vector of the row that was found, not by its score: rows that are mixed up have good scores.
    best = (np.asarray(vectors[found[:, 0]], np.float32) * wanted).sum(axis=1)
    equal = best >= (wanted * wanted).sum(axis=1) * (1 - _TIE)
    _judge(folder, factory, (found == rows[:, None]).any(axis=1) | (equal & (found[:, 0] >= 0)))


def check_words(folder: Path, corpus: Corpus) -> None:
    """Check that sampled passages are found in the BM25 index of a folder by their own words.

    Raises:
        UserError: less than half are found.
    """
    from forage_retriever.search.bm25 import Bm25Index

    index = Bm25Index(folder, corpus.columns)
    rows = _sample(len(corpus))
    texts = [corpus.contents[row] for row in rows.tolist()]
    hits = index.search(texts, _TOPK)
    # Passages of the same words score the same, and only the first ten of them are seen. One without words has no hits.
    found = [
        row in [hit.row for hit in own] or (len(own) == _TOPK and own[0].score <= own[-1].score * (1 + _TIE))
        for row, own in zip(rows.tolist(), hits, strict=True)
        if own
    ]
    _judge(folder, "BM25", np.array(found, np.bool_))


def _sample(count: int) -> NDArray[np.int64]:
    """Rows from the first to the last, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(SAMPLE, count)).astype(np.int64))


def _judge(folder: Path, kind: str, found: NDArray[np.bool_]) -> None:
    good = int(found.sum())
    if good < LEAST_SHARE * len(found):
        raise UserError(
            f"index {folder} ({kind}) finds only {good} of {len(found)} sampled passages by themselves. Use"
            " another retriever.faiss_factory, or see whether the disk or memory of this machine is damaged"
        )
    get_logger().info("index_self_check", index=kind, found=good, of=len(found))
