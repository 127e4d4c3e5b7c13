"""BM25 on tantivy, over text and title; the title has a little more weight.

A policy writes the queries, so they never reach a query parser: passages and queries go through the same analyzer, and
queries are built from its tokens. A passage whose title equals the query ranks first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import tantivy

from forage_retriever.corpus.columns import Columns, format_filter_term
from forage_retriever.corpus.read import split_contents
from forage_retriever.corpus.store import Corpus
from forage_retriever.hits import ROUNDING, Filters, Hit, sort_scores
from forage_retriever.search import corpus_statistics
from forage_retriever.search.corpus_statistics import CorpusStatistics, Padding
from forage_runtime.errors import UserError

RECIPE = "bm25/3"
"""Changes whenever an index built by older code cannot be used."""

TITLE_BOOST = 0.3
"""Weight of a word in the title, in addition to its weight in the text. For 2,803 questions of five sources, hit@3 is
90, 91, 90 and 88 % with 0, 0.3, 0.6 and 1, and 79 % with 2 and no titles in the text."""

EXACT_TITLE_SCORE = 50.0
MAX_QUERY_CHARS = 2000
MAX_QUERY_TOKENS = 64
_MAX_TITLE_CHARS = 1000
_MAX_TOKEN_BYTES = 60
_HEAP_BYTES = 64_000_000
_PROGRESS_PASSAGES = 1000
_TIES = 16
"""Extra hits, so that equal scores can be ordered by row: which segment has a row is random."""

_MOST_TIES = 10_000
"""Hits beyond which equal scores are left in the order of the segments."""

_KNOWN_FACTORS = 2**15
"""Weights of words that are kept, about 10 MB: questions use few words often."""

_PADDING_WORD = " "
"""No analyzer gives it, so no query finds padding."""

_PADDING_WORDS = 10_000
"""Words of one document of padding, at most."""


class Bm25Index:
    """A BM25 index, mapped into memory, with the filter columns.

    Attributes:
        statistics: those of the whole corpus by which a shard scores; None: it scores by its own.
    """

    def __init__(self, folder: Path, columns: Columns) -> None:
        """Map the folder.

        Raises:
            UserError: it is missing or damaged.
        """
        try:
            index = tantivy.Index.open(str(folder))
        except ValueError as error:
            raise UserError(f"index {folder} cannot be read ({error}): delete this folder and start again") from None
        self._schema = index.schema
        self._searcher = index.searcher()
        self._columns = columns
        found = (folder / corpus_statistics.FOLDER).is_dir()
        self.statistics = CorpusStatistics(folder / corpus_statistics.FOLDER) if found else None
        self._find_factor = lru_cache(_KNOWN_FACTORS)(self._compute_factor)
        self._words, self._stems = _build_word_analyzer(), _build_stem_analyzer()

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        """The best passages for each query.

        Raises:
            UnknownFieldError: a filter names a field that the index does not have.
        """
        passing = self._build_filter_queries(filters)
        return [self._search(query, topk, passing) for query in queries]

    def search_titles(self, query: str, topk: int, filters: Filters = ()) -> list[Hit]:
        """At most `topk` passages whose title equals the query, ignoring case, punctuation and accents."""
        words = self._words.analyze(query[:MAX_QUERY_CHARS])
        if not words:
            return []
        # One score for all: the weight of a title would differ between the shards of a corpus.
        match = tantivy.Query.const_score_query(self._match_title(words), 1.0)
        return self._collect_hits(match, topk, self._build_filter_queries(filters))

    def _search(self, query: str, topk: int, passing: Sequence[tantivy.Query]) -> list[Hit]:
        query = query[:MAX_QUERY_CHARS]
        terms = list(dict.fromkeys(self._stems.analyze(query)))[:MAX_QUERY_TOKENS]
        if not terms:
            return []
        of = tantivy.Query
        clauses = [of.const_score_query(self._match_title(self._words.analyze(query)), EXACT_TITLE_SCORE)]
        for field, boost in (("title", TITLE_BOOST), ("text", 1.0)):
            for term in terms:
                match, weight = of.term_query(self._schema, field, term), boost * self._find_factor(field, term)
                clauses.append(match if weight == 1 else of.boost_query(match, weight))
        return self._collect_hits(
            of.boolean_query([(tantivy.Occur.Should, clause) for clause in clauses]), topk, passing
        )

    def _compute_factor(self, field: str, word: str) -> float:
        """What makes the weight of a word that of the whole corpus."""
        if self.statistics is None:
            return 1.0
        here, documents = self._searcher.doc_freq(field, word), self._searcher.num_docs
        return self.statistics.compute_factor(field, word, here, documents)

    def _match_title(self, words: list[str]) -> tantivy.Query:
        return tantivy.Query.term_query(self._schema, "name", " ".join(words))

    def _build_filter_queries(self, filters: Filters) -> list[tantivy.Query]:
        """A query for each filter, which a passage must match and which does not change its score."""
        for field, _ in filters:
            self._columns.check_field(field)
        of = tantivy.Query
        return [
            of.const_score_query(
                of.term_set_query(self._schema, "filter", [format_filter_term(name, one) for one in accepted]), 0.0
            )
            for name, accepted in filters
        ]

    def _collect_hits(self, query: tantivy.Query, topk: int, passing: Sequence[tantivy.Query]) -> list[Hit]:
        if passing:
            query = tantivy.Query.boolean_query([(tantivy.Occur.Must, part) for part in (query, *passing)])
        limit = topk + _TIES
        while True:
            matches = self._searcher.search(query, limit=limit, count=False).hits
            if len(matches) < limit or limit > _MOST_TIES or matches[-1][0] < matches[topk - 1][0] * (1 - 2 * ROUNDING):
                break
            limit *= 8
        rows = self._searcher.fast_field_values("row", [address for _, address in matches])
        hits = [Hit(int(row), float(score)) for row, (score, _) in zip(rows, matches, strict=True) if row is not None]
        hits.sort()
        return [hits[place] for place in sort_scores([hit.score for hit in hits])[:topk]]


class TitleIndex:
    """Searches the titles of a BM25 index for exact matches."""

    def __init__(self, bm25: Bm25Index) -> None:
        self._bm25 = bm25

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        """The passages whose title equals each query."""
        return [self._bm25.search_titles(query, topk, filters) for query in queries]


def build_bm25_index(
    folder: Path,
    corpus: Corpus,
    progress: Callable[[int], None] = lambda done: None,
    statistics: CorpusStatistics | None = None,
    number: int = 0,
) -> None:
    """Index a corpus into an empty folder; `progress` gets the number of indexed passages.

    Args:
        statistics: of the corpus whose shard `number` this is; None: of a corpus in one index.
    """
    words = _build_word_analyzer()
    index = tantivy.Index(_build_schema(), path=str(folder))
    index.register_tokenizer("stems", _build_stem_analyzer())
    writer = index.writer(heap_size=_HEAP_BYTES, num_threads=1)
    for row, passage in enumerate(corpus):
        title, text = _list_scored_texts(passage.contents)
        document = tantivy.Document()
        document.add_unsigned("row", row)
        document.add_text("name", " ".join(words.analyze(title[:_MAX_TITLE_CHARS])))
        document.add_text("title", title)
        document.add_text("text", text)
        for one in corpus.columns.list_filter_terms(passage.fields):
            document.add_text("filter", one)
        writer.add_document(document)
        if (row + 1) % _PROGRESS_PASSAGES == 0:
            progress(row + 1)
    if statistics is not None:
        _add_padding(writer, statistics.plan_padding(number))
    writer.commit()
    writer.wait_merging_threads()
    progress(len(corpus))


def count_words(
    folder: Path,
    corpus: Corpus,
    ends: Sequence[int],
    digest: str,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Write the statistics of a whole corpus to an empty folder, for the indexes of its shards.

    Args:
        ends: of the shards, each the number of passages until there.
        digest: names the corpus and its shards.
        progress: gets the number of counted passages.
    """
    stems = _build_stem_analyzer()
    words = ([stems.analyze(text) for text in _list_scored_texts(passage.contents)] for passage in corpus)

    def report(done: int) -> None:
        if done % _PROGRESS_PASSAGES == 0 or done == len(corpus):
            progress(done)

    corpus_statistics.count_corpus(folder, digest, words, ends, report)


def _list_scored_texts(contents: str) -> tuple[str, str]:
    """The texts of `corpus_statistics.FIELDS`: title, and title with text."""
    title, text = split_contents(contents)
    return title, f"{title}\n{text}"


def _add_padding(writer: tantivy.IndexWriter, padding: Padding) -> None:
    left = dict(zip(corpus_statistics.FIELDS, padding.words, strict=True))
    most = max(_PADDING_WORDS, *(-(-words // max(padding.documents, 1)) for words in left.values()))
    for _ in range(padding.documents):
        document = tantivy.Document()
        for field, words in left.items():
            if taken := min(words, most):
                tokens = [tantivy.Token(_PADDING_WORD, 0, 0)] * taken
                document.add_pre_tokenized_text(field, tantivy.PreTokenizedString(_PADDING_WORD, tokens))
                left[field] = words - taken
        writer.add_document(document)


def _build_schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_unsigned_field("row", fast=True)
    builder.add_text_field("name", tokenizer_name="raw", index_option="basic")
    builder.add_text_field("title", tokenizer_name="stems", index_option="freq")
    builder.add_text_field("text", tokenizer_name="stems", index_option="freq")
    builder.add_text_field("filter", tokenizer_name="raw", index_option="basic")
    return builder.build()


def _build_word_analyzer() -> tantivy.TextAnalyzer:
    of = tantivy.Filter
    return _build_analyzer(of.remove_long(_MAX_TOKEN_BYTES), of.lowercase(), of.ascii_fold())


def _build_stem_analyzer() -> tantivy.TextAnalyzer:
    of = tantivy.Filter
    return _build_analyzer(of.remove_long(_MAX_TOKEN_BYTES), of.lowercase(), of.ascii_fold(), of.stemmer("english"))


def _build_analyzer(*filters: tantivy.Filter) -> tantivy.TextAnalyzer:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    for step in filters:
        builder = builder.filter(step)
    return builder.build()
