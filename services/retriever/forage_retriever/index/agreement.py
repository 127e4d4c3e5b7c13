"""Checks that a FAISS file holds the vectors of a corpus: sampled passages are encoded again, and each must agree.

The sample is one random row of each of 460 equal blocks of the file, with the first and the last four rows. If 1 % of
the rows are wrong, wherever they are, one of them is in it with a probability of 99 % (1 - 0.99^460), and 3 % are found
with 99.9999 %. Wrong rows in one piece are found for certain from 2/460 of the file on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from forage_retriever.corpus.store import Corpus
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.index.progress import Report
from forage_retriever.search import faiss_build
from forage_retriever.search.faiss_cut import map_flat
from forage_retriever.search.vectors import iterate_blocks
from forage_runtime.errors import DataError

BLOCKS = 460
EDGE = 4
MIN_COSINE = 0.9
"""Of a stored vector and its passage encoded again, at the least. Of MiniLM in int8 and in fp32, which differ most of
what one model gives, it is 0.9975 for half of 460 texts of 100 words and 0.988 for the worst; of two models 0."""

CLOSE_COSINE = 0.98
"""The same where most rows agree to the rounding of float16: then a row at 0.95 is that of a similar text."""

MAX_STRETCH = 1.1
"""Ratio of a vector's length to the usual one: search ranks by inner product, so a longer vector wins by its length."""

_SEARCHED = 100
_NPROBE = 64
_MISSED_SHARE = 0.02
_NAMED = 3
_DECODED = (
    faiss.IndexFlat,
    faiss.IndexScalarQuantizer,
    faiss.IndexPQ,
    faiss.IndexHNSW,
    faiss.IndexIVFFlat,
    faiss.IndexIVFScalarQuantizer,
    faiss.IndexIVFPQ,
)
"""Types that give vectors back; others raise, and mapped fast-scan lists end the process."""


def check_agreement(file: Path, index: Any, corpus: Corpus, encoder: Encoder, report: Report) -> None:
    """Check the vectors of a FAISS file against the passages of a corpus, of which it has as many.

    Every row is read for NaN and infinity where the file has vectors as numbers; else the sampled rows are.

    Raises:
        DataError: a row is not that of its passage; names the first such rows, and whose vectors they have.
    """
    numbers = map_flat(file, index)
    if numbers is not None:
        check_finite(file, numbers, report)
    rows = choose_rows(len(corpus), np.random.default_rng(0))
    texts = [corpus.contents[row] for row in rows.tolist()]
    expected = encoder.encode_passages(texts, lambda done: report("encoding sampled passages", done, len(texts)))
    stored = np.asarray(numbers[rows], np.float32) if numbers is not None else read_rows(index, rows)
    if stored is None:
        _check_found(file, index, rows, expected, encoder)
        return
    _raise_infinite(file, stored, rows)
    coarse = faiss_build.unwrap_index(index).d < index.d or _count_code_bytes(index) < index.d
    wrong = find_wrong_rows(stored, expected, coarse)
    if len(wrong):
        raise DataError(_describe_wrong(file, index, corpus, encoder, rows, wrong, stored, expected))


def choose_rows(count: int, chance: np.random.Generator) -> NDArray[np.int64]:
    """The rows to check, in order: a random one of each block, the first and the last; all of a small file."""
    if count <= BLOCKS + 2 * EDGE:
        return np.arange(count)
    bounds = np.linspace(0, count, BLOCKS + 1).astype(np.int64)
    return np.unique(
        np.concatenate([np.arange(EDGE), chance.integers(bounds[:-1], bounds[1:]), count - 1 - np.arange(EDGE)])
    )


def check_finite(file: Path, vectors: NDArray[Any], report: Report) -> None:
    """
    Raises:
        DataError: one of the vectors [n, d] is not finite; names the first such row.
    """
    done = 0
    for block in iterate_blocks(vectors):
        if not (np.isfinite(block.max()) and np.isfinite(block.min())):
            _raise_infinite(file, block, np.arange(done, done + len(block)))
        done += len(block)
        report("reading vectors", done, len(vectors))


def read_rows(index: Any, rows: NDArray[np.int64]) -> NDArray[np.float32] | None:
    """The vectors [n, d] of rows as the index decodes them; None for types that do not."""
    inner = faiss_build.unwrap_index(index)
    if not isinstance(inner, _DECODED):
        return None
    if isinstance(inner, faiss.IndexIVF):
        inner.make_direct_map()  # eight bytes a row
    try:
        vectors: NDArray[np.float32] = np.stack([index.reconstruct(row) for row in rows.tolist()])
    except RuntimeError:
        return None
    return vectors


def find_wrong_rows(stored: NDArray[np.float32], expected: NDArray[np.float32], coarse: bool) -> NDArray[np.int64]:
    """Places of the stored vectors [n, d] that are not those of their passages, `expected` [n, d].

    Precisions differ, so equal vectors cannot be asked for; the agreement that is asked for follows from what most rows
    have. A row is wrong where it agrees less, or notably more with the text of another sampled passage, or where its
    length differs from that of the others.

    Args:
        coarse: codes of less than a byte a dimension: no absolute agreement can be asked for.
    """
    lengths, wanted = np.linalg.norm(stored, axis=1), np.linalg.norm(expected, axis=1)
    units = stored / np.maximum(lengths, 1e-9)[:, None]
    cosines = units @ (expected / np.maximum(wanted, 1e-9)[:, None]).T
    own = np.diagonal(cosines).copy()
    np.fill_diagonal(cosines, -1)
    others = cosines.max(axis=1)
    noise = max(1 - float(np.median(own)), 1e-3)
    if coarse:
        # Between what a text has in common with its own code and with the best of hundreds of other texts; lower where
        # the texts are so alike that this is among what codes of their own have.
        usual, foreign = float(np.median(own)), float(np.median(others))
        spread = float(np.median(np.abs(own - usual)))
        least = min(foreign + (usual - foreign) / 4, usual - 6 * spread)
    else:
        least = float(np.clip(1 - 10 * noise, MIN_COSINE, CLOSE_COSINE))
    wrong = (own < least) | (others > own + noise)
    if not coarse:
        ratios = lengths / np.maximum(wanted, 1e-9)
        usual = float(np.median(ratios))
        wrong |= (ratios > MAX_STRETCH * usual) | (ratios * MAX_STRETCH < usual)
    return np.flatnonzero(wrong)


def _describe_wrong(
    file: Path,
    index: Any,
    corpus: Corpus,
    encoder: Encoder,
    rows: NDArray[np.int64],
    wrong: NDArray[np.int64],
    stored: NDArray[np.float32],
    expected: NDArray[np.float32],
) -> str:
    own = (stored * expected).sum(axis=1) / np.maximum(
        np.linalg.norm(stored, axis=1) * np.linalg.norm(expected, axis=1), 1e-9
    )
    first = wrong[:_NAMED]
    holders = _find_holders(index, expected[first])
    named = []
    for place, holder in zip(first.tolist(), holders, strict=True):
        row = int(rows[place])
        passage = f"passage {row} (id {corpus.ids[row]!r})"
        if holder is not None and holder != row:
            named.append(f"row {holder} holds the vector of {passage}")
        else:
            named.append(f"row {row} agrees with {passage} by {own[place]:.2f} only")
    return (
        f"the vectors of {file} are not those of the corpus under encoder {encoder.model}: {len(wrong)} of {len(rows)}"
        f" sampled rows differ, usual agreement {float(np.median(own)):.2f}: {'; '.join(named)}. Rows count from 0."
        " Give the corpus it was built from, in its order, and its encoder"
    )


def _find_holders(index: Any, expected: NDArray[np.float32]) -> list[int | None]:
    """The row of a file that holds each of the vectors [n, d]; None where none does. Reads the whole file once."""
    parameters = _search_parameters(index)
    found = index.search(np.ascontiguousarray(expected), 1, params=parameters)[1][:, 0]
    holders: list[int | None] = []
    for row, vector in zip(found.tolist(), expected, strict=True):
        decoded = read_rows(index, np.array([row])) if row >= 0 else None
        close = decoded is not None and float(decoded[0] @ vector) >= MIN_COSINE * float(
            np.linalg.norm(decoded[0]) * np.linalg.norm(vector)
        )
        holders.append(row if close else None)
    return holders


def _check_found(
    file: Path, index: Any, rows: NDArray[np.int64], expected: NDArray[np.float32], encoder: Encoder
) -> None:
    """For types that give no vectors back: passages should find themselves. Coarse codes miss a few of the best.

    Raises:
        DataError: too many do not.
    """
    depth = min(_SEARCHED, int(index.ntotal) // 10 + 1)  # among all rows of a small file each would find itself
    found = index.search(np.ascontiguousarray(expected), depth, params=_search_parameters(index))[1]
    missed = np.flatnonzero(~(found == rows[:, None]).any(axis=1))
    if len(missed) > _MISSED_SHARE * len(rows):
        kind = type(faiss_build.unwrap_index(index)).__name__
        named = ", ".join(map(str, rows[missed[:_NAMED]].tolist()))
        raise DataError(
            f"the vectors of {file} are not those of the corpus under encoder {encoder.model}: {len(missed)} of"
            f" {len(rows)} sampled passages are not among the {depth} nearest of their own text, for example rows"
            f" {named} ({kind} gives no vectors back, so that is all that can be checked). Give the corpus it was built"
            " from, in its order, and its encoder"
        )


def _search_parameters(index: Any) -> Any:
    from forage_retriever.search.vector_index import Effort, build_parameters

    return build_parameters(index, _SEARCHED, Effort(ef_search=2 * _SEARCHED, nprobe=_NPROBE, refine=0))


def _count_code_bytes(index: Any) -> int:
    inner = faiss_build.unwrap_index(index)
    store = faiss.downcast_index(inner.storage) if isinstance(inner, faiss.IndexHNSW) else inner
    return int(getattr(store, "code_size", 4 * index.d))


def _raise_infinite(file: Path, vectors: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        place = int(bad[0])
        value = vectors[place][~np.isfinite(vectors[place])][0]
        raise DataError(
            f"{file} holds {value} in row {int(rows[place])} (rows count from 0), which no search can rank: encode this"
            " passage again, or build an index of the corpus"
        )
