"""The HTTP side: `POST /v1/ask` through the loop, turn by turn, and the engine's OpenAI-compatible endpoints.

Refusals are `{"error": {message, type, param}}`, as OpenAI's are; `param` names the field.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from google.protobuf.json_format import MessageToDict
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException

from forage_common.clients.auth import HEADER, TokenFile
from forage_common.errors import UnavailableError
from forage_common.settings import Settings
from forage_common.telemetry import tracing
from forage_common.telemetry.logs import get_logger
from forage_common.telemetry.tracing import SpanKind
from forage_common.text.search_prompt import format_search_prompt
from forage_common.v1.rollout_pb2 import RunStreamResponse
from forage_common.v1.trajectory_pb2 import (
    ActionKind,
    ChatMessage,
    Prompt,
    Purpose,
    Sampling,
    Status,
    Trajectory,
    TrajectoryGroup,
)
from forage_rollout.engine.openai import PATHS
from forage_rollout.environments.registry import BUILT_IN, EXPECTED
from forage_rollout.serve.backend import Backend, State
from forage_rollout.serve.prompt_checks import MAX_SAMPLES, InvalidPromptError, check

MAX_BODY_BYTES = 16 * 2**20
PING_S = 15
_PROTECTED = "/v1/"
_NAMES = {
    ActionKind.ACTION_KIND_INVALID: "invalid",
    ActionKind.ACTION_KIND_SEARCH: "search",
    ActionKind.ACTION_KIND_ANSWER: "answer",
}
_PASSED_ON = ("content-type", "accept")


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Message(_Closed):
    role: Annotated[str, Field(min_length=1)]
    content: str


class Ask(_Closed):
    """A question for the policy, and how to sample its answer."""

    question: str | None = Field(None, min_length=1, description="put into the instruction that the policy knows")
    messages: list[Message] | None = Field(None, min_length=1, description="instead of question: the chat as it is")
    data_source: str | None = Field(None, description="chooses the environment; unset = that of the first reward")
    environment: str = Field("", description="a built-in environment instead of the data source's")
    samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="0 = greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, description="-1 or 0 = all")
    seed: int = Field(0, ge=0, lt=2**63, description="of the first sample, the next ones follow; 0 = unseeded")
    timeout_s: float = Field(0.0, ge=0, allow_inf_nan=False, description="0 = the service's own limit")
    stream: bool = Field(True, description="server-sent events as it happens; false = one reply at the end")

    @field_validator("environment")
    @classmethod
    def _known(cls, name: str) -> str:
        if name and name not in BUILT_IN:
            raise ValueError(f"expected {EXPECTED}, not {name!r}")
        return name

    @model_validator(mode="after")
    def _one_of_both(self) -> Ask:
        if (self.question is None) == (self.messages is None):
            raise ValueError("question, messages: expected exactly one of both")
        return self

    def prompt(self, settings: Settings) -> Prompt:
        """The prompt that the loop runs."""
        chat = self.messages or [Message(role="user", content=format_search_prompt(self.question or ""))]
        return Prompt(
            run_id=settings.run.id,
            group_uid=f"ask/{uuid.uuid4().hex}",
            data_source=self.data_source or next(iter(settings.reward.routes), ""),
            messages=[ChatMessage(role=message.role, content=message.content) for message in chat],
            samples=self.samples,
            sampling=Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed),
            purpose=Purpose.PURPOSE_ASK,
            environment=self.environment,
            timeout_s=self.timeout_s,
        )


class Answer(BaseModel):
    """What came of a question."""

    answer: str | None = Field(description="of the first sample; null where it gave none")
    answers: list[str | None] = Field(description="of every sample")
    status: list[str] = Field(description="of every sample: OK, or why it has no answer")
    group: dict[str, Any] = Field(description="forage.v1.TrajectoryGroup as protobuf JSON: the whole trajectories")


class Turn(BaseModel):
    """Event `turn`: the policy has said something."""

    sample: int
    turn: int
    action: str = Field(description="search, answer or invalid")
    tag: str = Field(description="of the action block")
    content: str = Field(description="the query or the answer")
    text: str = Field(description="all that it said")


class Observation(BaseModel):
    """Event `observation`: what the policy is shown in return."""

    sample: int
    turn: int
    text: str
    documents: list[dict[str, Any]] = Field(description="{id, contents, score}, best first")
    status: str = Field(description="of the retrieval")


class Problem(BaseModel):
    """Why a request was not served."""

    message: str
    type: str
    param: str | None = Field(None, description="the field at fault")


class Refusal(BaseModel):
    error: Problem


def make_app(backend: Backend, state: State, settings: Settings, token: TokenFile | None = None) -> FastAPI:
    """The application.

    Args:
        token: what callers of `/v1/…` must present; None = nothing.
    """
    app = FastAPI(title="Forage rollout", description=__doc__, redirect_slashes=False)
    app.add_middleware(_Guard, token=token)
    app.add_exception_handler(RequestValidationError, _unfit)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(InvalidPromptError, _invalid)
    app.add_exception_handler(UnavailableError, _unavailable)
    refusals: dict[int | str, dict[str, Any]] = {code: {"model": Refusal} for code in (401, 413, 422, 503)}
    events = {"content": {"text/event-stream": {}, "application/json": {"schema": Answer.model_json_schema()}}}

    async def ask(body: Ask, request: Request) -> Response:
        """The policy's answer to a question, with its searches.

        With `stream` the events are `turn`, `observation`, and at the end `done` (the whole answer) or `error`.
        """
        prompt = body.prompt(settings)
        check(prompt)
        state.demand()
        parent = request.headers.get(tracing.HEADER, "")
        if body.stream:
            return EventSourceResponse(_events(backend, prompt, parent), ping=PING_S)
        with _traced(prompt, parent):
            group = await _while_connected(request, backend.run(prompt))
        return JSONResponse(answer_of(group).model_dump())

    app.add_api_route("/v1/ask", ask, methods=["POST"], responses={200: events, **refusals}, response_model=None)

    async def pass_on(request: Request) -> Response:
        """Passed on to vLLM's OpenAI-compatible server within an engine, to which no loop and no search belong."""
        state.demand()
        headers = [(name, value) for name, value in request.headers.items() if name in _PASSED_ON]
        parts = backend.openai(request.method, request.url.path, headers, await request.body())
        head = await _while_connected(request, anext(parts))
        if isinstance(head, bytes):
            raise UnavailableError("the engine's reply has no head")
        status, described = head
        sent = {name: value for name, value in described if name != "content-length"}
        return StreamingResponse(_closing(parts), status, sent)

    for path, method in PATHS.items():
        app.add_api_route(path, pass_on, methods=[method], responses={**refusals}, response_model=None)
    return app


def answer_of(group: TrajectoryGroup) -> Answer:
    """A group in the form in which callers get it."""
    answers = [_answer(trajectory) for trajectory in group.trajectories]
    status = [Status.Name(t.status).removeprefix("STATUS_") for t in group.trajectories]
    whole = MessageToDict(group, preserving_proto_field_name=True)
    return Answer(answer=answers[0] if answers else None, answers=answers, status=status, group=whole)


def event_of(response: RunStreamResponse) -> tuple[str, BaseModel]:
    """The name and the content of a server-sent event."""
    kind = response.WhichOneof("event")
    if kind == "group":
        return "done", answer_of(response.group)
    if kind == "acted":
        turn = response.acted
        return "turn", Turn(
            sample=response.sample,
            turn=turn.index,
            action=_NAMES.get(turn.action, "invalid"),
            tag=turn.tag,
            content=turn.content,
            text=response.text,
        )
    turn = response.observed
    return "observation", Observation(
        sample=response.sample,
        turn=turn.index,
        text=response.text,
        documents=[{"id": d.id, "contents": d.contents, "score": d.score} for d in turn.documents],
        status=Status.Name(turn.retrieval_status).removeprefix("STATUS_"),
    )


def _answer(trajectory: Trajectory) -> str | None:
    answers = [t.content for t in trajectory.turns if t.action == ActionKind.ACTION_KIND_ANSWER]
    return answers[-1] if answers else None


async def _events(backend: Backend, prompt: Prompt, parent: str) -> AsyncIterator[ServerSentEvent]:
    try:
        with _traced(prompt, parent):
            async with aclosing(backend.stream(prompt)) as happened:
                async for response in happened:
                    name, content = event_of(response)
                    yield ServerSentEvent(data=content.model_dump_json(), event=name)
    except UnavailableError as error:
        problem = Refusal(error=Problem(message=str(error), type="unavailable"))
        yield ServerSentEvent(data=problem.model_dump_json(), event="error")


@contextmanager
def _traced(prompt: Prompt, parent: str) -> Iterator[None]:
    facts = {"http.request.method": "POST", "http.route": "/v1/ask"}
    with tracing.span("POST /v1/ask", facts, kind=SpanKind.SERVER, parent=parent, active=False) as span:
        tracing.attach_trace_context(prompt, span)
        yield


async def _closing(parts: AsyncGenerator[Any, None]) -> AsyncIterator[bytes]:
    async with aclosing(parts) as open_parts:
        async for part in open_parts:
            yield part


async def _while_connected(request: Request, answer: Awaitable[Any]) -> Any:
    """The answer, given up when the caller hangs up: nobody would read it."""
    answering = asyncio.ensure_future(answer)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.create_task(watch())
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        raise HTTPException(499, "the connection was closed before the answer")
    finally:
        watching.cancel()
        answering.cancel()
        with suppress(BaseException):
            await asyncio.wait({answering})


class _Guard:
    """Asks for the token, and limits bodies, before anything is parsed. Pure ASGI: streams pass through untouched."""

    def __init__(self, app: Any, token: TokenFile | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_PROTECTED):
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            if self._token is not None and not self._token.accepts(headers.get(HEADER, "")):
                sentence = f"this service asks for a token: send '{HEADER}: Bearer …' with the right one"
                response = _refusal(401, sentence, "unauthenticated", headers={"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
            body = await _body(receive)
            if body is None:
                sentence = f"the body is larger than {MAX_BODY_BYTES} bytes, or broke off"
                await _refusal(413, sentence, "too_large")(scope, receive, send)
                return
            receive = _again(body, receive)
        await self._app(scope, receive, send)


async def _body(receive: Callable[[], Awaitable[Any]]) -> bytes | None:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request" or len(body) + len(message.get("body", b"")) > MAX_BODY_BYTES:
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def _again(body: bytes, receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
    unread = [body]

    async def next_message() -> Any:
        return {"type": "http.request", "body": unread.pop(), "more_body": False} if unread else await receive()

    return next_message


def _unfit(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    given = (
        "" if first["type"] in ("missing", "value_error") or not field else f", not {json.dumps(first['input'])[:80]}"
    )
    reason = first["msg"].removeprefix("Value error, ")
    return _refusal(422, f"{field}: {reason}{given}" if field else reason, "invalid_request", field or None)


def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidPromptError)
    return _refusal(422, str(error), "invalid_request", error.field)


def _unavailable(_: Request, error: Exception) -> Response:
    get_logger().warning("request_refused", detail=str(error))
    return _refusal(503, str(error), "unavailable", headers={"Retry-After": "1"})


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refusal(error.status_code, str(error.detail), "invalid_request")


def _refusal(
    status: int, message: str, kind: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    body = Refusal(error=Problem(message=message, type=kind, param=param))
    return JSONResponse(body.model_dump(), status, headers)
