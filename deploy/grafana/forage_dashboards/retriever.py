"""The retriever dashboard: latency, load, errors, and the index."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from forage_dashboards.board import NEUTRAL, RED, YELLOW, DashboardBuilder, Query, Step
from forage_dashboards.process import add_process_row
from forage_dashboards.queries import INSTANCE as S
from forage_dashboards.queries import compute_ratio

_SERVER_ERRORS = 'code=~"5..|UNAVAILABLE|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED|INTERNAL"'
_ERRORS = compute_ratio(
    f"{S.compute_rate('forage_retriever_requests_total', where=_SERVER_ERRORS)} or vector(0)",
    S.compute_rate("forage_retriever_requests_total"),
)
_HITS = compute_ratio(
    S.compute_rate("forage_retriever_queries_total", where='cache="hit"'),
    S.compute_rate("forage_retriever_queries_total"),
)


def build_dashboard() -> Dashboard:
    """Build the dashboard of the retriever."""
    board = DashboardBuilder("retriever", "Retriever", "Searches: latency, load, and the index.", job="retriever")
    board.add_stat(
        "Latency, p99",
        "99 % of requests are answered within this time. Every search turn of a trajectory waits for it.",
        "s",
        S.compute_quantile(0.99, "forage_retriever_request_seconds"),
        Step(0.3, YELLOW),
        Step(1, RED),
    )
    board.add_stat(
        "Requests",
        "Requests per second, including refused ones.",
        "reqps",
        S.compute_rate("forage_retriever_requests_total"),
        base=NEUTRAL,
    )
    board.add_stat(
        "Errors",
        "Share of requests that were refused, timed out or failed, without errors of the caller.",
        "percentunit",
        _ERRORS,
        Step(0.01, YELLOW),
        Step(0.05, RED),
    )
    board.add_stat(
        "Queue", "Waiting queries.", "none", S.aggregate("forage_retriever_waiting_queries", how="sum"), base=NEUTRAL
    )
    board.add_stat("Cache hits", "Share of queries answered from the cache.", "percentunit", _HITS, base=NEUTRAL)
    board.add_label(
        "Index",
        "Digest of the index that is searched; two of them while replicas load a new one.",
        S.aggregate("forage_retriever_index_info", by="index, mode", how="count"),
        "index",
    )

    board.add_row("Latency")
    board.add_timeseries(
        "Requests",
        "Time to answer all queries of a request, including queueing and cache lookups.",
        "s",
        *(Query(S.compute_quantile(q, "forage_retriever_request_seconds"), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)),
        steps=(Step(1, RED),),
        minimum=0,
    )
    board.add_heatmap(
        "Distribution of latency",
        "Requests per second by latency.",
        "s",
        S.compute_rate("forage_retriever_request_seconds_bucket", by="le"),
    )
    board.add_timeseries(
        "Search of a batch",
        "Time in the index alone. The rest of a request's time is spent in the queue.",
        "s",
        *(Query(S.compute_quantile(q, "forage_retriever_search_seconds"), f"p{q * 100:g}") for q in (0.5, 0.99)),
        minimum=0,
    )

    board.add_row("Load")
    board.add_timeseries(
        "Requests by outcome",
        "Requests per second by transport and code.",
        "reqps",
        Query(S.compute_rate("forage_retriever_requests_total", by="transport, code"), "{{transport}} {{code}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Queries",
        "Queries per second, from the cache or searched.",
        "suffix: queries/s",
        Query(S.compute_rate("forage_retriever_queries_total", by="cache"), "{{cache}}"),
        stacked=True,
        minimum=0,
    )
    board.add_timeseries(
        "Batch",
        "Queries searched together: mean and p99. Batches grow with the load.",
        "none",
        Query(S.compute_mean("forage_retriever_batch_queries"), "mean"),
        Query(S.compute_quantile(0.99, "forage_retriever_batch_queries"), "p99"),
        minimum=0,
    )
    board.add_timeseries(
        "Queue",
        "Waiting queries by instance.",
        "none",
        Query(S.aggregate("forage_retriever_waiting_queries", by="instance"), "{{instance}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Refused and failed",
        "Per second: queries refused by a full queue, requests that timed out, failed searches, and queries answered "
        "without reranking.",
        "cps",
        Query(S.compute_rate("forage_retriever_shed_queries_total"), "queue full"),
        Query(S.compute_rate("forage_retriever_timeouts_total"), "timeout"),
        Query(S.compute_rate("forage_retriever_search_failures_total"), "failed"),
        Query(S.compute_rate("forage_retriever_rerank_failures_total"), "not reranked"),
        minimum=0,
    )
    board.add_timeseries(
        "Cache",
        "Cached results by instance. A new index resets the cache.",
        "none",
        Query(S.aggregate("forage_retriever_cache_entries", by="instance"), "{{instance}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Memory of the cache",
        "Bytes of cached results by instance, at most retriever.cache_bytes. Many evictions: raise it.",
        "bytes",
        Query(S.aggregate("forage_retriever_cache_bytes", by="instance"), "{{instance}}"),
        Query(S.compute_rate("forage_retriever_cache_evictions_total"), "evictions per second"),
        minimum=0,
    )

    board.add_row("Index")
    board.add_timeseries(
        "Index swaps",
        "In the selected time range: indexes swapped while serving, and new ones that could not be loaded.",
        "none",
        Query(S.compute_increase("forage_retriever_swaps_total"), "swapped"),
        Query(S.compute_increase("forage_retriever_swap_failures_total"), "failed"),
        minimum=0,
    )
    board.add_timeseries(
        "Shards",
        "1 when a shard responds. Empty without shards.",
        "none",
        Query(S.aggregate("forage_retriever_shard_up", by="shard", how="min"), "{{shard}}"),
        minimum=0,
        maximum=1,
    )
    board.add_timeseries(
        "Partial answers",
        "Per second: queries answered without one of the shards, and failed calls of a shard.",
        "cps",
        Query(S.compute_rate("forage_retriever_partial_queries_total"), "partial"),
        Query(f"{S.compute_rate('forage_retriever_shard_failures_total')} or vector(0)", "shard failures"),
        minimum=0,
    )
    board.add_timeseries(
        "Reranking",
        "Time to score the passages of a batch of queries. Empty without a reranker.",
        "s",
        *(Query(S.compute_quantile(q, "forage_retriever_rerank_seconds"), f"p{q * 100:g}") for q in (0.5, 0.99)),
        minimum=0,
    )
    add_process_row(board, "retriever")
    return board.build()
