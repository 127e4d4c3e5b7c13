"""Loads the index that the settings name: an index folder, or else the cached index of a corpus file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forage_retriever.artifacts import compute_digest
from forage_retriever.corpus.store import Corpus
from forage_retriever.devices import count_threads
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.hits import Provenance, Searcher
from forage_retriever.index import cache, manifest, recipe, space
from forage_retriever.index.manifest import BM25_FOLDER, CORPUS_FOLDER, DENSE_FOLDER, DamagedError, Manifest
from forage_retriever.index.progress import LogReport
from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import RetrievalMode, RetrieverSettings
from forage_runtime.telemetry.logs import get_logger

TITLE = "title"
"""The searcher of passages whose title is the query, which hybrid search fuses with the others."""


@dataclass(frozen=True)
class Index:
    """A corpus, its searchers by mode (and by `TITLE`), and the provenance of their results."""

    corpus: Corpus
    searchers: Mapping[str, Searcher]
    provenance: Provenance

    @property
    def searcher(self) -> Searcher:
        """The searcher of the mode in the settings."""
        return self.searchers[self.provenance.mode]


def load_index(corpus_file: Path, settings: RetrieverSettings, report_wait: Callable[[str], None]) -> Index:
    """Load `settings.index`, or else the index of a corpus file, built first if it was not built before.

    Args:
        report_wait: called with what the load is waiting for.

    Raises:
        UserError: the corpus, the index, the settings or the machine are at fault.
    """
    if settings.index is not None:
        folder = settings.index.resolve()  # once: a link that is moved meanwhile must not mix two indexes
        description = _check_index(folder, settings, report_wait)
    encoder = None
    if settings.mode is not RetrievalMode.BM25:
        report_wait("loading the encoder (exported to ONNX on its first start)")
        encoder = recipe.load_encoder(settings, building=False)
    if settings.index is None:
        report_wait(f"reading the corpus {corpus_file}")
        kind = "BM25" if encoder is None else "dense"
        report = LogReport(lambda stage: report_wait(f"loading the {kind} index (built on its first start): {stage}"))
        folder = cache.build_cached(corpus_file, settings, encoder, report)
        try:
            description = _check_index(folder, settings, report_wait)
        except DamagedError as error:
            # The corpus is there to build it from again; an index of the settings' own is left for its owner to judge.
            get_logger().warning("damaged_index_built_again", reason=str(error))
            cache.remove_cached(folder)
            folder = cache.build_cached(corpus_file, settings, encoder, report)
            description = _check_index(folder, settings, report_wait)
    report_wait(f"loading an index of {description.passages} passages")
    return _open_index(folder, description, settings, encoder)


def read_fitting_manifest(folder: Path, settings: RetrieverSettings) -> Manifest:
    """The manifest of a folder that has what the settings ask for, its files unread.

    Raises:
        UserError: it is none, lacks a mode or a filter field, or does not fit into memory.
    """
    description = manifest.read_manifest(folder)
    if settings.mode not in description.modes:
        raise SettingsError(
            f"retriever.mode is {settings.mode}, and index {folder} has {', '.join(description.modes)}: set one of"
            " these, or build it with the other part"
        )
    if missing := sorted(set(settings.filter_fields) - set(description.filter_fields)):
        raise SettingsError(
            f"retriever.filter_fields has {missing[0]!r}, and index {folder} was built with"
            f" {', '.join(description.filter_fields) or 'none'}: build it with --filter-field {missing[0]}"
        )
    _check_recipes(folder, description, settings.mode)
    if description.dense is not None and description.encoder is not None and settings.mode is not RetrievalMode.BM25:
        space.check_load_memory(description.dense.factory, description.encoder.dimension, description.passages)
    return description


def _check_index(folder: Path, settings: RetrieverSettings, report_wait: Callable[[str], None]) -> Manifest:
    """The manifest of such a folder that is undamaged.

    Raises:
        UserError: as `read_fitting_manifest`, or a file is damaged.
    """
    description = read_fitting_manifest(folder, settings)
    report_wait(f"checking the files of index {folder}")
    if unchecked := manifest.check_files(folder, description):
        get_logger().info("index_partly_checked", sizes_only=unchecked, remedy=f"forage index verify {folder}")
    return description


def _check_recipes(folder: Path, description: Manifest, mode: RetrievalMode) -> None:
    from forage_retriever.search import bm25

    recipes = {description.bm25.recipe: bm25.RECIPE} if description.bm25 is not None else {}
    if description.dense is not None and mode is not RetrievalMode.BM25:
        from forage_retriever.search import faiss_build

        recipes[description.dense.recipe] = faiss_build.RECIPE
    for built, needed in recipes.items():
        if built != needed:
            raise UserError(f"index {folder} was built by other code ({built}, not {needed}): build it again")


def _open_index(folder: Path, description: Manifest, settings: RetrieverSettings, encoder: Encoder | None) -> Index:
    from forage_retriever.search import rerank

    corpus = Corpus(folder / CORPUS_FOLDER)
    searchers: dict[str, Searcher] = {}
    if description.bm25 is not None:
        from forage_retriever.search import bm25

        bm25_index = bm25.Bm25Index(folder / BM25_FOLDER, corpus.columns)
        if description.shard is not None and bm25_index.statistics is None:
            get_logger().warning(
                "shard_scores_by_itself",
                why=f"{folder} lacks the statistics of the whole corpus: its BM25 scores are not those of one index",
                remedy="build the shards again with `forage index build --shards`",
            )
        searchers |= {RetrievalMode.BM25: bm25_index, TITLE: bm25.TitleIndex(bm25_index)}
    if encoder is not None:
        from forage_retriever.search.dense import DenseIndex

        _check_encoder(folder, description, encoder)
        searchers[RetrievalMode.DENSE] = DenseIndex(folder / DENSE_FOLDER, encoder, corpus.columns, settings)
    if RetrievalMode.BM25 in searchers and RetrievalMode.DENSE in searchers:
        from forage_retriever.search.hybrid import HybridIndex

        titles, words, vectors = (searchers[key] for key in (TITLE, RetrievalMode.BM25, RetrievalMode.DENSE))
        searchers[RetrievalMode.HYBRID] = HybridIndex(titles, words, vectors, settings)
    digest = description.compute_digest(settings.mode)
    if (reranker := rerank.load_reranker(settings)) is not None:
        depth = settings.rerank.depth
        digest = compute_digest("reranked/1", digest, reranker.digest, str(depth))
        for mode in set(searchers) - {TITLE}:
            searchers[mode] = rerank.RerankedSearcher(searchers[mode], corpus, reranker, depth)
    provenance = Provenance(corpus.digest, encoder.digest if encoder else "", digest, settings.mode)
    _log_devices(searchers, encoder, settings)
    return Index(corpus, searchers, provenance)


def _log_devices(searchers: Mapping[str, Searcher], encoder: Encoder | None, settings: RetrieverSettings) -> None:
    chosen = f"{settings.threads} (retriever.threads)" if settings.threads else f"{count_threads(settings)} (automatic)"
    if encoder is None:
        get_logger().info("computes_on", threads=chosen)
        return
    from forage_retriever.search.dense import DenseIndex

    dense = searchers[RetrievalMode.DENSE]
    assert isinstance(dense, DenseIndex)
    searches = f"{dense.vectors.gpus} GPUs" if dense.vectors.gpus else "CPUs"
    encodes = f"{encoder.device} in {encoder.precision}"
    get_logger().info("computes_on", threads=chosen, searches_vectors=searches, encodes_queries=encodes)


def _check_encoder(folder: Path, description: Manifest, encoder: Encoder) -> None:
    entry = description.encoder
    assert entry is not None
    known = encoder.family and entry.family  # the weights of a remote encoder are unknown
    if encoder.dimension != entry.dimension or (known and encoder.family != entry.family):
        raise SettingsError(
            f"retriever.encoder is {encoder.model} ({encoder.convention.name}, {encoder.dimension} numbers), and index"
            f" {folder} was built with {entry.model} ({entry.convention}, {entry.dimension} numbers): set"
            f" retriever.encoder.model and .convention to those, or build the index again"
        )
    if encoder.digest != entry.digest:
        get_logger().info(
            "encoders_differ",
            queries=encoder.digest,
            passages=entry.digest,
            precisions=[encoder.precision, entry.precision],
        )
