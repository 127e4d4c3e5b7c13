"""The page Two runs: settings that differ, and questions won and lost between two validations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter

from forage_console.errors import NotFoundError
from forage_console.models.runs import (
    AnswerSide,
    QuestionPair,
    RunComparison,
    RunRow,
    SettingDifference,
    SourceComparison,
)
from forage_console.reading.reader import RunReader
from forage_console.reading.validations import Answer, Validation, ValidationQuestion
from forage_console.store.files import name_place
from forage_records import statistics
from forage_records.comparison import compare_steps
from forage_records.statistics import Outcome, find_outcome


@dataclass(frozen=True)
class PairFilter:
    """Filter of questions, and a page of what it keeps; empty values let everything pass."""

    outcome: Outcome | None = None
    source: str = ""
    text: str = ""
    offset: int = 0
    limit: int = 100


@dataclass(frozen=True)
class _Pair:
    """A question that both sides answered, and how."""

    question: ValidationQuestion
    a: Answer
    b: Answer
    em_a: float
    em_b: float

    @property
    def outcome(self) -> Outcome:
        return find_outcome(self.em_a, self.em_b)

    @property
    def change(self) -> tuple[float, float]:
        """Size of the change in exact match, then in reward."""
        reward = abs((self.b.reward or 0.0) - (self.a.reward or 0.0))
        return abs(self.em_b - self.em_a), reward


def compare(
    a: RunReader, b: RunReader, rows: tuple[RunRow, RunRow], labels: tuple[str, str], wanted: PairFilter
) -> RunComparison:
    """Compare validations of two runs, or of one run.

    Args:
        labels: of the validations; empty: the last one that both have.

    Raises:
        NotFoundError: a run has no such validation.
    """
    with ExitStack() as stack:
        # In one order, so that no two requests wait for each other.
        for reader in sorted({a, b}, key=attrgetter("folder.name")):
            stack.enter_context(reader.lock)
        label_a, label_b = _choose_labels(a, b, labels)
        one = a.read_validation(label_a) if label_a else None
        other = b.read_validation(label_b) if label_b else None
        pairs = _pair_answers(a, one, other)
        kept = sorted(_filter_pairs(pairs, wanted), key=lambda pair: pair.change, reverse=True)
        page = kept[wanted.offset : wanted.offset + wanted.limit]
        digests = _compare_digests(a, b)
        return RunComparison(
            a=rows[0],
            b=rows[1],
            settings=[SettingDifference(name=n, a=x, b=y) for n, x, y in a.settings.compare(b.settings)],
            metrics=sorted(a.metrics.columns.keys() & b.metrics.columns.keys()),
            labels_a=a.list_labels(),
            labels_b=b.list_labels(),
            label_a=label_a,
            label_b=label_b,
            sources=[SourceComparison.model_validate(one, from_attributes=True) for one in _compare_sources(pairs)],
            pairs=[_describe(pair, (a.folder.name, label_a), (b.folder.name, label_b)) for pair in page],
            total=len(kept),
            only_a=len(_list_judged(one) - _list_judged(other)),
            only_b=len(_list_judged(other) - _list_judged(one)),
            digests_equal=digests[0],
            first_difference=digests[1],
        )


def _choose_labels(a: RunReader, b: RunReader, labels: tuple[str, str]) -> tuple[str, str]:
    known = a.list_labels(), b.list_labels()
    for reader, label, mine in zip((a, b), labels, known, strict=True):
        if label and label not in mine:
            has = ", ".join(mine) or "none"
            raise NotFoundError(f"run '{reader.folder.name}' has no validation '{label[:100]}' (it has: {has})")
    if labels[0] and labels[1]:
        return labels
    shared = [one.label for one in a.read_validations() if one.label in known[1]]
    greedy = [label for label in shared if not label.startswith("watch-")] or shared
    if a is b and not any(labels):  # with itself: its first validation against its last
        return (greedy[0], greedy[-1]) if greedy else ("", "")
    last = greedy[-1] if greedy else ""
    found = [label or last or (mine[-1] if mine else "") for label, mine in zip(labels, known, strict=True)]
    return found[0], found[1]


def _pair_answers(reader: RunReader, one: Validation | None, other: Validation | None) -> list[_Pair]:
    if one is None or other is None:
        return []
    return [
        _Pair(reader.questions[uid], a, b, a.em, b.em)
        for uid, a in one.answers.items()
        if a.em is not None and (b := other.answers.get(uid)) is not None and b.em is not None
    ]


def _list_judged(validation: Validation | None) -> set[str]:
    return {uid for uid, answer in validation.answers.items() if answer.em is not None} if validation else set()


def _filter_pairs(pairs: Iterable[_Pair], wanted: PairFilter) -> Iterable[_Pair]:
    words = wanted.text.casefold().split()
    for pair in pairs:
        if wanted.outcome is not None and pair.outcome is not wanted.outcome:
            continue
        if wanted.source and pair.question.data_source != wanted.source:
            continue
        if words:
            texts = (pair.question.text, *pair.question.targets, pair.a.answer or "", pair.b.answer or "")
            found = "\n".join(texts).casefold()
            if not all(word in found for word in words):
                continue
        yield pair


def _compare_sources(pairs: Sequence[_Pair]) -> list[statistics.SourceComparison]:
    found = sorted((pair.question.data_source, pair.em_a, pair.em_b) for pair in pairs)
    return statistics.compare_sources(found)


def _describe(pair: _Pair, a: tuple[str, str], b: tuple[str, str]) -> QuestionPair:
    return QuestionPair(
        uid=pair.question.uid,
        question=pair.question.text,
        targets=list(pair.question.targets),
        data_source=pair.question.data_source,
        outcome=pair.outcome,
        a=_describe_side(a, pair.a),
        b=_describe_side(b, pair.b),
    )


def _describe_side(where: tuple[str, str], answer: Answer) -> AnswerSide:
    run, label = where
    return AnswerSide(
        run=run, place=name_place(label), row=answer.row, answer=answer.answer, em=answer.em, reward=answer.reward
    )


def _compare_digests(a: RunReader, b: RunReader) -> tuple[bool | None, int | None]:
    """Whether tokens and weights are equal, and the first step that differs; None where a run has no digests."""
    if a is b or not a.metrics.digests or not b.metrics.digests:
        return None, None
    first = compare_steps(a.metrics.digests, b.metrics.digests).first_difference
    return first is None, first
