"""Routes of the pages Step, Trajectories, Trajectory and Group."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from forage_console.context import ConsoleOf
from forage_console.details import step as steps
from forage_console.details import trajectory as trajectories
from forage_console.models.base import Count
from forage_console.models.trajectories import (
    Facets,
    GroupDetail,
    StepDetail,
    TrajectoryDetail,
    TrajectoryFilter,
    TrajectoryPage,
    TrajectoryQuery,
)
from forage_console.reading.reader import ReadersOf
from forage_console.store import queries
from forage_console.store.export import export_rows
from forage_console.store.stores import StoreOf

router = APIRouter(tags=["trajectories"])


@router.get("/runs/{run}/steps/{step}")
def read_step(run: str, step: Count, store: StoreOf, readers: ReadersOf) -> StepDetail:
    """One optimizer step: metrics, groups, advantages."""
    reader = readers.open(run)
    with reader.lock:
        line = steps.read_line(reader.metrics, step)
    return steps.read_step(store, step, line, reader.settings)


@router.get("/runs/{run}/trajectories")
def list_trajectories(query: Annotated[TrajectoryQuery, Query()], store: StoreOf) -> TrajectoryPage:
    """The trajectories that pass a filter."""
    return queries.list_rows(store, query)


@router.get("/runs/{run}/facets")
def read_facets(store: StoreOf, place: str = queries.STEPS) -> Facets:
    """Values that the trajectories of a run have, for the controls of the filter."""
    return queries.read_facets(store, place)


@router.get("/runs/{run}/trajectories.parquet", response_class=StreamingResponse)
def export_trajectories(run: str, query: Annotated[TrajectoryFilter, Query()], store: StoreOf) -> StreamingResponse:
    """The trajectories that pass a filter, as a Parquet file; not of validations."""
    name = quote(f"{store.name}-trajectories.parquet", safe="")  # the name of a run may have any characters
    return StreamingResponse(
        export_rows(store, query),
        media_type="application/vnd.apache.parquet",
        headers={"Content-Disposition": f"attachment; filename*=utf-8''{name}"},
    )


@router.get("/runs/{run}/trajectories/{place}/{row}")
def read_trajectory(
    run: str, place: str, row: Count, store: StoreOf, readers: ReadersOf, console: ConsoleOf
) -> TrajectoryDetail:
    """One trajectory, token by token."""
    settings = readers.open(run).settings
    model, trace_url = settings.read_text("model.path"), console.settings.console.trace_url
    detail = trajectories.read_trajectory(store, place, row, model, trace_url)
    return steps.explain(store, detail, settings)


@router.get("/runs/{run}/groups/{place}/{uid:path}")
def read_group(run: str, place: str, uid: str, store: StoreOf, readers: ReadersOf, console: ConsoleOf) -> GroupDetail:
    """All samples of a prompt, and what made their advantages."""
    return steps.read_group(store, place, uid, readers.open(run).settings, console.settings.console.trace_url)
