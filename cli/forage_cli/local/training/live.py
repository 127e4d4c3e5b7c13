"""The live view of a run: services, progress, the last steps, the learning curve, time left."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forage_cli.local.run_watch import ServiceStatus
from forage_cli.local.stack import Program
from forage_records.run_folder import Row, RunFolder, estimate_time_left
from forage_records.statistics import mean_known

_SPARK = "▁▂▃▄▅▆▇█"
_SHOWN_STEPS = 8
_GOOD, _WAITING, _BAD = ("●", "green"), ("○", "yellow"), ("✗", "red")
"""Mark and colour of a service's line: without colours the mark says the same."""
_MARKS = {"ready": _GOOD, "done": _GOOD, "starting": _WAITING, "not ready": _WAITING, "slow": _WAITING}
"""By state; any other one is bad."""

COLUMNS = {
    "step": ("step", "{:.0f}"),
    "reward": ("reward_mean", "{:.3f}"),
    "EM": ("em_mean", "{:.3f}"),
    "search rate": ("search_rate", "{:.2f}"),
    "format rate": ("format_rate", "{:.2f}"),
    "staleness": ("staleness_mean", "{:.2f}"),
    "logprob diff": ("logprob_diff_mean", "{:.1e}"),
    "canary": ("canary_diff", "{:.1e}"),
    "KL": ("kl_ref", "{:.4f}"),
    "tokens/s": ("tokens_per_s", "{:.0f}"),
}


def draw_sparkline(values: Sequence[float | None], width: int = 60) -> str:
    """Draw values in 0..1 as one line of block characters, the newest on the right; unknown ones are gaps."""
    if len(values) > width:
        size = len(values) / width
        values = [mean_known(values[int(i * size) : max(int(i * size) + 1, int((i + 1) * size))]) for i in range(width)]
    return "".join(" " if value is None else _SPARK[min(7, max(0, int(value * 8)))] for value in values)


def format_duration(seconds: float | None) -> str:
    """Format seconds as "4 min 05 s"; None as "…"."""
    if seconds is None:
        return "…"
    minutes, rest = divmod(int(max(0, seconds)), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class LiveView:
    """Renders a run from its folder, and its services; the caller sets `statuses`, of `Watch`."""

    def __init__(self, run: RunFolder, total_steps: int, started: float, console_url: str = "") -> None:
        """
        Args:
            console_url: where the console is, if there is one.
        """
        self._run = run
        self._console_url = console_url
        self._total = total_steps
        self._started = started
        self.statuses: Mapping[Program, ServiceStatus] = {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        steps, progress = self._run.read_steps(), self._run.read_progress()
        done = int(steps[-1]["step"]) if steps else 0
        left = estimate_time_left(steps, self._total, progress.phase)
        header = Table.grid(expand=True, padding=(0, 2))
        header.add_column(ratio=1)
        header.add_column(justify="right")
        doing = progress.detail or progress.phase
        if progress.total and progress.phase == "validating":
            doing += f"  {progress.done}/{progress.total}"
        header.add_row(
            Text(doing, style="bold"),
            f"elapsed {format_duration(time.time() - self._started)} · left {format_duration(left)}",
        )
        header.add_row(ProgressBar(total=self._total, completed=done), f"step {done}/{self._total}")
        table = Table(box=None, expand=True, header_style="dim")
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for row in steps[-_SHOWN_STEPS:]:
            table.add_row(*(_format_cell(row.get(key), form) for key, form in COLUMNS.values()))
        parts: list[RenderableType] = [header, Text(""), self._services(), Text(""), table]
        if steps:
            em = [row.get("em_mean") for row in steps]
            last = "–" if em[-1] is None else f"{em[-1]:.2f}"
            parts += [Text(""), Text(f"EM of sampled answers  {draw_sparkline(em)}  {last}")]
        before = self._run.read_validation("before")
        if before is not None and before.get("em") is not None:
            parts.append(Text(f"greedy test EM before training: {before['em']:.3f}"))
        if self._console_url:
            parts += [Text(""), Text(f"console  {self._console_url}")]
        yield Panel(Group(*parts), title="forage", subtitle=Text(str(self._run.path)), border_style="dim")

    def _services(self) -> Table:
        """A line for each service, cut where the terminal ends."""
        table = Table.grid()
        table.add_column(no_wrap=True, overflow="ellipsis")
        for program, status in self.statuses.items():
            table.add_row(_render_status(program, status))
        return table


def _render_status(program: Program, status: ServiceStatus) -> Text:
    """The state of a service, what it waits for, since when, and its restarts."""
    mark, style = _MARKS.get(status.state, _BAD)
    state = " ".join(f"{status.state}: {status.detail}".split()) if status.detail else status.state
    parts = [state, f"for {format_duration(time.monotonic() - status.since)}"]
    if status.restarts:
        parts.append("restarted once" if status.restarts == 1 else f"restarted {status.restarts} times")
    return Text.assemble((f"{mark} ", style), f"{program:<10}", (" · ".join(parts), "" if style == "green" else style))


def format_step(row: Row, total: int) -> str:
    """Format a step as a line of text, for output that is no terminal."""
    cells = [f"{name} {_format_cell(row.get(key), form)}" for name, (key, form) in COLUMNS.items() if name != "step"]
    return f"step {row['step']}/{total}  " + "  ".join(cells)


def _format_cell(value: object, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else "–"
