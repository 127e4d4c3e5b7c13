"""From settings to something that can be searched: an index folder, or one built from a corpus where none is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forage_common.errors import SettingsError, UserError
from forage_common.settings import RetrievalMode, RetrieverSettings
from forage_common.telemetry.logs import get_logger
from forage_retriever.artifacts import digest_of
from forage_retriever.corpus.store import Corpus
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.hits import Provenance, Searcher
from forage_retriever.index import cache, manifest, recipe, space
from forage_retriever.index.manifest import BM25_FOLDER, CORPUS_FOLDER, DENSE_FOLDER, Manifest
from forage_retriever.index.progress import LogReport

TITLE = "title"
"""Names the searcher of passages whose title is the query, which hybrid search fuses with others."""


@dataclass(frozen=True)
class Index:
    """A corpus, the ways to search it by mode (and by `TITLE`), and where all came from."""

    corpus: Corpus
    searchers: Mapping[str, Searcher]
    provenance: Provenance

    @property
    def searcher(self) -> Searcher:
        """That of the mode in the settings."""
        return self.searchers[self.provenance.mode]


def load(corpus_file: Path, settings: RetrieverSettings, waits_for: Callable[[str], None]) -> Index:
    """Make `settings.index` ready, or else the index of a corpus file, building it first if that was not done before;
    `waits_for` is told what is being done.

    Raises:
        UserError: the corpus, the index, the settings or the machine are at fault.
    """
    given = settings.index
    if given is not None:
        folder = given.resolve()  # once: a link that is moved meanwhile must not mix two indexes
        kept = _checked(folder, settings, waits_for)
    encoder = None
    if settings.mode is not RetrievalMode.BM25:
        waits_for("loading the encoder (exported to ONNX on its first start)")
        encoder = recipe.load_encoder(settings, building=False)
    if given is None:
        waits_for(f"reading the corpus {corpus_file}")
        what = "the BM25 index" if encoder is None else "the dense index"
        report = LogReport(lambda doing: waits_for(f"loading {what} (built on its first start): {doing}"))
        folder = cache.build_cached(corpus_file, settings, encoder, report)
        kept = _checked(folder, settings, waits_for)
    waits_for(f"loading an index of {kept.passages} passages")
    return _opened(folder, kept, settings, encoder)


def _checked(folder: Path, settings: RetrieverSettings, waits_for: Callable[[str], None]) -> Manifest:
    """The manifest of a folder that is whole, and has what the settings ask for.

    Raises:
        UserError: it is not, or has not, or does not fit into memory.
    """
    kept = manifest.read(folder)
    if settings.mode not in kept.modes:
        raise SettingsError(
            f"retriever.mode is {settings.mode}, and index {folder} has {', '.join(kept.modes)}: set one of these, or"
            " build it with the other part"
        )
    if missing := sorted(set(settings.filter_fields) - set(kept.filter_fields)):
        raise SettingsError(
            f"retriever.filter_fields has {missing[0]!r}, and index {folder} was built with"
            f" {', '.join(kept.filter_fields) or 'none'}: build it with --filter-field {missing[0]}"
        )
    _check_recipes(folder, kept, settings.mode)
    if kept.dense is not None and kept.encoder is not None and settings.mode is not RetrievalMode.BM25:
        space.check_load_memory(kept.dense.factory, kept.encoder.dimension, kept.passages)
    waits_for(f"checking the files of index {folder}")
    if unchecked := manifest.check(folder, kept):
        get_logger().info("index_partly_checked", sizes_only=unchecked, remedy=f"forage index verify {folder}")
    return kept


def _check_recipes(folder: Path, kept: Manifest, mode: RetrievalMode) -> None:
    from forage_retriever.search import bm25

    found = {kept.bm25.recipe: bm25.RECIPE} if kept.bm25 is not None else {}
    if kept.dense is not None and mode is not RetrievalMode.BM25:
        from forage_retriever.search import faiss_build

        found[kept.dense.recipe] = faiss_build.RECIPE
    for made, needed in found.items():
        if made != needed:
            raise UserError(f"index {folder} was made by other code ({made}, not {needed}): build it again")


def _opened(folder: Path, kept: Manifest, settings: RetrieverSettings, encoder: Encoder | None) -> Index:
    from forage_retriever.search import rerank

    corpus = Corpus(folder / CORPUS_FOLDER)
    searchers: dict[str, Searcher] = {}
    if kept.bm25 is not None:
        from forage_retriever.search import bm25

        words = bm25.Bm25Index(folder / BM25_FOLDER, corpus.columns)
        searchers |= {RetrievalMode.BM25: words, TITLE: bm25.TitleIndex(words)}
    if encoder is not None:
        from forage_retriever.search.dense import DenseIndex

        _check_encoder(folder, kept, encoder)
        searchers[RetrievalMode.DENSE] = DenseIndex(folder / DENSE_FOLDER, encoder, corpus.columns, settings)
    if RetrievalMode.BM25 in searchers and RetrievalMode.DENSE in searchers:
        from forage_retriever.search.hybrid import HybridIndex

        titles, by_words, by_meaning = (searchers[key] for key in (TITLE, RetrievalMode.BM25, RetrievalMode.DENSE))
        searchers[RetrievalMode.HYBRID] = HybridIndex(titles, by_words, by_meaning, settings)
    digest = kept.digest(settings.mode)
    if (reranker := rerank.load(settings)) is not None:
        depth = settings.rerank.depth
        digest = digest_of("reranked/1", digest, reranker.digest, str(depth))
        for mode in set(searchers) - {TITLE}:
            searchers[mode] = rerank.RerankedSearcher(searchers[mode], corpus, reranker, depth)
    queries = encoder.digest if encoder else ""
    return Index(corpus, searchers, Provenance(corpus.digest, queries, digest, settings.mode))


def _check_encoder(folder: Path, kept: Manifest, encoder: Encoder) -> None:
    entry = kept.encoder
    assert entry is not None
    known = encoder.family and entry.family  # what a remote encoder is made of cannot be known
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
