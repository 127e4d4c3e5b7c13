"""The stages of a dense index: vectors of the passages, trained cells and codes, the FAISS file.

Vectors and codes are synced to the disk once a minute, so a killed build resumes and its result is the same. Memory
holds blocks of them; the whole index only where FAISS can make this type in no other way (`faiss_stream`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
from numpy.typing import NDArray

from forage_retriever.artifacts import compute_digest
from forage_retriever.corpus.store import Corpus
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.index import manifest
from forage_retriever.index.building import self_check
from forage_retriever.index.progress import Report
from forage_retriever.index.recipe import Recipe
from forage_retriever.index.workspace import Workspace
from forage_retriever.search import faiss_build, faiss_stream
from forage_retriever.search import vectors as vectors_file

PART = 1024
"""Passages of one call of the encoder. A build that resumes continues with a whole part, for some encoders' vectors
depend on the other texts of a call."""

ENCODING, TRAINING, INDEXING, SORTING = "encoding passages", "training", "indexing vectors", "sorting codes"
_VECTORS, _TRAINED, _CODES = "vectors", "trained", "codes"


def encode_passages(workspace: Workspace, key: str, corpus: Corpus, encoder: Encoder, report: Report) -> NDArray[Any]:
    """The vectors [passages, dimension] of a corpus, encoded from the last checkpoint on and mapped into memory."""

    def write(folder: Path) -> None:
        with contextlib.closing(vectors_file.VectorsWriter(folder, key, len(corpus), encoder.dimension)) as writer:
            while (begin := writer.done) < len(corpus):
                report(ENCODING, begin, len(corpus))
                writer.append(
                    encoder.encode_passages(
                        corpus.contents[begin : begin + PART - begin % PART],
                        lambda done, begin=begin: report(ENCODING, begin + done, len(corpus)),  # type: ignore[misc]
                    )
                )
            report(ENCODING, len(corpus), len(corpus))

    return vectors_file.map_vectors(
        workspace.stage(_VECTORS, key, write, temporary=True, resumable=True) / vectors_file.VECTORS_FILE
    )


def build_dense(
    workspace: Workspace,
    recipe: Recipe,
    key: str,
    dimension: int,
    load_vectors: Callable[[], NDArray[Any]],
    report: Report,
) -> manifest.DenseEntry:
    """Build the FAISS index over the vectors that `key` names; `load_vectors` is called only if it is not there yet."""
    precision: manifest.Vectors | None = recipe.vectors
    if precision is None:
        precision = "float16" if faiss_build.needs_stored_vectors(recipe.factory, dimension) else ""
    digest = compute_digest(faiss_build.RECIPE, key, recipe.factory, precision)

    def write(folder: Path) -> None:
        vectors = load_vectors()
        faiss.omp_set_num_threads(recipe.threads)
        index = _train_index(workspace, recipe, digest, vectors, report)
        _write_index(workspace, recipe, digest, index, vectors, folder / faiss_build.INDEX_FILE, report)
        if precision:
            vectors_file.save_vectors(vectors, folder / vectors_file.VECTORS_FILE, precision)
        self_check.check_vectors(folder, vectors, recipe.factory)

    workspace.stage(manifest.DENSE_FOLDER, digest, write)
    for name in (_VECTORS, _TRAINED, _CODES):
        workspace.drop(name)
    return manifest.DenseEntry(digest=digest, recipe=faiss_build.RECIPE, factory=recipe.factory, vectors=precision)


def list_stages(factory: str, dimension: int) -> list[str]:
    """The names of the stages of an index of this type after the encoding, as they are reported."""
    index = faiss_build.create_index(factory, dimension)
    training = [] if index.is_trained else [TRAINING]
    return [*training, INDEXING, *([SORTING] if faiss_stream.is_inverted(index) else [])]


def _train_index(workspace: Workspace, recipe: Recipe, key: str, vectors: NDArray[Any], report: Report) -> Any:
    """The index without vectors, trained on a sample of them."""
    count, dimension = vectors.shape
    index = faiss_build.create_index(recipe.factory, dimension)
    if not (rows := faiss_build.count_training_rows(index, count)):
        return index

    def train(folder: Path) -> None:
        report(TRAINING, 0, None)
        faiss_build.train_index(index, recipe.factory, vectors_file.sample_vectors(vectors, rows))
        faiss_build.write_index(index, folder / faiss_build.INDEX_FILE)

    trained = workspace.stage(_TRAINED, key, train, temporary=True)
    return faiss.read_index(str(trained / faiss_build.INDEX_FILE))


def _write_index(
    workspace: Workspace, recipe: Recipe, key: str, index: Any, vectors: NDArray[Any], file: Path, report: Report
) -> None:
    """Write the FAISS file of a trained index over vectors [n, d]."""
    count = len(vectors)

    def progress(done: int) -> None:
        report(INDEXING, done, count)

    if faiss_stream.is_flat(index):
        faiss_stream.write_flat(index, vectors, file, progress)
    elif faiss_stream.is_inverted(index):
        codes = workspace.stage(
            _CODES,
            key,
            lambda folder: faiss_stream.encode_into_cells(index, vectors, folder, key, progress),
            temporary=True,
            resumable=True,
        )
        faiss_stream.write_inverted(index, codes, file, lambda done: report(SORTING, done, count))
    else:
        done = 0
        for block in vectors_file.iterate_blocks(vectors):
            faiss_build.add_vectors(index, recipe.factory, block)
            progress(done := done + len(block))
        faiss_build.write_index(index, file)
    sample = vectors_file.sample_vectors(vectors, 100)
    faiss_build.check_searchable(faiss_build.read_index(file), recipe.factory, sample)
