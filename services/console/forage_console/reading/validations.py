"""The validations of a run: their metrics, and who answered what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from upath import UPath

from forage_console.models.base import Estimate
from forage_console.reading.files import Row, describe, list_names, read_object, read_stamp, to_count, to_number
from forage_console.store.values import read_line, read_lines
from forage_records import statistics

FOLDER = "validation"
WATCH = "watch-"
_STEP = re.compile(r"(?:step|watch)-(\d{1,15})")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answers of a validation to one question.

    Attributes:
        row, begin: number of the first one's line, and where it begins in the file.
        em, reward: means over the samples that were judged; None where none was.
        samples: number of answers; failed: of those that were not judged.
    """

    row: int
    begin: int
    em: float | None
    reward: float | None
    answer: str | None
    samples: int
    failed: int


@dataclass(frozen=True, slots=True)
class ValidationQuestion:
    """A question. uid: without the pass over the data."""

    uid: str
    text: str
    targets: tuple[str, ...]
    data_source: str


class Validation:
    """A validation that is over, or what there is of it.

    Attributes:
        answers: uid of the question → answers.
        problem: why a part of it cannot be read.
    """

    def __init__(self, folder: UPath, label: str, questions: dict[str, ValidationQuestion]) -> None:
        """
        Args:
            folder: of the validations.
            questions: those that are known, to which this adds its own; shared by the validations of a run.
        """
        self.label = label
        self.file = folder / f"{label}.jsonl"
        summary, self.problem = read_object(folder / f"{label}.json")
        self.metrics = {name: to_number(value) for name, value in (summary or {}).items() if _is_metric(name, value)}
        self.step = _find_step(label, summary or {})
        self.answers: dict[str, Answer] = {}
        self._questions = questions
        self._by_source: dict[str, list[float]] = {}
        self._read()

    @property
    def is_watch(self) -> bool:
        return self.label.startswith(WATCH)

    @property
    def count(self) -> int:
        return to_count(self.metrics.get("count"), sum(answer.samples for answer in self.answers.values()))

    @property
    def failed(self) -> int:
        return to_count(self.metrics.get("failed"), sum(answer.failed for answer in self.answers.values()))

    def estimate_em(self) -> Estimate | None:
        """Exact match with its interval; from the counts alone where the answers are not kept."""
        values = [value for part in self._by_source.values() for value in part]
        return estimate(values) if values else estimate_from_summary(self.metrics)

    def estimate_by_source(self) -> dict[str, Estimate]:
        found = ((source, estimate(values)) for source, values in sorted(self._by_source.items()))
        return {source: one for source, one in found if one is not None}

    def read_record(self, answer: Answer) -> Row | None:
        """Read the whole line of an answer; None where the file has changed meanwhile."""
        try:
            record = read_line(self.file, answer.begin)
        except (OSError, ValueError, RecursionError):
            return None
        return record if isinstance(record, dict) else None

    def _read(self) -> None:
        samples: dict[str, list[_Sample]] = {}
        try:
            for row, (begin, record) in enumerate(read_lines(self.file)):
                if record is None:
                    self.problem = f"{self.file.name} is damaged at line {row + 1}: the rest is left out"
                    break
                uid = _find_question(record)
                if uid not in self._questions:
                    self._questions[uid] = _read_question(uid, record)
                samples.setdefault(uid, []).append(_read_sample(row, begin, record))
        except (FileNotFoundError, NotADirectoryError):
            self.problem = self.problem or f"{self.file.name} is missing: its answers are not shown"
        except OSError as error:
            self.problem = describe(self.file, error)
        for uid, found in samples.items():
            answer = self.answers[uid] = _combine(found)
            if answer.em is not None:
                self._by_source.setdefault(self._questions[uid].data_source, []).append(answer.em)


class _Sample(NamedTuple):
    row: int
    begin: int
    em: float | None
    reward: float | None
    answer: str | None
    failed: bool


def _read_sample(row: int, begin: int, record: Row) -> _Sample:
    text = record.get("answer")
    em, reward = to_number(record.get("em")), to_number(record.get("reward"))
    return _Sample(row, begin, em, reward, text if isinstance(text, str) else None, bool(record.get("failed")))


def _combine(samples: Sequence[_Sample]) -> Answer:
    first = samples[0]
    return Answer(
        first.row,
        first.begin,
        statistics.mean_known(one.em for one in samples),
        statistics.mean_known(one.reward for one in samples),
        first.answer,
        len(samples),
        sum(one.failed for one in samples),
    )


def list_labels(run: UPath) -> list[str]:
    """List the labels of the validations in a run's folder, in order of steps."""
    names = list_names(run / FOLDER)
    labels = {stem for name in names for stem, dot, ending in [name.rpartition(".")] if ending in ("json", "jsonl")}
    return sorted((label for label in labels if label), key=lambda label: (_order(label), label))


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of one value for each question, with its interval."""
    found = statistics.estimate_mean(values)
    return Estimate(mean=found.mean, low=found.low, high=found.high, count=len(values)) if found else None


def estimate_from_summary(metrics: Row) -> Estimate | None:
    """Exact match with its interval from its mean and count, which is all there is to know of zeros and ones."""
    em, judged = to_number(metrics.get("em")), to_count(metrics.get("count")) - to_count(metrics.get("failed"))
    if em is None or not 0 <= em <= 1 or not 0 < judged < 10_000_000:
        return None
    right = round(em * judged)
    if abs(right / judged - em) > 1e-6:
        return Estimate(mean=em, low=em, high=em, count=judged)
    return estimate([1.0] * right + [0.0] * (judged - right))


def find_best(validations: Iterable[tuple[str, Estimate | None]]) -> tuple[str | None, Estimate | None]:
    """Find the validation with the highest exact match, the earliest of equal ones."""
    best: tuple[str | None, Estimate | None] = (None, None)
    for label, em in validations:
        if em is not None and (best[1] is None or em.mean > best[1].mean):
            best = (label, em)
    return best


def stamp_label(run: UPath, label: str) -> tuple[tuple[int, int, int], ...]:
    """Read the stamps of a validation's files."""
    folder = run / FOLDER
    return read_stamp(folder / f"{label}.json"), read_stamp(folder / f"{label}.jsonl")


def _find_question(record: Row) -> str:
    """The question's uid, without the pass over the data; a record of before uids is known by its text."""
    uid = record.get("uid")
    return uid.rpartition("/")[0] or uid if isinstance(uid, str) and uid else str(record.get("question"))


def _read_question(uid: str, record: Row) -> ValidationQuestion:
    targets = record.get("targets")
    texts = tuple(str(target) for target in targets) if isinstance(targets, list) else ()
    parts = uid.rsplit("/", 2)
    return ValidationQuestion(uid, str(record.get("question") or ""), texts, parts[0] if len(parts) == 3 else "")


def _is_metric(name: str, value: object) -> bool:
    return name not in ("version", "epoch") and (value is None or to_number(value) is not None)


def _find_step(label: str, summary: Row) -> int:
    if "version" in summary:
        return to_count(summary["version"])
    match = _STEP.fullmatch(label)
    return int(match[1]) if match else 0


def _order(label: str) -> tuple[int, int]:
    match = _STEP.fullmatch(label)
    return (1, int(match[1])) if match else (0 if label == "before" else 2, 0)
