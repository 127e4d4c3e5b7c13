"""Routes of the pages Health and Ask, and what a trajectory's page does with the services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request
from fastapi.sse import EventSourceResponse

from forage_console.context import ConsoleOf, FolderOf
from forage_console.details.trajectory import read_trajectory
from forage_console.live import ask as asking
from forage_console.live import stored
from forage_console.live.health import HealthChecks
from forage_console.models.services import (
    AskEvent,
    AskRequest,
    AskStatus,
    Explanation,
    HealthDetail,
    ReplayKind,
    ReplayResult,
)
from forage_console.store.stores import StoreOf
from forage_runtime.settings import Settings

router = APIRouter(tags=["services"])
Row = Annotated[int, Path(ge=0, lt=2**31)]


def _find_checks(request: Request, console: ConsoleOf) -> HealthChecks:
    state = request.app.state
    if not hasattr(state, "health_checks"):
        state.health_checks = HealthChecks(console.settings)
    checks: HealthChecks = state.health_checks
    return checks


@router.get("/runs/{run}/health")
def read_health(folder: FolderOf, checks: Annotated[HealthChecks, Depends(_find_checks)]) -> HealthDetail:
    """What every service of a run does now."""
    return checks.look(folder)


@router.get("/runs/{run}/ask")
async def read_ask_status(folder: FolderOf, console: ConsoleOf) -> AskStatus:
    """Whether the policy of a run can be asked now."""
    return await asking.read_status(folder, console.settings)


def _find_served(folder: FolderOf, console: ConsoleOf, request: AskRequest) -> Settings:
    """Fail before the stream of an answer begins."""
    settings, environments = asking.find_served(folder, console.settings)
    asking.check_environment(request, environments)
    return settings


@router.post("/runs/{run}/ask", response_class=EventSourceResponse, responses={200: {"model": AskEvent}})
async def ask(request: AskRequest, settings: Annotated[Settings, Depends(_find_served)]) -> AsyncIterator[AskEvent]:
    """Server-sent events: turns and observations of the answer to a question, as they come."""
    async for event in asking.answer(settings, request):
        yield event


@router.post("/runs/{run}/trajectories/{place}/{row}/replay")
async def replay(
    place: str, row: Row, kind: ReplayKind, folder: FolderOf, store: StoreOf, console: ConsoleOf
) -> ReplayResult:
    """Score the same text again, or sample the same prompt again."""
    found = await asyncio.to_thread(stored.read_stored, store, place, row)
    return await stored.replay(folder, console.settings, found, kind.kind)


@router.get("/runs/{run}/trajectories/{place}/{row}/explanation")
async def explain(place: str, row: Row, folder: FolderOf, store: StoreOf, console: ConsoleOf) -> Explanation:
    """The judgement of a trajectory explained."""
    found = await asyncio.to_thread(stored.read_stored, store, place, row)
    detail = await asyncio.to_thread(read_trajectory, store, place, row, None, "")
    return await stored.explain(folder, console.settings, found, detail.judgement)
