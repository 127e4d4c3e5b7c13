"""Routes of the pages Runs and Run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.sse import EventSourceResponse

from forage_console.context import FolderOf
from forage_console.live.notes import write_notes as write
from forage_console.models.runs import Curves, RunChange, RunDetail, RunList, RunNotes
from forage_console.reading import detail
from forage_console.reading.changes import WatchesOf
from forage_console.reading.reader import ReadersOf

router = APIRouter(tags=["runs"])


@router.get("/runs")
def list_runs(readers: ReadersOf) -> RunList:
    """All runs of the folder, the newest first."""
    return readers.summaries.read_list()


@router.get("/runs/{run}")
def read_run(run: str, readers: ReadersOf) -> RunDetail:
    """Everything about a run but its curves."""
    return detail.read_detail(readers.open(run), readers.read_row(run))


@router.get("/runs/{run}/curves")
def read_curves(
    run: str,
    readers: ReadersOf,
    names: Annotated[list[str], Query(max_length=200)] = [],  # noqa: B006
    after: Annotated[int, Query(ge=0, description="only later steps")] = 0,
) -> Curves:
    """Metrics of the steps; without names all of them."""
    return detail.read_curves(readers.open(run), names, after)


@router.put("/runs/{run}/notes")
def write_notes(notes: RunNotes, folder: FolderOf) -> RunNotes:
    """Replace note and tags of a run."""
    return write(folder, notes)


@router.get("/runs/{run}/events", response_class=EventSourceResponse, responses={200: {"model": RunChange}})
async def watch_run(folder: FolderOf, watches: WatchesOf) -> AsyncIterator[RunChange]:
    """Server-sent events: the state now, then whenever something of the run has changed."""
    async for change in watches.watch_run(folder.name):
        yield change


@router.get("/events", response_class=EventSourceResponse, responses={200: {"model": RunChange}})
async def watch_runs(watches: WatchesOf) -> AsyncIterator[RunChange]:
    """Server-sent events: the state of every run now, then whenever something of one has changed."""
    async for change in watches.watch_all():
        yield change
