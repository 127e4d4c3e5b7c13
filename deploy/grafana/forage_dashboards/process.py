"""What is the same of every service that is one process."""

from __future__ import annotations

from forage_dashboards.board import Board, Query
from forage_dashboards.queries import INSTANCE as S


def process(board: Board, job: str) -> None:
    """A row about memory, processor and readiness of a job's processes."""
    where = f'job="{job}"'
    board.row("Process")
    board.lines(
        "Memory",
        "Resident, of each instance.",
        "bytes",
        Query(S.gauge("process_resident_memory_bytes", by="instance", where=where), "{{instance}}"),
        least=0,
    )
    board.lines(
        "Processor",
        "Cores in use by each instance.",
        "none",
        Query(S.rate("process_cpu_seconds_total", by="instance", where=where), "{{instance}}"),
        least=0,
    )
    board.lines(
        "Up",
        "1 where Prometheus reaches the instance.",
        "none",
        Query(S.gauge("up", by="instance", where=where), "{{instance}}"),
        least=0,
        most=1,
    )
