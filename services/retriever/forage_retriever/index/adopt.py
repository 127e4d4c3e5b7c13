"""Adopts a FAISS file that was built elsewhere: checks it against a corpus and an encoder."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np

from forage_common.errors import DataError, UserError
from forage_common.files import durable
from forage_common.files.lucene import explain_lucene
from forage_retriever.artifacts import compute_digest
from forage_retriever.corpus import read
from forage_retriever.corpus.store import Corpus
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.index import stages
from forage_retriever.index.manifest import DENSE_FOLDER, DenseEntry
from forage_retriever.index.progress import Report
from forage_retriever.index.recipe import Recipe
from forage_retriever.index.workspace import open_workspace
from forage_retriever.search import faiss_build

MIN_COSINE = 0.9
"""Between a stored vector and its passage encoded again: float16 and int8 stay above, another model far below."""

_PROBED = 16


def adopt_index(
    final: Path, staging_dir: Path, faiss_file: Path, corpus_file: Path, recipe: Recipe, report: Report
) -> None:
    """Build the index folder `final` from a FAISS file and the corpus that it was built from.

    Raises:
        UserError: they do not belong together, or not to the recipe's encoder, or the machine is at fault.
    """
    assert recipe.encoder is not None
    if lucene := explain_lucene(faiss_file):
        raise UserError(f"--faiss: {lucene}")
    encoder = recipe.encoder
    index_type = _check_type(faiss_file, encoder.dimension)
    source, file_digest = read.hash_corpus(corpus_file), read.hash_corpus(faiss_file)
    name = compute_digest("adopt/1", recipe.compute_digest(source), file_digest)
    with open_workspace(staging_dir, final, report) as workspace:
        if workspace is None:
            return
        corpus = stages.store_corpus(workspace, corpus_file, source, recipe.filter_fields, report)
        bm25 = stages.build_bm25(workspace, recipe, corpus, report)
        digest = compute_digest("adopt/1", corpus.digest, encoder.digest, file_digest)
        workspace.stage(DENSE_FOLDER, digest, lambda folder: _link_index(folder, faiss_file, corpus, encoder))
        dense = DenseEntry(digest=digest, recipe=faiss_build.RECIPE, factory=index_type, vectors="")
        stages.write_manifest(workspace, stages.describe_index(name, corpus, bm25, encoder, dense), report)
        workspace.finish(final)


def _check_type(file: Path, dimension: int) -> str:
    """The name of the type of index in a file, for people.

    Raises:
        UserError: it is no FAISS index over inner products of this dimension.
    """
    index = faiss_build.read_index(file)
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise UserError(f"{file} ranks by distance, not by inner product: build an index of its corpus instead")
    if index.d != dimension:
        raise UserError(
            f"{file} holds vectors of {index.d} numbers, the encoder gives {dimension}: set retriever.encoder.model to"
            " the one that it was built with"
        )
    return type(faiss.downcast_index(index)).__name__


def _link_index(folder: Path, file: Path, corpus: Corpus, encoder: Encoder) -> None:
    """Link a FAISS file into the folder of a dense index.

    Raises:
        DataError: the number of its vectors is not that of the passages, or they are vectors of other texts.
    """
    index = faiss_build.read_index(file)
    if index.ntotal != len(corpus):
        raise DataError(
            f"{file} holds {index.ntotal} vectors and the corpus {len(corpus)} passages: give the corpus that it was"
            " built from"
        )
    rows = np.linspace(0, len(corpus) - 1, min(_PROBED, len(corpus))).astype(int).tolist()
    expected = encoder.encode_passages([corpus.contents[row] for row in rows], lambda done: None)
    try:
        stored = np.stack([index.reconstruct(row) for row in rows])
    except RuntimeError:  # a type that does not give vectors back: a passage should at least find itself
        nearest = index.search(expected, 10)[1]
        agreement = float(np.mean([row in near for row, near in zip(rows, nearest, strict=True)]))
    else:
        lengths = np.linalg.norm(stored, axis=1) * np.linalg.norm(expected, axis=1)
        agreement = float(np.median((stored * expected).sum(axis=1) / np.maximum(lengths, 1e-9)))
    if agreement < MIN_COSINE:
        raise DataError(
            f"the vectors of {file} are not those of the corpus under encoder {encoder.model} (agreement"
            f" {agreement:.2f}): give the corpus it was built from, in its order, and its encoder"
        )
    durable.link_or_copy(file, folder / faiss_build.INDEX_FILE)
