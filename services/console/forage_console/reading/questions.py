"""The page of a question over time: its appearances in validations, among watched questions, and in saved steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from forage_console.models.base import Author
from forage_console.models.trajectories import (
    Block,
    Piece,
    QuestionDetail,
    QuestionPage,
    QuestionPoint,
    QuestionRow,
    QuestionText,
)
from forage_console.reading.files import Row
from forage_console.reading.reader import RunReader
from forage_console.reading.validations import Answer, Validation, ValidationQuestion, estimate
from forage_console.store.files import name_place
from forage_console.store.values import list_spans
from forage_records.spans import split_spans


@dataclass(frozen=True)
class QuestionFilter:
    """Filter of questions, and a page of what it keeps; empty values let everything pass."""

    text: str = ""
    source: str = ""
    watched: bool | None = None
    changed: bool | None = None
    offset: int = 0
    limit: int = 100


@dataclass
class _History:
    """The appearances of a question, in order of steps."""

    question: ValidationQuestion
    answers: list[tuple[Validation, Answer]]

    @property
    def is_watched(self) -> bool:
        return any(validation.is_watch for validation, _ in self.answers)

    def count_changes(self) -> int:
        """Count how often right became wrong, or wrong right; greedy and watched answers are compared apart."""
        changes = 0
        for is_watch in (False, True):
            right = [a.em > 0 for v, a in self.answers if v.is_watch is is_watch and a.em is not None]
            changes += sum(one != other for one, other in pairwise(right))
        return changes


def list_questions(reader: RunReader, wanted: QuestionFilter) -> QuestionPage:
    """List the questions that pass a filter, those first whose answers changed most."""
    with reader.lock:
        found = [(history, history.count_changes()) for history in _collect(reader) if _passes(history, wanted)]
        if wanted.changed is not None:
            found = [pair for pair in found if (pair[1] > 0) is wanted.changed]
        found.sort(key=lambda pair: -pair[1])
        page = found[wanted.offset : wanted.offset + wanted.limit]
        return QuestionPage(rows=[_build_row(history) for history, _ in page], total=len(found))


def read_question(reader: RunReader, uid: str) -> QuestionDetail | None:
    """Read a question with what was written at each appearance in validations; None of one that no validation asked.

    Args:
        uid: with or without the pass over the data.
    """
    with reader.lock:
        histories = {history.question.uid: history for history in _collect(reader)}
        history = histories.get(uid) or histories.get(uid.rpartition("/")[0])
        if history is None:
            return None
        row = _build_row(history)
        records = (validation.read_record(answer) for validation, answer in history.answers)
        texts = [
            QuestionText(point=point, blocks=split_record(record or {}))
            for point, record in zip(row.points, records, strict=True)
        ]
        judged = [point.em for point in row.points if point.em is not None]
        return QuestionDetail(question=row, texts=texts, em=estimate(judged))


def split_record(record: Row) -> list[Block]:
    """Split what a validation keeps of a trajectory into its blocks; parts that are no spans are left out."""
    turn = 0
    blocks = []
    for block in split_spans(list_spans(record)):
        author = Author(block.role)
        turn += author is Author.MODEL
        pieces = [Piece(text=piece.text, within=piece.within, is_tag=piece.is_tag) for piece in block.pieces]
        number = None if author is Author.PROMPT else max(turn, 1)
        blocks.append(Block(author=author, begin=None, end=None, turn=number, pieces=pieces))
    return blocks


def _collect(reader: RunReader) -> Iterable[_History]:
    found: dict[str, _History] = {}
    for validation in reader.read_validations():
        for uid, answer in validation.answers.items():
            found.setdefault(uid, _History(reader.questions[uid], [])).answers.append((validation, answer))
    return found.values()


def _passes(history: _History, wanted: QuestionFilter) -> bool:
    question = history.question
    if wanted.source and question.data_source != wanted.source:
        return False
    if wanted.watched is not None and history.is_watched is not wanted.watched:
        return False
    if words := wanted.text.casefold().split():
        texts = [question.text, *question.targets, *(answer.answer or "" for _, answer in history.answers)]
        whole = "\n".join(texts).casefold()
        return all(word in whole for word in words)
    return True


def _build_row(history: _History) -> QuestionRow:
    question = history.question
    return QuestionRow(
        uid=question.uid,
        question=question.text,
        targets=list(question.targets),
        data_source=question.data_source,
        is_watched=history.is_watched,
        points=list(_build_points(history.answers)),
        changes=history.count_changes(),
    )


def _build_points(answers: Sequence[tuple[Validation, Answer]]) -> Iterator[QuestionPoint]:
    for validation, answer in answers:
        yield QuestionPoint(
            place=name_place(validation.label),
            row=answer.row,
            step=validation.step,
            kind="watch" if validation.is_watch else "validation",
            em=answer.em,
            reward=answer.reward,
            answer=answer.answer,
            samples=answer.samples,
        )
