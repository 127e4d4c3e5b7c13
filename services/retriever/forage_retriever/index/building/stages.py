"""The stages of a build that read passages: corpus store and BM25 index; and the manifest at its end.

Each stage ends in a checkpoint, so a killed build resumes and its result is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forage_retriever.artifacts import compute_digest
from forage_retriever.corpus import read
from forage_retriever.corpus.store import Corpus, CorpusWriter, DuplicateIdError
from forage_retriever.index import manifest, space
from forage_retriever.index.building import self_check
from forage_retriever.index.progress import Report
from forage_retriever.index.recipe import CORPUS_RECIPE, Recipe
from forage_retriever.index.workspace import Workspace
from forage_runtime.errors import DataError
from forage_runtime.files.corpus import list_files
from forage_runtime.settings import RetrievalMode

if TYPE_CHECKING:
    from forage_retriever.search.corpus_statistics import CorpusStatistics

READING, COUNTING, WORDS = "reading passages", "counting words", "indexing words"
DIGESTING = "digesting files"
STATISTICS = "statistics"
_REPORT_EVERY = 1000


def hash_source(file: Path, report: Report) -> str:
    """SHA-256 of a corpus file, or of a FAISS file.

    Raises:
        DataError: it cannot be read.
    """
    done, total = 0, sum(one.stat().st_size for one in list_files(file) if one.is_file())

    def progress(count: int) -> None:
        nonlocal done
        done += count
        report(f"digesting {file.name}", done, total)

    return read.hash_corpus(file, progress)


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
        bm25.count_words(folder, whole, ends, key, lambda done: report(COUNTING, done, len(whole)))

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
        bm25.build_bm25_index(folder, corpus, lambda done: report(WORDS, done, len(corpus)), statistics, number)
        if statistics is not None:
            statistics.copy(folder / STATISTICS)
        self_check.check_words(folder, corpus)

    workspace.stage(manifest.BM25_FOLDER, digest, write)
    return manifest.Bm25Entry(digest=digest, recipe=bm25.RECIPE)


def describe_index(
    name: str,
    corpus: Corpus,
    bm25: manifest.Bm25Entry | None,
    encoder: manifest.EncoderEntry | None,
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
        encoder=encoder,
        dense=dense,
        shard=shard,
        made_with=manifest.list_versions(),
        files={},
    )


def write_manifest(workspace: Workspace, description: manifest.Manifest, report: Report) -> None:
    """Hash every file of the index and write the manifest."""
    done, total = 0, space.measure_used_bytes(workspace.index)

    def progress(read: int) -> None:
        nonlocal done
        done += read
        report(DIGESTING, done, total)

    files = manifest.list_files(workspace.index, progress)
    manifest.write_manifest(workspace.index, description.model_copy(update={"files": files}))


def _write_corpus(folder: Path, corpus_file: Path, filter_fields: Sequence[str], report: Report) -> None:
    report(READING, 0, None)
    writer = CorpusWriter(folder, filter_fields)
    count = 0
    for count, (where, passage) in enumerate(read.read_located_passages(corpus_file), 1):
        writer.add_passage(passage, where)
        if count % _REPORT_EVERY == 0:
            report(READING, count, None)
    if not count:
        raise DataError(f"corpus {corpus_file} has no passages: write one JSON object with id and contents a line")
    report(READING, count, count)
    try:
        writer.finish()
    except DuplicateIdError as error:
        # Read again only now: remembering where each id stands would cost memory in every build.
        places = [where for where, passage in read.read_located_passages(corpus_file) if passage.id == error.id]
        raise DataError(f"{places[1]}: id {error.id!r} is already that of {places[0]}: make ids unique") from None
