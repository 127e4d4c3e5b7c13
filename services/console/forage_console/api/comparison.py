"""Route of the page Two runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from forage_console.models.runs import RunComparison
from forage_console.reading.comparison import PairFilter, compare
from forage_console.reading.reader import ReadersOf
from forage_records.statistics import Outcome

router = APIRouter(tags=["runs"])


@router.get("/compare")
def compare_runs(
    a: str,
    b: str,
    readers: ReadersOf,
    label_a: str = "",
    label_b: str = "",
    outcome: Outcome | None = None,
    source: str = "",
    text: Annotated[str, Query(max_length=500)] = "",
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> RunComparison:
    """Settings that differ, and questions won and lost between a validation of one run and one of another.

    Without labels: the last validation that both have. The same run with two labels compares its validations.
    """
    wanted = PairFilter(outcome, source, text, offset, limit)
    rows = readers.read_row(a), readers.read_row(b)
    return compare(readers.open(a), readers.open(b), rows, (label_a, label_b), wanted)
