"""The page Ask: a question for the policy that a run serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from upath import UPath

from forage_console.details.trajectory import describe_turn, judge
from forage_console.live.run_services import describe_end, load_run_settings, open_streams
from forage_console.models.services import AskEvent, AskRequest, AskStatus
from forage_console.reading.files import is_alive
from forage_proto.v1.rollout_pb2 import GetStatusResponse, RunStreamResponse
from forage_proto.v1.trajectory_pb2 import ActionKind, Status, Trajectory
from forage_records.sampling import build_ask_prompt
from forage_runtime.clients.calls import RefusedError
from forage_runtime.clients.health import ANSWER_S
from forage_runtime.clients.rollout import RolloutClient
from forage_runtime.errors import ForageError, UnavailableError
from forage_runtime.settings import Settings
from forage_runtime.text.enums import name_value

BUILT_IN = ("search", "single_turn")
"""Environments that every rollout service has."""


async def read_status(folder: UPath, own: Settings) -> AskStatus:
    """Whether the policy of a run can be asked now."""
    try:
        settings, environments = await asyncio.to_thread(find_served, folder, own)
        status = await _read_rollout(settings)
    except ForageError as error:
        return AskStatus(is_ready=False, problem=str(error), version=None, environments=[])
    version = status.serving.version if status.HasField("serving") else None
    if status.paused or not status.engines:
        why = "the engines are paused" if status.paused else "no engine runs yet"
        problem = f"{why}: the page Health says what they wait for"
        return AskStatus(is_ready=False, problem=problem, version=version, environments=environments)
    return AskStatus(is_ready=True, problem=None, version=version, environments=environments)


def find_served(folder: UPath, own: Settings) -> tuple[Settings, list[str]]:
    """The settings with which the services of a run are asked, and the names of its environments.

    Raises:
        RefusedError: its settings name other machines.
        UnavailableError: its services have ended.
    """
    settings = load_run_settings(folder, own)
    try:
        client = open_streams(settings)
        knows = client.read_policy() is not None
        declared = client.read_environments() or {}
    except ForageError:
        knows, declared = False, {}
    if not knows and not is_alive(folder):
        raise UnavailableError(describe_end(folder))
    return settings, sorted({*BUILT_IN, *declared.values()})


async def answer(settings: Settings, request: AskRequest) -> AsyncIterator[AskEvent]:
    """Ask, and yield turns and observations as they come; a failure is the last event."""
    try:
        prompt = build_ask_prompt(settings, request.question, request.temperature, request.environment)
        status = await _read_rollout(settings)
        version = status.serving.version if status.HasField("serving") else None
        async with RolloutClient(settings) as rollout, aclosing(rollout.stream(prompt)) as events:
            async for event in events:
                yield _describe(event, version)
    except ForageError as error:
        yield _end("error", str(error))


async def _read_rollout(settings: Settings) -> GetStatusResponse:
    """
    Raises:
        UnavailableError: the rollout service does not answer soon.
    """
    try:
        async with asyncio.timeout(ANSWER_S), RolloutClient(settings) as rollout:
            return await rollout.status()
    except TimeoutError:
        address = settings.rollout.grpc_address
        raise UnavailableError(
            f"the rollout service at {address} does not answer, so no policy is served: the page Health says why"
        ) from None


def _describe(event: RunStreamResponse, version: int | None) -> AskEvent:
    kind = event.WhichOneof("event")
    if kind == "group":
        return _describe_end(event.group.trajectories[0], version)
    turn = event.acted if kind == "acted" else event.observed
    name = "turn" if kind == "acted" else "observation"
    detail = describe_turn(turn, None, [])
    return AskEvent(kind=name, turn=detail, text=event.text, answer=None, judgement=None, version=version)


def _describe_end(found: Trajectory, version: int | None) -> AskEvent:
    sampled = found.segments[-1].version if found.segments else version
    if found.status != Status.STATUS_OK:
        return _end("error", f"{name_value(Status, found.status)}: {found.status_detail}", sampled)
    answers = [turn.content for turn in found.turns if turn.action == ActionKind.ACTION_KIND_ANSWER]
    judgement = judge(found.score) if found.score.status == Status.STATUS_OK else None
    return AskEvent(
        kind="end",
        turn=None,
        text="",
        answer=answers[-1] if answers else None,
        judgement=judgement,
        version=sampled,
    )


def _end(kind: str, text: str, version: int | None = None) -> AskEvent:
    return AskEvent(kind=kind, turn=None, text=text, answer=None, judgement=None, version=version)


def check_environment(request: AskRequest, known: list[str]) -> None:
    """
    Raises:
        RefusedError: the run has no such environment.
    """
    if request.environment and request.environment not in known:
        raise RefusedError(f"there is no environment '{request.environment}': choose {', '.join(known)} or none")
