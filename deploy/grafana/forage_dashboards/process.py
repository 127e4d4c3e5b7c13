"""The row of panels about the processes of a service."""

from __future__ import annotations

from forage_dashboards.board import DashboardBuilder, Query
from forage_dashboards.queries import INSTANCE as S


def add_process_row(board: DashboardBuilder, job: str) -> None:
    """Add a row about memory, CPU and reachability of a job's processes."""
    where = f'job="{job}"'
    board.add_row("Process")
    board.add_timeseries(
        "Memory",
        "Resident memory by instance.",
        "bytes",
        Query(S.aggregate("process_resident_memory_bytes", by="instance", where=where), "{{instance}}"),
        minimum=0,
    )
    board.add_timeseries(
        "CPU",
        "CPU cores in use by instance.",
        "none",
        Query(S.compute_rate("process_cpu_seconds_total", by="instance", where=where), "{{instance}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Up",
        "1 where Prometheus scrapes the instance.",
        "none",
        Query(S.aggregate("up", by="instance", where=where), "{{instance}}"),
        minimum=0,
        maximum=1,
    )
