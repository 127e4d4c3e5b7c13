"""What a person should know about a run: sentences from its metrics, settings and the age of its files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import groupby

from forage_console.models.runs import RunRow, RunState, Warning
from forage_console.reading.metrics import StepMetrics
from forage_records.run_settings import RunSettings
from forage_records.statistics import mean_known

_RECENT = 20
_QUIET_S = 120.0
"""A run that takes no step for so long, or for five of its steps, makes no progress."""
_MOST_IDLE, _MOST_FAILED, _MOST_UNUSED, _MOST_TRUNCATED = 0.6, 0.05, 0.5, 0.2
_BATCH = "data.train_batch_size"
_ORDER = ("error", "warning", "info")


def list_warnings(row: RunRow, metrics: StepMetrics, settings: RunSettings, problems: Iterable[str]) -> list[Warning]:
    """List the warnings of a run, the worst first."""
    found = [Warning(severity="error", text=problem, step=None) for problem in problems]
    found += _judge_progress(row, metrics)
    if metrics.steps:
        found += _judge_guards(metrics)
        found += _judge_numbers(metrics, settings)
        found += _judge_trajectories(metrics, settings)
        found += _judge_time(metrics, settings)
    return sorted(found, key=lambda warning: _ORDER.index(warning.severity))


def _judge_progress(row: RunRow, metrics: StepMetrics) -> Iterator[Warning]:
    now = time.time()
    last = metrics.time[-1] if metrics.steps else row.started
    if row.state is RunState.STOPPED and row.updated is not None:
        where = f"at step {row.step}" + (f" of {row.total_steps}" if row.total_steps else "")
        text = f"nothing was written for {_say(now - row.updated)}: the run is stopped {where}; "
        yield Warning(
            severity="warning", text=text + "'forage demo --resume' or its trainer go on with it", step=row.step
        )
    elif row.state is RunState.RUNNING and row.progress.phase == "training" and last is not None and last == last:
        quiet, pace = now - last, _measure_pace(metrics)
        if quiet > max(_QUIET_S, 5 * pace):
            usual = f" (usually {_say(pace)})" if pace else ""
            text = f"no step for {_say(quiet)}{usual}: the page Health says what the trainer waits for"
            yield Warning(severity="warning", text=text, step=row.step)


def _judge_guards(metrics: StepMetrics) -> Iterator[Warning]:
    by_name = sorted(metrics.guards, key=lambda found: found[1])
    for name, found in groupby(by_name, key=lambda found: found[1]):
        steps = [step for step, _ in found]
        times = "" if len(steps) == 1 else f", {len(steps)} times since step {steps[0]}"
        what = (
            "was skipped, because a guard rolled the run back" if name == "skipped" else f"tripped the guard '{name}'"
        )
        yield Warning(severity="warning", text=f"step {steps[-1]} {what}{times}", step=steps[-1])


def _judge_numbers(metrics: StepMetrics, settings: RunSettings) -> Iterator[Warning]:
    last = metrics.steps[-1]
    groups = settings.read_number(_BATCH) or 0
    unused = sum(metrics.read_recent("dead_groups", 1) + metrics.read_recent("filtered_groups", 1))
    for name, what in (("loss", "loss"), ("grad_norm", "norm of the gradient")):
        is_known = name in metrics.columns and not metrics.read_recent(name, 1)
        if is_known and unused < groups and metrics.read_recent(name, len(metrics.steps)):
            yield Warning(severity="warning", text=f"the last step has no finite {what}", step=last)
    limit = settings.read_number("trainer.guards.thresholds.logprob")
    found = metrics.read_recent("logprob_diff_mean", 1)
    if limit is not None and found and found[0] > limit:
        text = f"log-probabilities of trainer and engine differ by {found[0]:.2g} under one policy, above {limit:g}"
        yield Warning(severity="warning", text=text, step=last)
    masked = _average(metrics, "is_masked")
    if masked is not None and masked > _MOST_TRUNCATED:
        text = f"{masked:.0%} of the tokens have no weight: trainer and engine differ too much on them"
        yield Warning(severity="warning", text=text, step=last)
    bound, staleness = settings.read_number("trainer.max_staleness"), _average(metrics, "staleness_mean")
    if bound and staleness is not None and staleness >= 0.9 * bound:
        text = (
            f"tokens are {staleness:.2g} versions old on average, which is the limit (trainer.max_staleness={bound:g})"
        )
        yield Warning(severity="info", text=text, step=last)


def _judge_trajectories(metrics: StepMetrics, settings: RunSettings) -> Iterator[Warning]:
    last = metrics.steps[-1]
    count = sum(metrics.read_recent("trajectories"))
    failed = sum(metrics.read_recent("failed"))
    if count and failed:
        severity = "warning" if failed / count > _MOST_FAILED else "info"
        text = f"{failed:.0f} of {count:.0f} trajectories of the last {_count_recent(metrics)} steps failed"
        yield Warning(severity=severity, text=text, step=last)
    unused = sum(metrics.read_recent("dead_groups")) + sum(metrics.read_recent("filtered_groups"))
    groups = (settings.read_number(_BATCH) or 0) * _count_recent(metrics)
    if unused:
        severity = "warning" if groups and unused / groups > _MOST_UNUSED else "info"
        of = f"{unused:.0f} of {groups:.0f}" if groups else f"{unused:.0f}"
        text = f"{of} groups of the last {_count_recent(metrics)} steps taught nothing (dead or filtered)"
        yield Warning(severity=severity, text=text, step=last)
    for name, what in (("dropped_stale", "too old"), ("dropped_stragglers", "too late")):
        if dropped := sum(metrics.read_recent(name)):
            text = f"{dropped:.0f} groups of the last {_count_recent(metrics)} steps were dropped: {what}"
            yield Warning(severity="info", text=text, step=last)
    truncated = _average(metrics, "truncated_rate")
    if truncated is not None and truncated > _MOST_TRUNCATED:
        text = (
            f"{truncated:.0%} of the trajectories are truncated: raise rollout.max_response_length or max_prompt_length"
        )
        yield Warning(severity="warning", text=text, step=last)


def _judge_time(metrics: StepMetrics, settings: RunSettings) -> Iterator[Warning]:
    total, waited = sum(metrics.read_recent("seconds.total")), sum(metrics.read_recent("seconds.wait"))
    if total and waited / total > _MOST_IDLE:
        more = "" if settings.read_number("trainer.max_staleness") else ", or set trainer.max_staleness=1"
        text = f"the trainer is idle {waited / total:.0%} of its time, waiting for trajectories: add engines{more}"
        yield Warning(severity="info", text=text, step=metrics.steps[-1])


def _count_recent(metrics: StepMetrics) -> int:
    return min(_RECENT, len(metrics.steps))


def _average(metrics: StepMetrics, name: str) -> float | None:
    return mean_known(metrics.read_recent(name, _RECENT))


def _measure_pace(metrics: StepMetrics) -> float:
    times = [value for value in metrics.time[-_RECENT:] if value == value]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def _say(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
