"""Progress of a build: bars on a terminal, lines elsewhere, log lines in a service; with place, rate and time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from forage_runtime.telemetry.logs import get_logger
from forage_runtime.text.console import TextConsole

LOG_INTERVAL_S = 2.0
RATE_S = 60.0
"""Time over which a rate is measured: long passages, or another process, make the rate of an hour ago a wrong one."""


class Report(Protocol):
    """Receives progress: the stage, the items done, and their total where it is known.

    A stage with nothing done and no total is a sentence for the user.
    """

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


def number_stages(report: Report, stages: Sequence[str]) -> Report:
    """A report that puts the place of a stage among all stages of a build behind its name."""
    names = {stage: f"{stage} ({place} of {len(stages)})" for place, stage in enumerate(stages, 1)}

    def numbered(stage: str, done: int, total: int | None) -> None:
        report(names.get(stage, stage), done, total)

    return numbered


class Rate:
    """Items per second over the last minute of a stage."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, done: int, now: float) -> None:
        """Note how many items are done at a time, in seconds."""
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()
        if len(self._seen) < 2 or now - self._seen[-2][0] >= 1:
            self._seen.append((now, done))
        else:
            self._seen[-1] = now, done
        while len(self._seen) > 2 and now - self._seen[1][0] >= RATE_S:
            self._seen.popleft()

    @property
    def per_s(self) -> float:
        """Items per second; 0 where it is not known yet."""
        (begin, first), (end, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end - begin) if end > begin else 0.0

    def estimate_left_s(self, total: int | None) -> int | None:
        """Seconds until `total` items are done; None where that is not known."""
        per_s = self.per_s
        return round((total - self._seen[-1][1]) / per_s) if total is not None and per_s else None


class LogReport:
    """Logs a line every two seconds and at the end of a stage; `show` gets every report as a sentence."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._last: dict[str, tuple[float, int]] = {}
        self._rates: dict[str, Rate] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        logged, before = self._last.get(stage, (now, -1))
        if done == before:
            return
        rate = self._rates.setdefault(stage, Rate())
        rate.add(done, now)
        left_s = rate.estimate_left_s(total)
        self._show(_format_progress(stage, done, total, left_s))
        if not done and total is None:
            self._note(stage, done, total, rate)
        elif now - logged >= LOG_INTERVAL_S or done == total:
            logged = now
            self._note(stage, done, total, rate)
        self._last[stage] = logged, done

    def _note(self, stage: str, done: int, total: int | None, rate: Rate) -> None:
        """Log a stage that begins, or how far it is."""
        figures = {"done": done, "of": total, "per_s": round(rate.per_s), "left_s": rate.estimate_left_s(total)}
        get_logger().info("index_progress", stage=stage, **(figures if done or total is not None else {}))


class LineReport(LogReport):
    """Prints a line as often as `LogReport` logs one, for people."""

    def __init__(self, console: Console) -> None:
        super().__init__(lambda sentence: None)
        self._console = console

    def _note(self, stage: str, done: int, total: int | None, rate: Rate) -> None:
        sentence = _format_progress(stage, done, total, rate.estimate_left_s(total) if done != total else None)
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)


class BarReport:
    """Shows a bar for each stage on a terminal."""

    def __init__(self, console: Console) -> None:
        fields = (TextColumn(f"{{task.fields[{name}]}}") for name in ("count", "rate", "left"))
        self._bars = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), *fields, console=console, expand=False
        )
        self._tasks: dict[str, TaskID] = {}
        self._rates: dict[str, Rate] = {}
        self._begun: dict[str, float] = {}

    def __enter__(self) -> BarReport:
        self._bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if not done and total is None:
            self._bars.console.print(stage, markup=False, highlight=False)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, count="", rate="", left="")
            self._rates[stage], self._begun[stage] = Rate(), now
        rate = self._rates[stage]
        rate.add(done, now)
        if done == total:
            left = f"took {format_seconds(now - self._begun[stage])}"
        else:
            left_s = rate.estimate_left_s(total)
            left = f"{format_seconds(left_s)} left" if left_s is not None else ""
        count = f"{done:,}" if total is None else f"{done:,} of {total:,}"
        task, per_s = self._tasks[stage], f"{rate.per_s:,.0f}/s"
        self._bars.update(task, completed=done, total=total, count=count, rate=per_s, left=left)


@contextmanager
def open_report() -> Iterator[Report]:
    """A report: bars where standard error is a terminal, lines elsewhere. Says on Ctrl-C that work is kept."""
    console = TextConsole(stderr=True)
    try:
        if console.is_terminal:
            with BarReport(console) as bars:
                yield bars
        else:
            yield LineReport(console)
    except KeyboardInterrupt:
        console.print("stopped: the same command resumes from here", markup=False)
        raise


def format_seconds(seconds: float) -> str:
    """A duration in its two greatest units: "2 h 3 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _format_progress(stage: str, done: int, total: int | None, left_s: int | None) -> str:
    count = f"{done}" if total is None else f"{done} of {total}"
    return (f"{stage}: {count}" if done else stage) + (f", {left_s} s left" if left_s is not None else "")
