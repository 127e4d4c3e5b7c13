"""The page Run: validations, marks, figures and curves of one run."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

from pydantic_core import from_json
from upath import UPath

from forage_console.models.runs import Curves, Mark, RunDetail, RunRow, ValidationRow
from forage_console.reading.figures import group_curves
from forage_console.reading.files import Row, list_names, read_changed, read_object, read_stamp, to_count, to_number
from forage_console.reading.metrics import StepMetrics
from forage_console.reading.reader import RunReader
from forage_console.reading.validations import Validation
from forage_console.reading.warnings import list_warnings
from forage_records.events import FILE, Event, EventKind, parse_events
from forage_records.step_file import list_saved_steps

_MOST_MARKS = 2000


def read_detail(reader: RunReader, row: RunRow) -> RunDetail:
    """Read everything about a run but its curves."""
    with reader.lock:
        metrics, settings = reader.metrics, reader.settings
        validations = reader.read_validations()
        saved = list_steps(reader.folder)
        marks = list(_list_marks(reader, metrics, validations))
        problems = (row.problem, metrics.problem, *(validation.problem for validation in validations))
        return RunDetail(
            run=row,
            settings=settings.tree,
            changed=settings.list_changed(),
            saved_steps=saved,
            validations=[_describe(validation) for validation in validations],
            marks=sorted(marks, key=lambda mark: (mark.step, mark.time or 0))[-_MOST_MARKS:],
            warnings=list_warnings(row, metrics, settings, dict.fromkeys(filter(None, problems))),
            metrics=sorted(metrics.columns),
            groups=group_curves(metrics.columns),
            now=metrics.read_last(),
            restarts=read_restarts(reader.folder),
            summary=_clean(read_object(reader.folder / "summary.json")[0]),
        )


def read_curves(reader: RunReader, names: Sequence[str], after: int) -> Curves:
    """Read columns of metrics from the first step after `after` on."""
    with reader.lock:
        metrics = reader.metrics
        begin = next((place for place, step in enumerate(metrics.steps) if step > after), len(metrics.steps))
        return Curves.model_construct(
            steps=list(metrics.steps[begin:]),
            time=[value if value == value else None for value in metrics.time[begin:]],
            columns={name: metrics.read_column(name, begin) for name in dict.fromkeys(names or metrics.columns)},
        )


def list_steps(folder: UPath) -> list[int]:
    """List the steps whose trajectories are kept."""
    try:
        return list_saved_steps(folder)
    except OSError:
        return []


def _describe(validation: Validation) -> ValidationRow:
    return ValidationRow(
        label=validation.label,
        step=validation.step,
        is_watch=validation.is_watch,
        em=validation.estimate_em(),
        em_by_source=validation.estimate_by_source(),
        failed=validation.failed,
        count=validation.count,
        metrics=validation.metrics,
    )


def _list_marks(reader: RunReader, metrics: StepMetrics, validations: Sequence[Validation]) -> Iterator[Mark]:
    events = [_describe_event(event, metrics) for event in read_events(reader.folder)]
    yield from events
    told = {(mark.kind, mark.step) for mark in events}
    for validation in validations:
        em = validation.metrics.get("em")
        if not validation.is_watch and ("validation", validation.step) not in told:
            text = f"validation '{validation.label}'" + (f": greedy EM {em:.3f}" if em is not None else "")
            yield Mark(step=validation.step, time=None, kind="validation", text=text)
    for kind, step, time, text in (*_list_checkpoints(reader.folder), *_list_rollbacks(reader.folder)):
        if (kind, step) not in told:
            yield Mark(step=step, time=time, kind=kind, text=text)
    for step, guard in metrics.guards:
        if ("guard", step) not in told:
            text = "skipped: a guard rolled the run back because of it" if guard == "skipped" else f"guard '{guard}'"
            yield Mark(step=step, time=None, kind="guard", text=text)


def read_events(folder: UPath) -> list[Event]:
    """Read what a run says happened to it; empty in runs that have no such file."""
    try:
        return list(parse_events((folder / FILE).read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return []


def _describe_event(event: Event, metrics: StepMetrics) -> Mark:
    """The mark of an event; that of another service than the trainer belongs to the step that was taken last."""
    step = to_count(event.step)
    if event.step is None:
        place = bisect_right(metrics.time, event.time)
        step = metrics.steps[place - 1] if place else 0
    text = event.text if event.service == "trainer" else f"{event.service}: {event.text}"
    return Mark(step=step, time=to_number(event.time), kind=event.kind, text=text)


def _list_checkpoints(folder: UPath) -> Iterator[tuple[str, int, float | None, str]]:
    """The checkpoints that are kept, and the best one."""
    checkpoints = folder / "checkpoints"
    for name in list_names(checkpoints):
        number = name.removeprefix("step_")
        if name.startswith("step_") and number.isdecimal() and len(number) < 16:
            changed = read_changed(read_stamp(checkpoints / name / "manifest.json"))
            if changed is not None:
                yield "checkpoint", int(number), changed, f"checkpoint {name}"
    try:
        best = (checkpoints / "best").read_text(encoding="utf-8").strip().removeprefix("step_")
    except (OSError, ValueError):
        return
    if best.isdecimal() and len(best) < 16:
        yield "best checkpoint", int(best), None, f"best checkpoint: step_{best}"


def _list_rollbacks(folder: UPath) -> Iterator[tuple[str, int, float | None, str]]:
    try:
        rows = from_json((folder / "rollbacks.json").read_bytes())
    except (OSError, ValueError):
        return
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict):
            text = f"rolled back: guard '{row.get('guard')}': {row.get('reason')}"
            yield "rollback", to_count(row.get("step")), to_number(row.get("time")), text


def read_restarts(folder: UPath) -> dict[str, int]:
    """Restarts of services: of the summary of a run that is over, else of its events."""
    summary = read_object(folder / "summary.json")[0] or {}
    prefix = "restarts_"
    found = {name.removeprefix(prefix): to_count(n) for name, n in summary.items() if name.startswith(prefix)}
    if not found:
        restarts = (event.service for event in read_events(folder) if event.kind == EventKind.RESTART)
        found = dict(Counter(restarts))
    return {name: count for name, count in found.items() if count}


def _clean(summary: Row | None) -> Row | None:
    """Replace numbers that JSON has no form for."""
    if summary is None:
        return None
    return {name: to_number(value) if isinstance(value, float) else value for name, value in summary.items()}
