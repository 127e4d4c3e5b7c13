"""Progress of a build: bars on a terminal, log lines elsewhere; both with rate and remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from forage_common.telemetry.logs import get_logger
from forage_common.text.console import TextConsole

LOG_INTERVAL_S = 2.0


class Report(Protocol):
    """Receives progress: the stage, the items done, and their total where it is known."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


class LogReport:
    """Logs a line every two seconds and at the end of a stage; `show` gets every report as a sentence."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._stage = ""
        self._done = 0
        self._begin = self._last = self._first = 0.0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if (stage, done) == (self._stage, self._done):
            return
        if stage != self._stage:
            self._stage, self._begin, self._first, self._last = stage, now, done, now
        self._done = done
        rate = (done - self._first) / max(now - self._begin, 1e-9)
        left_s = round((total - done) / rate) if total is not None and rate else None
        self._show(_format_progress(stage, done, total, left_s))
        if now - self._last >= LOG_INTERVAL_S or done == total:
            self._last = now
            get_logger().info("index_progress", stage=stage, done=done, of=total, per_s=round(rate), left_s=left_s)


class BarReport:
    """Shows a bar for each stage on a terminal."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[count]}"))
        rate = TextColumn("{task.fields[rate]}")
        self._bars = Progress(*columns, rate, TimeRemainingColumn(elapsed_when_finished=True), console=console)
        self._tasks: dict[str, TaskID] = {}
        self._begun: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> BarReport:
        self._bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, count="", rate="")
            self._begun[stage] = now, done
        begin, first = self._begun[stage]
        rate = (done - first) / max(now - begin, 1e-9)
        count = f"{done:,}" if total is None else f"{done:,} of {total:,}"
        self._bars.update(self._tasks[stage], completed=done, total=total, count=count, rate=f"{rate:,.0f}/s")


@contextmanager
def open_report() -> Iterator[Report]:
    """A report: bars where standard error is a terminal, log lines elsewhere. Says on Ctrl-C that work is kept."""
    console = TextConsole(stderr=True)
    try:
        if console.is_terminal:
            with BarReport(console) as bars:
                yield bars
        else:
            yield LogReport(lambda sentence: None)
    except KeyboardInterrupt:
        console.print("stopped: the same command resumes from here", markup=False)
        raise


def _format_progress(stage: str, done: int, total: int | None, left_s: int | None) -> str:
    count = f"{done}" if total is None else f"{done} of {total}"
    return (f"{stage}: {count}" if done else stage) + (f", {left_s} s left" if left_s is not None else "")
