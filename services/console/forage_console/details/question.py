"""The page of a question over time: its appearances in validations, among watched questions, and in saved steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

from forage_console.details.trajectory import read_details
from forage_console.errors import NotFoundError
from forage_console.models.trajectories import QuestionDetail, QuestionPoint, QuestionRow, QuestionText, TrajectoryRow
from forage_console.reading import questions
from forage_console.reading.reader import RunReader
from forage_console.reading.validations import estimate
from forage_console.store.queries import find_rows
from forage_console.store.run_store import RunStore
from forage_records.statistics import mean_known

_MOST_STEPS = 50
"""Steps of which one sample of the question is shown, the latest ones."""


def read_question(reader: RunReader, store: RunStore, uid: str) -> QuestionDetail:
    """Read a question with what was written at each appearance.

    Args:
        uid: with or without the pass over the data.

    Raises:
        NotFoundError: the run never asked it, or keeps nothing of it.
    """
    asked = questions.read_question(reader, uid)
    trained = list(_read_steps(store, asked.question.uid if asked else uid))
    if not asked and not trained:
        trained = list(_read_steps(store, uid.rpartition("/")[0]))
    if not asked and not trained:
        raise NotFoundError(
            f"no validation or saved step of run '{reader.folder.name}' has the question '{uid[:100]}': the page "
            "Questions lists those that validations asked"
        )
    known = asked.question if asked else _describe(trained[0][0])
    texts = [*(asked.texts if asked else ()), *(text for _, text in trained)]
    texts.sort(key=lambda text: text.point.step)
    points = [text.point for text in texts]
    judged = [point.em for point in points if point.em is not None]
    return QuestionDetail(question=known.model_copy(update={"points": points}), texts=texts, em=estimate(judged))


def _read_steps(store: RunStore, uid: str) -> Iterator[tuple[TrajectoryRow, QuestionText]]:
    """The saved steps that trained on a question, each with its first sample."""
    if not uid:
        return
    rows = find_rows(store, "starts_with(uid, ?) AND step IS NOT NULL", [f"{uid}/"], 'step, "row"')
    groups = [(place, list(found)) for place, found in groupby(rows, key=attrgetter("place"))]
    for place, found in groups[-_MOST_STEPS:]:
        file = store.files.get(place)
        try:
            details = read_details(store, file, found[:1], None, "") if file else []
        except NotFoundError:  # it was deleted, or is being replaced
            continue
        for detail in details:
            yield found[0], QuestionText(point=_count_samples(found), blocks=detail.blocks)


def _count_samples(rows: list[TrajectoryRow]) -> QuestionPoint:
    first = rows[0]
    return QuestionPoint(
        place=first.place,
        row=first.row,
        step=first.step or 0,
        kind="train",
        em=mean_known(row.em for row in rows),
        reward=mean_known(row.reward for row in rows),
        answer=first.answer,
        samples=len(rows),
    )


def _describe(row: TrajectoryRow) -> QuestionRow:
    return QuestionRow(
        uid=row.uid.rpartition("/")[0],
        question=row.question,
        targets=row.targets,
        data_source=row.data_source,
        is_watched=False,
        points=[],
        changes=0,
    )
