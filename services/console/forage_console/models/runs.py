"""Pages Runs, Run and Two runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from forage_console.models.base import Estimate, Model, Place, RowNumber, UnixSeconds
from forage_records.statistics import Outcome

Tag = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=40)]


class RunState(StrEnum):
    """running: written to in the last minutes, or its trainer answers; done: its last step is taken; broken: see
    `problem`."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    DONE = "done"
    BROKEN = "broken"


class RunNotes(Model):
    """What people wrote about a run; kept in notes.json in its folder."""

    note: Annotated[str, Field(max_length=10_000)] = ""
    tags: list[Tag] = Field([], max_length=20)


class Progress(Model):
    """The trainer's phase, and how far it is in it. left_s: estimated seconds until the end of the run."""

    phase: str
    detail: str
    done: int
    total: int
    left_s: float | None


class RunRow(Model):
    """One run of the list.

    Attributes:
        id: name of its folder.
        problem: why it cannot be read, or reads only in part.
        em: greedy exact match of the last validation; best_em: of the best one, and its label.
        sparkline: mean exact match of sampled answers (reward where there is none), at most 40 points over all steps.
    """

    id: str
    state: RunState
    problem: str | None
    is_latest: bool
    model: str | None
    algorithm: str | None
    step: int
    total_steps: int | None
    started: UnixSeconds | None
    updated: UnixSeconds | None
    duration_s: float | None
    progress: Progress
    em: Estimate | None
    best_em: Estimate | None
    best_label: str | None
    reward: float | None
    sparkline: list[float | None]
    notes: RunNotes


class RunList(Model):
    """All runs of the folder, the newest first."""

    folder: str
    runs: list[RunRow]


class ValidationRow(Model):
    """A finished validation. step: optimizer steps taken when it began; metrics: all values of its file."""

    label: str
    step: int
    is_watch: bool
    em: Estimate | None
    em_by_source: dict[str, Estimate]
    failed: int
    count: int
    metrics: dict[str, float | None]


class Mark(Model):
    """An event to draw into the curves.

    Attributes:
        kind: start, resume, checkpoint, best checkpoint, validation, rollback, restart, guard.
        text: a sentence.
    """

    step: int
    time: UnixSeconds | None
    kind: str
    text: str


class Warning(Model):
    """Something that a person should know. severity: info, warning or error."""

    severity: str
    text: str
    step: int | None


class CurveGroup(Model):
    """Curves that belong into one figure. title, and names of metrics → label and unit."""

    title: str
    unit: str
    curves: dict[str, str]


class RunDetail(Model):
    """Everything about a run but its curves' values.

    Attributes:
        settings: as in settings.yaml; changed: dotted names of those that differ from the defaults.
        saved_steps: steps whose trajectories are kept.
        metrics: names of all numeric metrics; groups: the figures of the live page.
        now: the last line of metrics.
        restarts: service → number of restarts.
    """

    run: RunRow
    settings: dict[str, Any]
    changed: list[str]
    saved_steps: list[int]
    validations: list[ValidationRow]
    marks: list[Mark]
    warnings: list[Warning]
    metrics: list[str]
    groups: list[CurveGroup]
    now: dict[str, float | None]
    restarts: dict[str, int]
    summary: dict[str, Any] | None


class Curves(Model):
    """Metrics by column; a value that a step has not is null."""

    steps: list[int]
    time: list[UnixSeconds | None]
    columns: dict[str, list[float | None]]


class RunChange(Model):
    """What an event of the stream says: pages read again what depends on it."""

    run: str
    state: RunState
    progress: Progress
    step: int
    saved_steps: int
    validations: int
    marks: int


class SettingDifference(Model):
    """A setting that two runs differ in; null: the run has no such setting."""

    name: str
    a: Any
    b: Any


class AnswerSide(Model):
    """The answer of one side to a question, and where its trajectory is."""

    run: str
    place: Place
    row: RowNumber
    answer: str | None
    em: float | None
    reward: float | None


class QuestionPair(Model):
    """A question that both runs answered."""

    uid: str
    question: str
    targets: list[str]
    data_source: str
    outcome: Outcome
    a: AnswerSide
    b: AnswerSide


class Difference(Model):
    """A paired difference of means, B minus A, with its 95 % interval and two-sided p-value."""

    mean: float
    low: float
    high: float
    p: float


class SourceComparison(Model):
    """Comparison on one data source; `all` is the last of several."""

    data_source: str
    questions: int
    em_a: float
    em_b: float
    difference: Difference
    outcomes: dict[Outcome, int]


class RunComparison(Model):
    """Comparison of two runs.

    Attributes:
        labels: validations that both have; label: the one that is compared ("" without any), of each run.
        pairs: questions of the page, the largest change first; total: of all that the filter keeps.
        digests_equal: whether tokens and weights are equal to the bit; null where no digests are kept.
    """

    a: RunRow
    b: RunRow
    settings: list[SettingDifference]
    metrics: list[str]
    labels_a: list[str]
    labels_b: list[str]
    label_a: str
    label_b: str
    sources: list[SourceComparison]
    pairs: list[QuestionPair]
    total: int
    only_a: int
    only_b: int
    digests_equal: bool | None
    first_difference: int | None
