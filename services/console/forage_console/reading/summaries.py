"""The rows of the list of runs: each read from little of its files, and again only where they have changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError
from upath import UPath

from forage_console.context import is_run_name
from forage_console.models.base import Estimate
from forage_console.models.runs import Progress, RunList, RunNotes, RunRow, RunState
from forage_console.reading.files import (
    NONE,
    Cached,
    Row,
    Stamp,
    describe,
    is_alive,
    list_names,
    read_changed,
    read_object,
    read_stamp,
    to_count,
    to_number,
)
from forage_console.reading.metrics import average, sample_lines
from forage_console.reading.validations import FOLDER, WATCH, estimate_from_summary, find_best, list_labels
from forage_records.run_folder import estimate_time_left
from forage_records.run_settings import RunSettings, read_settings

ALIVE_S = 180.0
"""A run that nothing was written to for so long, or for three of its steps, does not go on."""
_SPARKS = 40
_LONG = 1024 * 1024
_SIGNS = ("settings.yaml", "metrics.jsonl", "state.json")
"""A folder with one of these files is a run."""


@dataclass(frozen=True)
class _Lines:
    """What the list says of a run's steps. recent: the last ones, for the pace."""

    sparkline: list[float | None] = field(default_factory=list)
    step: int = 0
    total: int | None = None
    reward: float | None = None
    began: float | None = None
    ended: float | None = None
    recent: Sequence[Row] = ()
    problem: str | None = None

    @property
    def pace_s(self) -> float:
        """Seconds of a step; 0 where that is unknown."""
        times = [row["time"] for row in self.recent]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


@dataclass(frozen=True)
class _Validated:
    """What the list says of a run's validations. seconds: label → duration."""

    em: Estimate | None = None
    best: Estimate | None = None
    best_label: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    problem: str | None = None


class Summary:
    """One run of the list."""

    def __init__(self, folder: UPath) -> None:
        self.folder = folder
        self._settings = Cached(lambda: read_settings(folder / "settings.yaml"))
        self._lines = Cached(lambda: _read_lines(folder / "metrics.jsonl"))
        self._state = Cached(lambda: read_object(folder / "state.json"))
        self._notes = Cached(lambda: _read_notes(folder / "notes.json"))
        self._validated = Cached(lambda: _read_validated(folder))
        self._lock = threading.Lock()

    @property
    def settings(self) -> RunSettings:
        return self._settings.get((read_stamp(self.folder / "settings.yaml"),))

    def read_row(self, is_latest: bool) -> RunRow:
        """Read the row; never an error."""
        with self._lock:
            return self._build_row(is_latest)

    def _build_row(self, is_latest: bool) -> RunRow:
        stamps = {name: read_stamp(self.folder / name) for name in (*_SIGNS, "notes.json", "logs/trainer.log")}
        settings = self._settings.get((stamps["settings.yaml"],))
        lines = self._lines.get((stamps["metrics.jsonl"],))
        state, state_problem = self._state.get((stamps["state.json"],))
        notes, notes_problem = self._notes.get((stamps["notes.json"],))
        validated = self._validated.get(_stamp_validations(self.folder))
        phase = _read_progress(state or {})
        updated = max(filter(None, map(read_changed, stamps.values())), default=None)
        began = (lines.began or 0) - validated.seconds.get("before", 0.0)
        begins = (began if lines.began else None, read_changed(stamps["settings.yaml"]))
        started = min(filter(None, begins), default=None)
        ended = lines.ended + validated.seconds.get("after", 0.0) if lines.ended else updated
        age = time.time() - (updated or 0)
        activity = phase.phase if phase.phase in _ACTIVITIES else None
        goes_on = is_alive(self.folder) if activity else age < max(ALIVE_S, 3 * lines.pace_s)
        total = lines.total if lines.total is not None or activity else _to_whole(settings.read_number(_TOTAL))
        state_now = _decide_state(settings, phase, lines, goes_on)
        is_going = state_now in (RunState.RUNNING, RunState.STARTING)
        left = estimate_time_left(lines.recent, total, phase.phase) if total is not None and is_going else None
        end = time.time() if is_going else ended
        return RunRow(
            id=self.folder.name,
            state=state_now,
            problem=settings.problem or lines.problem or state_problem or validated.problem or notes_problem,
            is_latest=is_latest,
            model=settings.model,
            algorithm=activity or settings.algorithm,
            step=lines.step,
            total_steps=total,
            started=started,
            updated=updated,
            duration_s=max(0.0, end - started) if started is not None and end is not None else None,
            progress=phase.model_copy(update={"left_s": left}),
            em=validated.em,
            best_em=validated.best,
            best_label=validated.best_label,
            reward=lines.reward,
            sparkline=lines.sparkline,
            notes=notes,
        )


_ACTIVITIES = ("serving", "evaluating")
"""Phases of services that train nothing, as `forage up` and `forage eval` start them: they write no steps."""
_TOTAL = "trainer.total_training_steps"


class Summaries:
    """The list of runs in a folder. Thread-safe."""

    def __init__(self, runs: UPath) -> None:
        self._runs = runs
        self._known: dict[str, Summary] = {}

    def get(self, folder: UPath) -> Summary:
        """The summary of one run."""
        return self._known.setdefault(folder.name, Summary(folder))

    def read_row(self, folder: UPath) -> RunRow:
        return self.get(folder).read_row(folder.name == self._find_latest())

    def read_list(self) -> RunList:
        """Read all runs, the newest first."""
        latest, names = self._find_latest(), self.list_runs()
        for gone in self._known.keys() - set(names):
            self._known.pop(gone, None)
        rows = [self.get(self._runs / name).read_row(name == latest) for name in names]
        rows.sort(key=lambda row: (row.started or row.updated or 0, row.id), reverse=True)
        return RunList(folder=str(self._runs), runs=rows)

    def list_runs(self) -> list[str]:
        """List the names of the folders that are runs; links are not listed beside what they lead to."""
        return [name for name in list_names(self._runs) if is_run_name(name) and self._is_run(self._runs / name)]

    def _is_run(self, folder: UPath) -> bool:
        if isinstance(folder, Path) and folder.is_symlink():
            return False
        return any(read_stamp(folder / name) != NONE for name in (*_SIGNS, FOLDER))

    def _find_latest(self) -> str | None:
        link = self._runs / "latest"
        try:
            return link.readlink().name if isinstance(link, Path) and link.is_symlink() else None
        except OSError:
            return None


def _decide_state(settings: RunSettings, phase: Progress, lines: _Lines, goes_on: bool) -> RunState:
    if settings.problem:
        return RunState.BROKEN
    if phase.phase == "done":
        return RunState.DONE
    if not goes_on:
        return RunState.STOPPED
    return RunState.STARTING if phase.phase == "starting" and not lines.step else RunState.RUNNING


def _read_progress(state: Row) -> Progress:
    return Progress(
        phase=str(state.get("phase", "starting"))[:50],
        detail=str(state.get("detail", ""))[:200],
        done=to_count(state.get("done")),
        total=to_count(state.get("total")),
        left_s=None,
    )


def _read_lines(file: UPath) -> _Lines:
    stamp = read_stamp(file)
    if stamp == NONE:
        return _Lines()
    try:
        sample = sample_lines(file, stamp[1], _SPARKS)
    except OSError as error:
        return _Lines(problem=describe(file, error))
    if not sample.recent:
        return _Lines(problem=f"{file.name} has no line that can be read" if stamp[1] > _LONG else None)
    values = [_first(to_number(row.get("em_mean")), to_number(row.get("reward_mean"))) for row in sample.spread]
    timed = [row for row in sample.recent if to_number(row.get("time")) is not None]
    last = sample.recent[-1]
    return _Lines(
        sparkline=average(values, _SPARKS),
        step=to_count(last["step"]),
        total=_to_whole(to_number(last.get("total_steps"))),
        reward=_first(*(to_number(row.get("reward_mean")) for row in reversed(sample.recent))),
        began=_find_begin(sample.spread[0]) if sample.spread else None,
        ended=timed[-1]["time"] if timed else None,
        recent=[{"step": to_count(row["step"]), "time": row["time"]} for row in timed[-20:]],
    )


def _find_begin(row: Row) -> float | None:
    """When a step began."""
    ended, seconds = to_number(row.get("time")), row.get("seconds")
    spent = to_number(seconds.get("total")) if isinstance(seconds, dict) else None
    return None if ended is None else ended - (spent or 0.0)


def _stamp_validations(run: UPath) -> tuple[Stamp, ...]:
    """The stamp of the folder, whose files are only ever replaced; of an object store, of every file."""
    folder = run / FOLDER
    stamp = read_stamp(folder)
    return (stamp,) if stamp[2] else tuple(read_stamp(folder / name) for name in list_names(folder, ".json"))


def _read_validated(run: UPath) -> _Validated:
    found: list[tuple[str, Estimate | None]] = []
    seconds: dict[str, float] = {}
    problem = None
    for label in list_labels(run):
        summary, trouble = read_object(run / FOLDER / f"{label}.json")
        problem = problem or trouble
        if summary is None or label.startswith(WATCH):
            continue
        seconds[label] = to_number(summary.get("seconds")) or 0.0
        found.append((label, estimate_from_summary(summary)))
    known = [em for _, em in found if em is not None]
    best_label, best = find_best(found)
    return _Validated(known[-1] if known else None, best, best_label, seconds, problem)


def _read_notes(file: UPath) -> tuple[RunNotes, str | None]:
    found, problem = read_object(file)
    try:
        return RunNotes.model_validate(found or {}), problem
    except ValidationError:
        return RunNotes(), f"{file.name} holds no note of the console: repair or remove it"


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _to_whole(value: float | None) -> int | None:
    return None if value is None else to_count(value)
