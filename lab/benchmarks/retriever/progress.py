"""Progress of a benchmark on standard error: bars while it builds, one line with remaining time while it measures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from forage_retriever.index.progress import Report, open_report
from forage_runtime.telemetry.logs import configure_logs

_ESTIMATED_S = 600.0
"""Steps over which the remaining time is averaged: they are few and long."""


@contextmanager
def report_build() -> Iterator[Report]:
    """Open the progress report of a build."""
    configure_logs("bench")
    with open_report() as report:
        yield report


class Steps:
    """Shows consecutive steps; without a terminal, a line each."""

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True)
        columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(
            *columns,
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            speed_estimate_period=_ESTIMATED_S,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)
        self._doing = ""

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def begin(self, doing: str) -> None:
        """Begin the next step; the one before is done."""
        if self._doing:
            self._bar.advance(self._task)
        self._doing = doing
        self.show("")
        if not self._console.is_terminal:
            self._console.print(doing, markup=False, highlight=False)

    def show(self, detail: str) -> None:
        """Show the progress of the current step."""
        self._bar.update(self._task, description=f"{self._doing}: {detail}" if detail else self._doing)
