"""Retriever: how fast it answers, what it turns away, and what it searches."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from forage_dashboards.board import NEUTRAL, RED, YELLOW, Board, Query, Step
from forage_dashboards.process import process
from forage_dashboards.queries import INSTANCE as S
from forage_dashboards.queries import share

_OURS = 'code=~"5..|UNAVAILABLE|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED|INTERNAL"'
_ERRORS = share(
    f"{S.rate('forage_retriever_requests_total', where=_OURS)} or vector(0)", S.rate("forage_retriever_requests_total")
)
_HITS = share(S.rate("forage_retriever_queries_total", where='cache="hit"'), S.rate("forage_retriever_queries_total"))


def dashboard() -> Dashboard:
    """The page for who runs the index."""
    board = Board("retriever", "Retriever", "Searches: how fast, how many, over which index.", job="retriever")
    board.value(
        "Latency, p99",
        "One request of a hundred takes longer. Every turn of a trajectory waits for its search.",
        "s",
        S.quantile(0.99, "forage_retriever_request_seconds"),
        Step(0.3, YELLOW),
        Step(1, RED),
    )
    board.value(
        "Requests",
        "Answered, refused ones included, a second.",
        "reqps",
        S.rate("forage_retriever_requests_total"),
        base=NEUTRAL,
    )
    board.value(
        "Errors",
        "Share of requests that were turned away, timed out or failed; a caller's own mistakes are not in it.",
        "percentunit",
        _ERRORS,
        Step(0.01, YELLOW),
        Step(0.05, RED),
    )
    board.value(
        "Queue", "Queries that wait.", "none", S.gauge("forage_retriever_waiting_queries", how="sum"), base=NEUTRAL
    )
    board.value("Cache hits", "Share of queries answered from the cache.", "percentunit", _HITS, base=NEUTRAL)
    board.text(
        "Index",
        "Digest of the index that is searched; two of them while replicas exchange theirs.",
        S.gauge("forage_retriever_index_info", by="index, mode", how="count"),
        "index",
    )

    board.row("Latency")
    board.lines(
        "Requests",
        "Time to answer all queries of a request, in the queue or from the cache included.",
        "s",
        *(Query(S.quantile(q, "forage_retriever_request_seconds"), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)),
        steps=(Step(1, RED),),
        least=0,
    )
    board.heat(
        "Requests, all",
        "Requests a second by the time they took.",
        "s",
        S.rate("forage_retriever_request_seconds_bucket", by="le"),
    )
    board.lines(
        "Search of a batch",
        "Time in the index alone. The difference to a request's time is the queue.",
        "s",
        *(Query(S.quantile(q, "forage_retriever_search_seconds"), f"p{q * 100:g}") for q in (0.5, 0.99)),
        least=0,
    )

    board.row("Load")
    board.lines(
        "Requests by outcome",
        "A second, by transport and code.",
        "reqps",
        Query(S.rate("forage_retriever_requests_total", by="transport, code"), "{{transport}} {{code}}"),
        least=0,
    )
    board.lines(
        "Queries",
        "A second, from the cache or searched.",
        "suffix: queries/s",
        Query(S.rate("forage_retriever_queries_total", by="cache"), "{{cache}}"),
        stacked=True,
        least=0,
    )
    board.lines(
        "Batch",
        "Queries searched together: mean and p99. Batches grow with load, which is what makes load bearable.",
        "none",
        Query(S.mean("forage_retriever_batch_queries"), "mean"),
        Query(S.quantile(0.99, "forage_retriever_batch_queries"), "p99"),
        least=0,
    )
    board.lines(
        "Queue",
        "Queries that wait, by instance.",
        "none",
        Query(S.gauge("forage_retriever_waiting_queries", by="instance"), "{{instance}}"),
        least=0,
    )
    board.lines(
        "Turned away",
        "A second: queries for which the queue had no room, requests given up after their time, searches that raised, "
        "queries answered in the order before reranking.",
        "cps",
        Query(S.rate("forage_retriever_shed_queries_total"), "no room"),
        Query(S.rate("forage_retriever_timeouts_total"), "timeout"),
        Query(S.rate("forage_retriever_search_failures_total"), "failed"),
        Query(S.rate("forage_retriever_rerank_failures_total"), "not reranked"),
        least=0,
    )
    board.lines(
        "Cache",
        "Results that it holds, by instance. It is emptied when the index is exchanged.",
        "none",
        Query(S.gauge("forage_retriever_cache_entries", by="instance"), "{{instance}}"),
        least=0,
    )

    board.row("Index")
    board.lines(
        "Exchanges",
        "In the time shown: indexes exchanged while serving, and new ones that could not be loaded.",
        "none",
        Query(S.grown("forage_retriever_swaps_total"), "exchanged"),
        Query(S.grown("forage_retriever_swap_failures_total"), "failed"),
        least=0,
    )
    board.lines(
        "Shards",
        "1 where a shard answers; only a retriever that merges shards has any.",
        "none",
        Query(S.gauge("forage_retriever_shard_up", by="shard", how="min"), "{{shard}}"),
        least=0,
        most=1,
    )
    board.lines(
        "Partial answers",
        "A second: queries answered without one of the shards, and calls that a shard did not answer.",
        "cps",
        Query(S.rate("forage_retriever_partial_queries_total"), "partial"),
        Query(f"{S.rate('forage_retriever_shard_failures_total')} or vector(0)", "shard failures"),
        least=0,
    )
    board.lines(
        "Reranking",
        "Time to score the passages of a batch of queries, where a reranker is set.",
        "s",
        *(Query(S.quantile(q, "forage_retriever_rerank_seconds"), f"p{q * 100:g}") for q in (0.5, 0.99)),
        least=0,
    )
    process(board, "retriever")
    return board.build()
