"""Builds an index folder from a corpus file, whole or cut into shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from forage_common.errors import UserError
from forage_common.settings import RetrievalMode
from forage_retriever.artifacts import compute_digest
from forage_retriever.corpus import read
from forage_retriever.corpus.store import Corpus, CorpusWriter
from forage_retriever.index import space, stages
from forage_retriever.index.manifest import CORPUS_FOLDER, ShardEntry
from forage_retriever.index.progress import Report
from forage_retriever.index.recipe import CORPUS_RECIPE, Recipe
from forage_retriever.index.workspace import Workspace, hold_workspace, open_workspace

if TYPE_CHECKING:
    from forage_retriever.search.corpus_statistics import CorpusStatistics

_WHOLE = "whole"


def build_index(
    final: Path, staging_dir: Path, corpus_file: Path, recipe: Recipe, report: Report, shards: int = 1
) -> None:
    """Build the index folder `final` in `staging_dir`, from which a later build resumes if this one is killed.

    Several shards become `final/shard-0` and so on, each with consecutive passages.

    Raises:
        UserError: the corpus, the recipe or the machine are at fault.
    """
    source = read.hash_corpus(corpus_file)
    name = recipe.compute_digest(source, shards)
    with open_workspace(staging_dir, final, report) as workspace:
        if workspace is None:
            return
        space.check_disk(staging_dir, space.estimate_corpus_bytes(read.list_files(corpus_file)), "the passages")
        if shards == 1:
            corpus = stages.store_corpus(workspace, corpus_file, source, recipe.filter_fields, report)
            _build_parts(workspace, recipe, name, corpus, report)
        else:
            corpus = stages.store_corpus(workspace, corpus_file, source, recipe.filter_fields, report, _WHOLE)
            _build_shards(workspace, recipe, name, corpus, shards, report)
            for name in (_WHOLE, stages.STATISTICS):
                workspace.drop(name)
        workspace.finish(final)


def _build_shards(workspace: Workspace, recipe: Recipe, name: str, whole: Corpus, shards: int, report: Report) -> None:
    if shards > len(whole):
        raise UserError(f"--shards {shards} is more than the {len(whole)} passages of the corpus: cut it into fewer")
    ends = [(number + 1) * len(whole) // shards for number in range(shards)]
    statistics = stages.count_words(workspace, recipe, whole, ends, report)
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):

        def write(folder: Path, begin: int = begin, end: int = end) -> None:
            writer = CorpusWriter(folder, recipe.filter_fields)
            for passage in whole[begin:end]:
                writer.add_passage(passage)
            writer.finish()

        def report_shard(stage: str, done: int, total: int | None, number: int = number) -> None:
            report(f"shard {number}: {stage}", done, total)

        staging_dir, final = workspace.folder / f"shard-{number}", workspace.index / f"shard-{number}"
        with hold_workspace(staging_dir, final, lambda: None) as part:
            if part is not None:
                key = compute_digest(CORPUS_RECIPE, whole.digest, str(begin), str(end))
                corpus = Corpus(part.stage(CORPUS_FOLDER, key, write))
                shard = ShardEntry(number=number, of=shards, first=begin)
                _build_parts(part, recipe, name, corpus, report_shard, shard, statistics)
                part.finish(final)


def _build_parts(
    workspace: Workspace,
    recipe: Recipe,
    name: str,
    corpus: Corpus,
    report: Report,
    shard: ShardEntry | None = None,
    statistics: CorpusStatistics | None = None,
) -> None:
    """Build everything of one index folder beside its corpus."""
    space.check_disk(
        workspace.folder, _estimate_remaining(workspace, recipe, corpus), f"an index of {len(corpus)} passages"
    )
    encoder = recipe.encoder
    if encoder is not None:
        space.check_build_memory(recipe.factory, encoder.dimension, len(corpus))
    bm25 = stages.build_bm25(workspace, recipe, corpus, report, statistics, shard.number if shard else 0)
    dense = None
    if encoder is not None:
        key = compute_digest(corpus.digest, encoder.digest)

        def load_vectors() -> NDArray[Any]:
            return stages.encode_passages(workspace, key, corpus, encoder, report)

        dense = stages.build_dense(workspace, recipe, key, encoder.dimension, load_vectors, report)
    stages.write_manifest(workspace, stages.describe_index(name, corpus, bm25, encoder, dense, shard), report)


def _estimate_remaining(workspace: Workspace, recipe: Recipe, corpus: Corpus) -> int:
    """Bytes that the stages after the corpus will write, estimated."""
    needed = 0 if recipe.mode is RetrievalMode.DENSE else space.estimate_bm25_bytes(corpus.bytes)
    if recipe.encoder is not None:
        needed += space.estimate_dense_bytes(recipe.factory, recipe.encoder.dimension, len(corpus))
    return max(needed - space.measure_used_bytes(workspace.folder) + corpus.bytes, 0)
