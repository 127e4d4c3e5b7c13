"""BM25 on the small corpus, and queries in query syntax."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from retriever_parts import write_corpus

from forage_retriever.corpus.columns import UnknownFieldError
from forage_retriever.corpus.read import Passage
from forage_retriever.corpus.store import Corpus
from forage_retriever.hits import Filters
from forage_retriever.search import bm25
from forage_retriever.search.bm25 import Bm25Index, TitleIndex
from forage_runtime.errors import UserError


@pytest.fixture
def index(tmp_path: Path, texts: Corpus) -> Bm25Index:
    folder = tmp_path / "bm25"
    folder.mkdir()
    bm25.build_bm25_index(folder, texts)
    return Bm25Index(folder, texts.columns)


def search_ids(index: Bm25Index, texts: Corpus, query: str, topk: int = 3) -> list[str]:
    return [texts.ids[hit.row] for hit in index.search([query], topk)[0]]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("Norway", "n"),
        ("Oslo", "o"),
        ("oslo?!", "o"),
        ("Kandy", "k"),
        ("Kandi", "7"),
        ("Sao Paulo", "s"),
        ("SÃO PAULO", "s"),
        ("currencies of Norway", "n"),
        ("name:Oslo", "o"),
        ("only a title", "t"),
    ],
)
def test_the_passage_titled_by_the_query_ranks_first(index: Bm25Index, texts: Corpus, query: str, first: str) -> None:
    assert search_ids(index, texts, query)[0] == first


@pytest.mark.parametrize("query", ["", " ", "\n", "???", "\u0000", "\u200b", "🙂", "zzzz", "-", "()", '"'])
def test_a_query_without_known_words_finds_nothing(index: Bm25Index, texts: Corpus, query: str) -> None:
    assert search_ids(index, texts, query) == []


@pytest.mark.parametrize(
    "query",
    [
        "Oslo AND",
        "(((Oslo",
        'Oslo "',
        "title:[Oslo TO *]",
        "Oslo^1e999",
        "Oslo~9999999999",
        "nofield:Oslo",
        "-Oslo +Oslo",
        "*:* Oslo",
        "Oslo \\",
        "/.*(a+)+/ Oslo",
        "<search>Oslo</search>",
        "Oslo\u0000\ufffe\u202e",
        "Oslo " * 100_000,
    ],
)
def test_query_syntax_is_searched_as_words(index: Bm25Index, texts: Corpus, query: str) -> None:
    assert "o" in search_ids(index, texts, query)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(query=st.text(), topk=st.integers(1, 10))
def test_any_text_is_a_query(index: Bm25Index, query: str, topk: int) -> None:
    hits = index.search([query], topk)[0]
    assert len(hits) <= topk
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_no_more_documents_are_found_than_there_are(index: Bm25Index, texts: Corpus) -> None:
    assert len(search_ids(index, texts, "city Norway title", topk=1000)) <= len(texts)


def test_titles_match_exactly_ignoring_case_punctuation_and_accents(index: Bm25Index, texts: Corpus) -> None:
    def search_titles(query: str) -> list[str]:
        return [texts.ids[hit.row] for hit in index.search_titles(query, 5)]

    assert search_titles("KANDY.") == ["k"]
    assert search_titles("sao  paulo") == ["s"]
    assert search_titles("Paulo") == search_titles("") == search_titles("?") == []


@pytest.mark.parametrize(
    ("query", "filters", "want"),
    [
        ("capital of Norway", (("lang", ("nb",)),), ["o"]),
        ("city in Benin or Norway", (("lang", ("fr", "nn")),), ["7", "o"]),
        ("Kandi", (("lang", ("nb",)),), []),
        ("Kandi", (("lang", ()),), []),
        ("Norway", (("lang", ("en",)),), []),
        ("Norway", (("lang", ("nb",)), ("lang", ("fr",))), []),
    ],
)
def test_only_passages_that_pass_the_filters_are_found(
    index: Bm25Index, texts: Corpus, query: str, filters: Filters, want: list[str]
) -> None:
    assert [texts.ids[hit.row] for hit in index.search([query], 5, filters)[0]] == want
    titles = [texts.ids[hit.row] for hit in TitleIndex(index).search([query], 5, filters)[0]]
    assert titles == [id for id in want if query == "Kandi"]


def test_a_filter_does_not_change_scores(index: Bm25Index) -> None:
    alone, filtered = index.search(["Oslo"], 1)[0], index.search(["Oslo"], 1, (("lang", ("nb",)),))[0]
    assert filtered == [(alone[0].row, pytest.approx(alone[0].score))]


def test_a_filter_on_an_unknown_field_names_it(index: Bm25Index) -> None:
    with pytest.raises(UnknownFieldError, match="'colour'"):
        index.search(["Oslo"], 3, (("colour", ("red",)),))


def test_equal_scores_are_ordered_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("corpus", "bm25"):
        (tmp_path / folder).mkdir()
    rows = (b'{"id":%d,"contents":"same words"}' % number for number in range(12))
    corpus = write_corpus(tmp_path / "corpus", (Passage.from_row(row) for row in rows))
    progress: list[int] = []
    monkeypatch.setattr(bm25, "_PROGRESS_PASSAGES", 5)
    bm25.build_bm25_index(tmp_path / "bm25", corpus, progress.append)
    hits = Bm25Index(tmp_path / "bm25", corpus.columns).search(["same words"], 5)[0]
    assert [hit.row for hit in hits] == [0, 1, 2, 3, 4]
    assert progress == [5, 10, 12]


def test_a_damaged_index_names_its_folder(tmp_path: Path, texts: Corpus) -> None:
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(UserError, match=f"{tmp_path} cannot be read.*delete this folder"):
        Bm25Index(tmp_path, texts.columns)
