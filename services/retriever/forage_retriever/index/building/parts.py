"""Builds all parts of one index folder beside its stored corpus."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from forage_retriever.artifacts import compute_digest
from forage_retriever.corpus.store import Corpus
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.index import space
from forage_retriever.index.building import stages
from forage_retriever.index.manifest import EncoderEntry, ShardEntry
from forage_retriever.index.progress import Report
from forage_retriever.index.recipe import Recipe
from forage_retriever.index.workspace import Workspace
from forage_runtime.settings import RetrievalMode

if TYPE_CHECKING:
    from forage_retriever.search.corpus_statistics import CorpusStatistics


def build_parts(
    workspace: Workspace,
    recipe: Recipe,
    name: str,
    corpus: Corpus,
    report: Report,
    shard: ShardEntry | None = None,
    statistics: CorpusStatistics | None = None,
) -> None:
    """Build BM25 index, dense index and manifest, as far as they are not there yet.

    Args:
        statistics: of the words of all shards, where this is one.

    Raises:
        UserError: the recipe does not fit the corpus, or the machine is at fault.
    """
    space.check_disk(
        workspace.folder, _estimate_remaining(workspace, recipe, corpus), f"an index of {len(corpus)} passages"
    )
    encoder = recipe.encoder
    if encoder is not None:
        space.check_build_memory(recipe.factory, encoder.dimension, len(corpus))
    bm25 = stages.build_bm25(workspace, recipe, corpus, report, statistics, shard.number if shard else 0)
    dense = None
    if encoder is not None:
        # Imported here: BM25 alone needs no FAISS.
        from forage_retriever.index.building import dense_stages

        key = compute_digest(corpus.digest, encoder.digest)

        def load_vectors() -> NDArray[Any]:
            report(describe_encoder(encoder, recipe.threads), 0, None)
            counting = _CountingReport(report, dense_stages.ENCODING)
            vectors = dense_stages.encode_passages(workspace, key, corpus, encoder, counting)
            if counting.count:
                per_s = counting.count / max(counting.seconds, 1e-9)
                report(f"encoded {counting.count:,} passages, {per_s:,.1f} a second", 0, None)
            return vectors

        dense = dense_stages.build_dense(workspace, recipe, key, encoder.dimension, load_vectors, report)
    entry = EncoderEntry.from_encoder(encoder) if encoder is not None else None
    stages.write_manifest(workspace, stages.describe_index(name, corpus, bm25, entry, dense, shard), report)


def list_stages(recipe: Recipe) -> list[str]:
    """The names of the stages of a build of this recipe, as they are reported."""
    words = [] if recipe.mode is RetrievalMode.DENSE else [stages.WORDS]
    vectors: list[str] = []
    if recipe.encoder is not None:
        from forage_retriever.index.building import dense_stages

        vectors = [dense_stages.ENCODING, *dense_stages.list_stages(recipe.factory, recipe.encoder.dimension)]
    return [stages.READING, *words, *vectors, stages.DIGESTING]


def describe_encoder(encoder: Encoder, threads: int) -> str:
    """A sentence on what encodes, where, and how precisely."""
    if encoder.precision == "remote":
        return f"encodes with {encoder.model}, a remote encoder"
    place = f"{threads} CPU threads" if encoder.device == "cpu" else encoder.device
    return f"encodes with {encoder.model} ({encoder.convention.name}) on {place} in {encoder.precision}"


class _CountingReport:
    """Passes reports on, and counts the items of one stage and its seconds in this process."""

    def __init__(self, report: Report, stage: str) -> None:
        self._report = report
        self._stage = stage
        self._first: int | None = None
        self._begun = 0.0
        self.count, self.seconds = 0, 0.0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage == self._stage:
            now = time.monotonic()
            if self._first is None:
                self._first, self._begun = done, now
            self.count, self.seconds = done - self._first, now - self._begun
        self._report(stage, done, total)


def _estimate_remaining(workspace: Workspace, recipe: Recipe, corpus: Corpus) -> int:
    """Bytes that the stages after the corpus will write, estimated."""
    needed = 0 if recipe.mode is RetrievalMode.DENSE else space.estimate_bm25_bytes(corpus.bytes)
    if recipe.encoder is not None:
        needed += space.estimate_dense_bytes(recipe.factory, recipe.encoder.dimension, len(corpus))
    return max(needed - space.measure_used_bytes(workspace.folder) + corpus.bytes, 0)
