"""Reranking by an endpoint, and when the reranker fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from tei_server import Server, serve_tei

from forage_retriever.corpus.store import Corpus
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.hits import Filters, Hit
from forage_retriever.search import rerank
from forage_retriever.search.rerank import FAILURES, RemoteReranker, RerankedSearcher
from forage_runtime.settings import RerankSettings, RetrieverSettings


class InFileOrder:
    """Finds the first passages of the corpus for any query; none for an empty one."""

    def __init__(self, corpus: Corpus) -> None:
        self.count = len(corpus)
        self.asked: list[tuple[int, Filters]] = []

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        self.asked.append((topk, filters))
        return [[Hit(row, 1 - row / 10) for row in range(min(topk, self.count))] if query else [] for query in queries]


@pytest.fixture
def server(encoder: Encoder) -> Iterator[Server]:
    def score_by_meaning(query: str, texts: Sequence[str]) -> list[float]:
        vectors = encoder.encode_queries([query, *texts])
        return [float(score) for score in vectors[1:] @ vectors[0]]

    with serve_tei(encoder, score_by_meaning) as server:
        yield server


def test_settings_name_one_reranker_or_none() -> None:
    assert rerank.load_reranker(RetrieverSettings()) is None


def test_an_endpoint_reranks_the_best_hits_above_the_others(texts: Corpus, server: Server) -> None:
    searcher = InFileOrder(texts)
    reranker = rerank.load_reranker(RetrieverSettings(rerank=RerankSettings(model=server.url)))
    assert isinstance(reranker, RemoteReranker)
    reranked = RerankedSearcher(searcher, texts, reranker, depth=4)
    filters = (("lang", ("nb",)),)
    best, nothing = reranked.search(["a town in Sri Lanka", ""], 2, filters)
    assert [texts.ids[hit.row] for hit in best] == ["k", "7"]
    assert nothing == []
    assert searcher.asked == [(4, filters)]
    (deep,) = reranked.search(["a town in Sri Lanka"], 6)
    assert deep[:2] == best
    assert [hit.row for hit in deep[4:]] == [4, 5]
    assert sorted(hit.row for hit in deep) == list(range(6))
    scores = [hit.score for hit in deep]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("failure", [500, 200, 0])
def test_a_failing_reranker_keeps_the_order_and_is_counted(texts: Corpus, server: Server, failure: int) -> None:
    reranked = RerankedSearcher(InFileOrder(texts), texts, RemoteReranker(server.url, timeout_s=0.3), depth=4)
    server.failures = [failure] * 50
    before = FAILURES._value.get()
    rankings = reranked.search(["a town in Sri Lanka", "", "Norwegian money"], 3)
    assert [[hit.row for hit in hits] for hits in rankings] == [[0, 1, 2], [], [0, 1, 2]]
    assert FAILURES._value.get() == before + 2
    server.failures = []
    assert np.isfinite([hit.score for hit in rankings[0]]).all()
