"""Redis: whether the books are kept, by what redis_exporter says."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from forage_dashboards.board import HALF, NEUTRAL, RED, YELLOW, Board, Query, Step
from forage_dashboards.queries import INSTANCE as S


def dashboard() -> Dashboard:
    """The page for who runs Redis. Empty where no exporter runs (the chart's redis.exporter.enabled)."""
    board = Board(
        "redis", "Redis", "The streams and the ledger are here: it must be up, on disk, and not full.", "redis"
    )
    board.value(
        "Up", "1 where the exporter reaches Redis.", "none", S.gauge("redis_up", how="min"), Step(1, "green"), base=RED
    )
    board.value(
        "Written to disk",
        "1 where the append-only file is on and its last write went well. Without it a restart loses work.",
        "none",
        f"min({S.series('redis_aof_enabled')} * {S.series('redis_aof_last_write_status')})",
        Step(1, "green"),
        base=RED,
    )
    board.value(
        "Memory",
        "In use. A full Redis refuses writes, for nothing may be evicted.",
        "bytes",
        S.gauge("redis_memory_used_bytes"),
        base=NEUTRAL,
    )
    board.value(
        "Evicted keys",
        "Must stay 0: streams and the ledger are the books of the run.",
        "none",
        S.gauge("redis_evicted_keys_total", how="sum"),
        Step(1, RED),
    )
    board.value("Commands", "A second.", "ops", S.rate("redis_commands_processed_total"), base=NEUTRAL)
    board.value(
        "Up since",
        "Time since its start.",
        "s",
        S.gauge("redis_uptime_in_seconds", how="min"),
        Step(300, "green"),
        base=YELLOW,
    )

    board.row("Load")
    board.lines(
        "Commands",
        "A second, the busiest ten. XREADGROUP waits on purpose.",
        "ops",
        Query(f"topk(10, {S.rate('redis_commands_total', by='cmd')})", "{{cmd}}"),
        least=0,
    )
    board.lines(
        "Time of a command",
        "Mean, of the ten that take longest. With every write on disk before its reply, this is the disk.",
        "s",
        Query(
            f"topk(10, {S.rate('redis_commands_duration_seconds_total', by='cmd')}"
            f" / ({S.rate('redis_commands_total', by='cmd')} > 0))",
            "{{cmd}}",
        ),
        least=0,
    )
    board.lines(
        "Connections",
        "Open, waiting for an entry of a stream, and refused.",
        "none",
        Query(S.gauge("redis_connected_clients", how="sum"), "open"),
        Query(S.gauge("redis_blocked_clients", how="sum"), "waiting"),
        Query(S.gauge("redis_rejected_connections_total", how="sum"), "refused"),
        least=0,
    )
    board.lines(
        "Network",
        "Bytes a second.",
        "Bps",
        Query(S.rate("redis_net_input_bytes_total"), "in"),
        Query(S.rate("redis_net_output_bytes_total"), "out"),
        least=0,
    )
    board.lines(
        "Slow log",
        "Entries. Above a few, look with SLOWLOG GET.",
        "none",
        Query(S.gauge("redis_slowlog_length"), "entries"),
        least=0,
    )
    board.lines(
        "Keys", "By database.", "none", Query(S.gauge("redis_db_keys", by="db", where='db="db0"'), "{{db}}"), least=0
    )

    board.row("Memory and disk")
    board.lines(
        "Memory",
        "In use and allowed (0 = no limit).",
        "bytes",
        Query(S.gauge("redis_memory_used_bytes"), "in use"),
        Query(S.gauge("redis_memory_max_bytes"), "allowed"),
        least=0,
        width=HALF,
    )
    board.lines(
        "Append-only file",
        "Its size; it shrinks when it is rewritten.",
        "bytes",
        Query(S.gauge("redis_aof_current_size_bytes"), "size"),
        least=0,
        width=HALF,
    )
    board.lines(
        "Rewrites",
        "1 while the file is rewritten, and 1 where the last rewrite went well.",
        "none",
        Query(S.gauge("redis_aof_rewrite_in_progress"), "under way"),
        Query(S.gauge("redis_aof_last_bgrewrite_status", how="min"), "last went well"),
        least=0,
        width=HALF,
    )
    board.lines(
        "Last fork",
        "Time that Redis stood still to start a rewrite.",
        "s",
        Query(S.gauge("redis_latest_fork_seconds"), "fork"),
        least=0,
        width=HALF,
    )
    return board.build()
