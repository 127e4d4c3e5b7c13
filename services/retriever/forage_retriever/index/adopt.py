"""Adopts a FAISS file that was built elsewhere: checks it against a corpus and an encoder, whole or cut into shards."""

from __future__ import annotations

from pathlib import Path

import faiss

from forage_retriever.artifacts import compute_digest
from forage_retriever.corpus.store import Corpus
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.index import space
from forage_retriever.index.agreement import check_agreement
from forage_retriever.index.building import shards, stages
from forage_retriever.index.building.shards import FlatSource, Processes
from forage_retriever.index.manifest import DENSE_FOLDER, DenseEntry, EncoderEntry
from forage_retriever.index.progress import Report
from forage_retriever.index.recipe import Recipe
from forage_retriever.index.workspace import open_workspace
from forage_retriever.search import faiss_build, faiss_cut
from forage_runtime.errors import DataError, UserError
from forage_runtime.files import durable
from forage_runtime.files.lucene import explain_lucene

_ADOPTION = "adopt/3"
"""Changes whenever a file is checked or kept otherwise."""

_CHECKED = "checked"


def adopt_index(
    final: Path,
    staging_dir: Path,
    faiss_file: Path,
    corpus_file: Path,
    recipe: Recipe,
    report: Report,
    count: int = 1,
    processes: Processes | None = None,
) -> None:
    """Build the index folder `final` from a FAISS file and the corpus that it was built from.

    Args:
        count: number of shards; each gets its rows of the file, which is not loaded.
        processes: in which shards are built; None: in this one, one after the other.

    Raises:
        UserError: they do not belong together, or not to the recipe's encoder, or the machine is at fault.
    """
    assert recipe.encoder is not None
    if lucene := explain_lucene(faiss_file):
        raise UserError(f"--faiss: {lucene}")
    encoder = recipe.encoder
    index_type = _check_type(faiss_file, encoder.dimension, count)
    source, file_digest = stages.hash_source(corpus_file, report), stages.hash_source(faiss_file, report)
    name = compute_digest(_ADOPTION, recipe.compute_digest(source, count), file_digest)
    entry = EncoderEntry.from_encoder(encoder)
    with open_workspace(staging_dir, final, report) as workspace:
        if workspace is None:
            return
        space.check_disk(staging_dir, space.estimate_corpus_bytes([corpus_file]), "the passages")
        part = shards.WHOLE if count > 1 else ""
        corpus = stages.store_corpus(workspace, corpus_file, source, recipe.filter_fields, report, part)
        digest = compute_digest(_ADOPTION, corpus.digest, encoder.digest, file_digest)
        workspace.stage(_CHECKED, digest, lambda folder: _check(faiss_file, corpus, encoder, report), temporary=True)
        if count > 1:
            flat = FlatSource(faiss_file.absolute(), entry, file_digest, index_type)
            shards.build_shards(workspace, recipe, name, corpus_file, source, count, report, processes, flat)
        else:
            bm25 = stages.build_bm25(workspace, recipe, corpus, report)
            workspace.stage(DENSE_FOLDER, digest, lambda folder: _link(faiss_file, folder))
            dense = DenseEntry(digest=digest, recipe=faiss_build.RECIPE, factory=index_type, vectors="")
            stages.write_manifest(workspace, stages.describe_index(name, corpus, bm25, entry, dense), report)
        workspace.finish(final)


def _check_type(file: Path, dimension: int, count: int) -> str:
    """The name of the type of index in a file, for people.

    Raises:
        UserError: it is no FAISS index over inner products of this dimension, or cannot be cut into `count` shards.
    """
    index = faiss_build.read_index(file)
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise UserError(f"{file} ranks by distance, not by inner product: build an index of its corpus instead")
    if index.d != dimension:
        raise UserError(
            f"{file} holds vectors of {index.d} numbers, the encoder gives {dimension}: set retriever.encoder.model to"
            " the one that it was built with"
        )
    if count > 1:
        faiss_cut.check_cuttable(file, index)
    return type(faiss.downcast_index(index)).__name__


def _check(file: Path, corpus: Corpus, encoder: Encoder, report: Report) -> None:
    """
    Raises:
        DataError: the number of its vectors is not that of the passages, they have other ids than the numbers of the
            passages, or they are vectors of other texts.
    """
    index = faiss_build.read_index(file)
    if index.ntotal != len(corpus):
        raise DataError(
            f"{file} holds {index.ntotal} vectors and the corpus {len(corpus)} passages: give the corpus that it was"
            " built from"
        )
    if foreign := faiss_build.count_foreign_ids(index):
        raise DataError(
            f"{file} gives its vectors ids of its own: {foreign} of the numbers from 0 to {len(corpus) - 1} are not"
            " among them, expected id n to be passage n: build it again with the numbers of the passages as ids"
        )
    check_agreement(file, index, corpus, encoder, report)


def _link(file: Path, folder: Path) -> None:
    durable.link_or_copy(file, folder / faiss_build.INDEX_FILE)
