"""The stages of a build: corpus store, BM25 index, vectors, vector index, manifest.

Each stage ends in a checkpoint, and encoding writes one every `PART` passages, so a killed build resumes and its result
is the same. Only the FAISS index itself is held in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from forage_common.errors import DataError
from forage_common.settings import RetrievalMode
from forage_retriever.artifacts import compute_digest
from forage_retriever.corpus import read
from forage_retriever.corpus.store import Corpus, CorpusWriter, DuplicateIdError
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.index import manifest
from forage_retriever.index.progress import Report
from forage_retriever.index.recipe import CORPUS_RECIPE, Recipe
from forage_retriever.index.workspace import Workspace
from forage_retriever.search import vectors as vectors_file

if TYPE_CHECKING:
    from forage_retriever.search.corpus_statistics import CorpusStatistics

PART = 4096
"""Passages that are encoded between two checkpoints."""

_VECTORS, _TRAINED, STATISTICS = "vectors", "trained", "statistics"
_REPORT_EVERY = 1000


def store_corpus(
    workspace: Workspace, corpus_file: Path, source: str, filter_fields: Sequence[str], report: Report, whole: str = ""
) -> Corpus:
    """Store a corpus file with the digest `source` as the corpus of the index, or as the temporary stage `whole`.

    Raises:
        DataError: a passage is malformed, two have the same id, or there is none.
    """

    def write(folder: Path) -> None:
        _write_corpus(folder, corpus_file, filter_fields, report)

    key = compute_digest(CORPUS_RECIPE, source, *filter_fields)
    return Corpus(workspace.stage(whole or manifest.CORPUS_FOLDER, key, write, temporary=bool(whole)))


def count_words(
    workspace: Workspace, recipe: Recipe, whole: Corpus, ends: Sequence[int], report: Report
) -> CorpusStatistics | None:
    """The statistics by which the shards of a corpus score BM25, as the temporary stage `STATISTICS`.

    Args:
        ends: of the shards, each the number of passages until there.

    Returns:
        None where the recipe asks for dense search alone.
    """
    if recipe.mode is RetrievalMode.DENSE:
        return None
    from forage_retriever.search import bm25, corpus_statistics

    key = compute_digest(corpus_statistics.RECIPE, bm25.RECIPE, whole.digest, *map(str, ends))

    def write(folder: Path) -> None:
        bm25.count_words(folder, whole, ends, key, lambda done: report("counting words", done, len(whole)))

    return corpus_statistics.CorpusStatistics(workspace.stage(STATISTICS, key, write, temporary=True))


def build_bm25(
    workspace: Workspace,
    recipe: Recipe,
    corpus: Corpus,
    report: Report,
    statistics: CorpusStatistics | None = None,
    number: int = 0,
) -> manifest.Bm25Entry | None:
    """Build the BM25 index; None where the recipe asks for dense search alone.

    Args:
        statistics: of the corpus whose shard `number` this is; None: of a corpus in one index.
    """
    if recipe.mode is RetrievalMode.DENSE:
        workspace.drop(manifest.BM25_FOLDER)  # of a killed build of another mode
        return None
    from forage_retriever.search import bm25

    shared = [] if statistics is None else [statistics.digest, str(number)]
    digest = compute_digest(bm25.RECIPE, corpus.digest, *recipe.filter_fields, *shared)

    def write(folder: Path) -> None:
        bm25.build_bm25_index(
            folder, corpus, lambda done: report("indexing words", done, len(corpus)), statistics, number
        )
        if statistics is not None:
            statistics.copy(folder / STATISTICS)

    workspace.stage(manifest.BM25_FOLDER, digest, write)
    return manifest.Bm25Entry(digest=digest, recipe=bm25.RECIPE)


def encode_passages(workspace: Workspace, key: str, corpus: Corpus, encoder: Encoder, report: Report) -> NDArray[Any]:
    """The vectors [passages, dimension] of a corpus, encoded from the last checkpoint on and mapped into memory."""

    def write(folder: Path) -> None:
        stage = "encoding passages"
        with contextlib.closing(vectors_file.VectorsWriter(folder, key, len(corpus), encoder.dimension)) as writer:
            while (begin := writer.done) < len(corpus):
                report(stage, begin, len(corpus))
                writer.append(
                    encoder.encode_passages(
                        corpus.contents[begin : begin + PART],
                        lambda done, begin=begin: report(stage, begin + done, len(corpus)),  # type: ignore[misc]
                    )
                )
            report(stage, len(corpus), len(corpus))

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
    from forage_retriever.search import faiss_build

    precision: manifest.Vectors | None = recipe.vectors
    if precision is None:
        precision = "float16" if faiss_build.needs_stored_vectors(recipe.factory, dimension) else ""
    digest = compute_digest(faiss_build.RECIPE, key, recipe.factory, precision)

    def write(folder: Path) -> None:
        vectors = load_vectors()
        index = _fill_index(workspace, recipe, digest, vectors, report)
        faiss_build.write_index(index, folder / faiss_build.INDEX_FILE)
        if precision:
            vectors_file.save_vectors(vectors, folder / vectors_file.VECTORS_FILE, precision)

    workspace.stage(manifest.DENSE_FOLDER, digest, write)
    for name in (_VECTORS, _TRAINED):
        workspace.drop(name)
    return manifest.DenseEntry(digest=digest, recipe=faiss_build.RECIPE, factory=recipe.factory, vectors=precision)


def describe_index(
    name: str,
    corpus: Corpus,
    bm25: manifest.Bm25Entry | None,
    encoder: Encoder | None,
    dense: manifest.DenseEntry | None,
    shard: manifest.ShardEntry | None = None,
) -> manifest.Manifest:
    """The manifest of an index, without its files."""
    return manifest.Manifest(
        format=manifest.FORMAT,
        recipe=name,
        passages=len(corpus),
        corpus_digest=corpus.digest,
        corpus_bytes=corpus.bytes,
        filter_fields=corpus.columns.fields,
        bm25=bm25,
        encoder=manifest.EncoderEntry.from_encoder(encoder) if encoder is not None else None,
        dense=dense,
        shard=shard,
        made_with=manifest.list_versions(),
        files={},
    )


def write_manifest(workspace: Workspace, description: manifest.Manifest, report: Report) -> None:
    """Hash every file of the index and write the manifest."""
    done = 0

    def progress(read: int) -> None:
        nonlocal done
        done += read
        report("digesting bytes", done, None)

    files = manifest.list_files(workspace.index, progress)
    manifest.write_manifest(workspace.index, description.model_copy(update={"files": files}))


def _write_corpus(folder: Path, corpus_file: Path, filter_fields: Sequence[str], report: Report) -> None:
    report("reading passages", 0, None)
    writer = CorpusWriter(folder, filter_fields)
    count = 0
    for count, (where, passage) in enumerate(read.read_located_passages(corpus_file), 1):
        writer.add_passage(passage, where)
        if count % _REPORT_EVERY == 0:
            report("reading passages", count, None)
    if not count:
        raise DataError(f"corpus {corpus_file} has no passages: write one JSON object with id and contents a line")
    report("reading passages", count, count)
    try:
        writer.finish()
    except DuplicateIdError as error:
        # Read again only now: remembering where each id stands would cost memory in every build.
        places = [where for where, passage in read.read_located_passages(corpus_file) if passage.id == error.id]
        raise DataError(f"{places[1]}: id {error.id!r} is already that of {places[0]}: make ids unique") from None


def _fill_index(workspace: Workspace, recipe: Recipe, key: str, vectors: NDArray[Any], report: Report) -> Any:
    import faiss

    from forage_retriever.search import faiss_build

    faiss.omp_set_num_threads(recipe.threads)
    count, dimension = vectors.shape
    index = faiss_build.create_index(recipe.factory, dimension)
    if rows := faiss_build.count_training_rows(index, count):

        def train(folder: Path) -> None:
            report("training", 0, None)
            faiss_build.train_index(index, recipe.factory, vectors_file.sample_vectors(vectors, rows))
            faiss_build.write_index(index, folder / faiss_build.INDEX_FILE)

        trained = workspace.stage(_TRAINED, key, train, temporary=True)
        index = faiss.read_index(str(trained / faiss_build.INDEX_FILE))
    done = 0
    for block in vectors_file.iterate_blocks(vectors):
        faiss_build.add_vectors(index, recipe.factory, block)
        done += len(block)
        report("indexing vectors", done, count)
    faiss_build.check_searchable(index, recipe.factory, vectors_file.sample_vectors(vectors, 1))
    return index
