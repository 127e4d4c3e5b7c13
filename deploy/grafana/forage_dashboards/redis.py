"""The Redis dashboard: availability, durability, memory and load, from redis_exporter."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from forage_dashboards.board import HALF, NEUTRAL, RED, YELLOW, DashboardBuilder, Query, Step
from forage_dashboards.queries import INSTANCE as S


def build_dashboard() -> Dashboard:
    """Build the dashboard of Redis. It is empty without an exporter (redis.exporter.enabled of the chart)."""
    board = DashboardBuilder(
        "redis", "Redis", "Redis holds the streams and the ledger: it must be up, durable, and not full.", "redis"
    )
    board.add_stat(
        "Up",
        "1 when the exporter reaches Redis.",
        "none",
        S.aggregate("redis_up", how="min"),
        Step(1, "green"),
        base=RED,
    )
    board.add_stat(
        "Durable",
        "1 when the append-only file is enabled and its last write succeeded. Without it a restart loses work.",
        "none",
        f"min({S.select('redis_aof_enabled')} * {S.select('redis_aof_last_write_status')})",
        Step(1, "green"),
        base=RED,
    )
    board.add_stat(
        "Memory",
        "Memory in use. A full Redis refuses writes, because no key may be evicted.",
        "bytes",
        S.aggregate("redis_memory_used_bytes"),
        base=NEUTRAL,
    )
    board.add_stat(
        "Evicted keys",
        "Must stay 0: an evicted key loses a stream or the ledger.",
        "none",
        S.aggregate("redis_evicted_keys_total", how="sum"),
        Step(1, RED),
    )
    board.add_stat(
        "Commands", "Commands per second.", "ops", S.compute_rate("redis_commands_processed_total"), base=NEUTRAL
    )
    board.add_stat(
        "Uptime",
        "Time since the start.",
        "s",
        S.aggregate("redis_uptime_in_seconds", how="min"),
        Step(300, "green"),
        base=YELLOW,
    )

    board.add_row("Load")
    board.add_timeseries(
        "Commands",
        "Commands per second, the ten most frequent.",
        "ops",
        Query(f"topk(10, {S.compute_rate('redis_commands_total', by='cmd')})", "{{cmd}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Time per command",
        "Mean of the ten slowest commands. XREADGROUP blocks on purpose; writes include the sync to disk.",
        "s",
        Query(
            f"topk(10, {S.compute_rate('redis_commands_duration_seconds_total', by='cmd')}"
            f" / ({S.compute_rate('redis_commands_total', by='cmd')} > 0))",
            "{{cmd}}",
        ),
        minimum=0,
    )
    board.add_timeseries(
        "Connections",
        "Connections: open, blocked on a stream, and refused.",
        "none",
        Query(S.aggregate("redis_connected_clients", how="sum"), "open"),
        Query(S.aggregate("redis_blocked_clients", how="sum"), "blocked"),
        Query(S.aggregate("redis_rejected_connections_total", how="sum"), "refused"),
        minimum=0,
    )
    board.add_timeseries(
        "Network",
        "Bytes per second.",
        "Bps",
        Query(S.compute_rate("redis_net_input_bytes_total"), "in"),
        Query(S.compute_rate("redis_net_output_bytes_total"), "out"),
        minimum=0,
    )
    board.add_timeseries(
        "Keys",
        "Keys by database.",
        "none",
        Query(S.aggregate("redis_db_keys", by="db", where='db="db0"'), "{{db}}"),
        minimum=0,
    )

    board.add_row("Memory and disk")
    board.add_timeseries(
        "Memory",
        "Memory in use and its limit (0 = no limit).",
        "bytes",
        Query(S.aggregate("redis_memory_used_bytes"), "in use"),
        Query(S.aggregate("redis_memory_max_bytes"), "limit"),
        minimum=0,
        width=HALF,
    )
    board.add_timeseries(
        "Append-only file",
        "Size of the append-only file; a rewrite shrinks it.",
        "bytes",
        Query(S.aggregate("redis_aof_current_size_bytes"), "size"),
        minimum=0,
        width=HALF,
    )
    board.add_timeseries(
        "Rewrites",
        "1 while the file is being rewritten, and 1 when the last rewrite succeeded.",
        "none",
        Query(S.aggregate("redis_aof_rewrite_in_progress"), "in progress"),
        Query(S.aggregate("redis_aof_last_bgrewrite_status", how="min"), "last succeeded"),
        minimum=0,
        width=HALF,
    )
    board.add_timeseries(
        "Last fork",
        "Time that Redis was blocked to start a rewrite.",
        "s",
        Query(S.aggregate("redis_latest_fork_seconds"), "fork"),
        minimum=0,
        width=HALF,
    )
    return board.build()
