"""Routes of the page about a question over time."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from forage_console.details import question
from forage_console.models.trajectories import QuestionDetail, QuestionPage
from forage_console.reading import questions as reading
from forage_console.reading.reader import ReadersOf
from forage_console.store.stores import StoreOf

router = APIRouter(tags=["questions"])


@router.get("/runs/{run}/questions")
def list_questions(
    run: str,
    readers: ReadersOf,
    text: Annotated[str, Query(max_length=500)] = "",
    source: str = "",
    watched: bool | None = None,
    changed: bool | None = None,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> QuestionPage:
    """Questions that validations asked or that are watched, those first whose answers changed most."""
    wanted = reading.QuestionFilter(text, source, watched, changed, offset, limit)
    return reading.list_questions(readers.open(run), wanted)


@router.get("/runs/{run}/questions/{uid:path}")
def read_question(run: str, uid: str, readers: ReadersOf, store: StoreOf) -> QuestionDetail:
    """A question with what the policy wrote at each of its appearances."""
    return question.read_question(readers.open(run), store, uid)
