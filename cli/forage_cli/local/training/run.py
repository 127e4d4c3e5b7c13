"""A training run from its start to its report, with a live view: `forage train` and `forage demo`."""

from __future__ import annotations

import shutil
import time
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.live import Live

from forage_cli.local.console import find_url
from forage_cli.local.processes import ServiceDiedError, interrupt_on_signals
from forage_cli.local.run_watch import Watch
from forage_cli.local.serving import prepare_stack
from forage_cli.local.stack import TRAINING, Program, Stack, point_latest
from forage_cli.local.training.live import LiveView, format_step
from forage_cli.local.training.load import check_not_in_use
from forage_cli.reports import run_report as report
from forage_cli.runs.ledger import count_groups
from forage_cli.terminal import trajectories as show
from forage_queue.streams.client import StreamClient
from forage_records.run_folder import RunFolder
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings

POLL_INTERVAL_S = 0.5


def run_training(
    settings: Settings, console: Console, with_console: bool = True, remedy: str = "forage train --resume"
) -> report.Summary:
    """Train to the end and write the report. Ctrl-C stops every process; the run can be resumed.

    Args:
        remedy: the command that goes on with the run.

    Raises:
        UserError: a check before the start failed, another command runs this run, or a service found an error.
        ServiceDiedError: a service died too often.
    """
    check_not_in_use(settings)
    stack = prepare_stack(settings, TRAINING, console, with_console)
    settings = stack.settings
    folder = RunFolder(stack.folder)
    minutes_file = folder.path / "minutes"  # of the parts before an interruption
    started = time.time() - (float(minutes_file.read_text(encoding="utf-8")) * 60 if minutes_file.is_file() else 0.0)
    with interrupt_on_signals():
        try:
            stack.start()
            point_latest(settings)
            _watch_training(stack, folder, started, console)
            counts = count_groups(StreamClient(settings.redis, settings.run.id))
        except UserError:
            stack.stop()
            discard_empty_run(folder)
            raise
        except ServiceDiedError as error:
            raise ServiceDiedError(f"{error}\nthen go on with the run: {remedy}") from None
        except KeyboardInterrupt:
            minutes_file.write_text(f"{(time.time() - started) / 60:.3f}\n", encoding="utf-8")
            console.print(f"stopping …  (continue with [bold]{remedy}[/])", markup=True)
            raise
        finally:
            stack.stop()
    minutes = (time.time() - started) / 60
    summary = report.summarise(folder, settings, counts, stack.supervisor.restarts, minutes)
    page = report.write_report(folder, summary)
    print_summary(folder, summary, page, console)
    return summary


def discard_empty_run(folder: RunFolder) -> None:
    """Remove the folder of a run that a user's error ended before its first metrics."""
    if folder.read_steps() or folder.read_validation("before"):
        return
    latest = folder.path.parent / "latest"
    if latest.is_symlink() and latest.resolve() == folder.path.resolve():
        latest.unlink()
    shutil.rmtree(folder.path, ignore_errors=True)


def _watch_training(stack: Stack, folder: RunFolder, started: float, console: Console) -> None:
    total = stack.settings.trainer.total_training_steps
    console_url = find_url(stack.settings) if Program.CONSOLE in stack.programs else ""
    view = LiveView(folder, total, started, console_url)
    supervisor = stack.supervisor
    printed_steps, detail = len(folder.read_steps()), ""
    live = Live(view, console=console, refresh_per_second=2, transient=False) if console.is_terminal else nullcontext()
    with Watch(stack) as watch, live:
        while not supervisor.is_done(Program.TRAINER):
            watch.tick(lambda sentence: console.print(sentence, highlight=False, soft_wrap=True))
            view.statuses = watch.statuses
            if not console.is_terminal:
                progress = folder.read_progress()
                if progress.detail != detail:
                    detail = progress.detail
                    console.print(f"{progress.phase}: {detail}", highlight=False)
                steps = folder.read_steps()
                for row in steps[printed_steps:]:
                    console.print(format_step(row, total), highlight=False, soft_wrap=True)
                printed_steps = max(printed_steps, len(steps))
            time.sleep(POLL_INTERVAL_S)  # wait: pause between two looks


def print_summary(folder: RunFolder, summary: report.Summary, page: Path, console: Console) -> None:
    """Print what a finished run ends with: examples, the change of the exact match, counts, files."""
    seed = int(summary["seed"] or 0)
    for label in ("before", "after"):
        console.rule(f"{label} training")
        for row in report.select_examples(folder, label, seed):
            console.print(show.render_panel(row))
    console.print(report.describe_examples(folder, seed), style="dim", highlight=False)
    console.rule("the run")
    before, after = (_format_em(summary[name]) for name in ("em_before", "em_after"))
    console.print(f"greedy test EM  {before} → [bold]{after}[/]   ", highlight=False, markup=True)
    console.print(
        f"{summary['steps']} steps in {summary['minutes']} min · groups issued {summary['groups_issued']}, trained on "
        f"{summary['groups_trained']}, lost {summary['groups_lost']}, twice {summary['groups_duplicated']} · "
        f"restarts {summary['restarts']}",
        highlight=False,
    )
    console.print(f"report  {page}\ncurve   {folder.path / 'curve.png'}\nsummary {folder.path / 'summary.json'}")
    console.print("look at it again in a browser: [bold]forage console[/]", highlight=False, markup=True)


def _format_em(em: object) -> str:
    """Exact match with three digits; a dash without the validation (trainer.val_before_train=false)."""
    return f"{em:.3f}" if isinstance(em, int | float) else "–"
