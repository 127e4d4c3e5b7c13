"""The HTTP API: `POST /v1/ask` through the loop, turn by turn, and the engine's OpenAI-compatible endpoints.

Errors are `{"error": {message, type, param}}` as OpenAI's are; `param` names the invalid field.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException

from forage_proto.v1.trajectory_pb2 import Prompt
from forage_rollout.chats.serving import HEADER
from forage_rollout.engine.openai import CHATS, PATHS
from forage_rollout.engine.sampling_parameters import RefusedSamplingError
from forage_rollout.prompt_checks import InvalidPromptError, check_prompt
from forage_rollout.serve.backend import ServeBackend, ServiceState
from forage_rollout.serve.http_messages import Answer, Ask, Problem, Refusal, Take, Taken, build_answer, build_event
from forage_rollout.serve.session_guard import PREFIX, SessionGuard, SessionKeys, find_session
from forage_runtime.errors import UnavailableError
from forage_runtime.files.template_values import keep_template_date
from forage_runtime.security.http.guard import (
    App,
    BodyError,
    Receive,
    RequestGuard,
    Scope,
    Send,
    read_body,
    replay_body,
)
from forage_runtime.security.token_file import TokenFile, read_bearer
from forage_runtime.settings import Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.tracing import SpanKind
from forage_runtime.text.terminal import printable

WIRE = "rollout/http"
MAX_BODY_BYTES = 16 * 2**20
BODY_TIMEOUT_S = 20.0
PING_INTERVAL_S = 15
_PROTECTED_PREFIX = "/v1/"
TAKE = f"{PREFIX}next"
MAX_SESSION_BYTES = 4 * 2**20
"""Of a request of a session: a context of a million tokens, in English."""
_VERBS = ("chat/completions", "keep", "end")
_FORWARDED_HEADERS = ("content-type", "accept")
_REFUSALS = (400, 401, 403, 408, 413, 422, 503)
_HISTORY = {
    "headers": {
        HEADER: {
            "schema": {"type": "string"},
            "description": "Only where the history has replies. exact: the prompt begins with the tokens from which the"
            " last of them was sampled, and with its own. changed-from=N: the template or the client has rewritten the"
            " history, and token N of the prompt, counted from 0, is the first that is another one. unknown: this"
            " replica has sampled none of them, or has forgotten it.",
        }
    }
}


def make_app(
    backend: ServeBackend,
    state: ServiceState,
    settings: Settings,
    token: TokenFile | None = None,
    *,
    needs_certificate: bool = False,
) -> FastAPI:
    """Build the application.

    Args:
        token: callers of `/v1/…` must send it; None = they need no token.
        needs_certificate: whether callers need a client certificate.
    """
    settings = keep_template_date(settings)  # read once: questions are answered on the event loop
    app = FastAPI(title="Forage rollout", description=__doc__, redirect_slashes=False)
    keys = SessionKeys()
    app.add_middleware(_BodyLimit)
    app.add_middleware(SessionGuard, wire=WIRE, keys=keys, refuse=_build_refusal)
    app.add_middleware(
        RequestGuard,
        wire=WIRE,
        refuse=_refuse_caller,
        tokens=token,
        needs_certificate=needs_certificate,
        protects=is_protected,
    )
    for error in (RequestValidationError, HTTPException, InvalidPromptError, RefusedSamplingError, UnavailableError):
        app.add_exception_handler(error, _refuse)
    refusals: dict[int | str, dict[str, Any]] = {code: {"model": Refusal} for code in _REFUSALS}
    events = {"content": {"text/event-stream": {}, "application/json": {"schema": Answer.model_json_schema()}}}

    async def ask(body: Ask, request: Request) -> Response:
        """The policy's answer to a question, with its searches.

        With `stream` the events are `turn`, `observation`, and at the end `done` (the whole answer) or `error`. 400 has
        the engine's own words on a sampling parameter that it does not take.
        """
        prompt = body.build_prompt(settings)
        check_prompt(prompt)
        state.require_running()
        await backend.check_sampling(prompt.sampling)
        parent = request.headers.get(tracing.HEADER, "")
        if body.stream:
            return EventSourceResponse(_stream_events(backend, prompt, parent), ping=PING_INTERVAL_S)
        with _trace_ask(prompt, parent):
            group = await _await_while_connected(request, backend.run_group(prompt))
        return JSONResponse(build_answer(group).model_dump())

    app.add_api_route("/v1/ask", ask, methods=["POST"], responses={200: events, **refusals}, response_model=None)

    async def forward(request: Request) -> Response:
        """Forwarded to vLLM's OpenAI-compatible server in an engine: no loop, no search."""
        state.require_running()
        headers = [(name, value) for name, value in request.headers.items() if name in _FORWARDED_HEADERS]
        parts = backend.forward_openai(request.method, request.url.path, headers, await request.body())
        head = await _await_while_connected(request, anext(parts))
        if isinstance(head, bytes):
            raise UnavailableError("the engine's reply has no head")
        status, reply_headers = head
        sent = {name: value for name, value in reply_headers if name != "content-length"}
        return StreamingResponse(_iterate_and_close(parts), status, sent)

    async def take(body: Take, request: Request) -> Response:
        """The next session that waits for a worker; 204 where none does within `wait_s`."""
        state.require_running()
        taken = await _await_while_connected(request, backend.take_session(body.wait_s))
        if taken is None:
            return Response(status_code=204)
        keys.add(taken["id"], taken["key"])
        return JSONResponse(taken | {"base_url": f"{PREFIX}{taken['id']}"})

    app.add_api_route(
        TAKE, take, methods=["POST"], responses={200: {"model": Taken}, 204: {}, **refusals}, response_model=None
    )

    async def answer_session(session: str, request: Request) -> Response:
        """A request of a session's worker, with the session's key as bearer token; refusals as OpenAI's are.

        `chat/completions` samples the reply to a chat, `keep` is a sign of life, `end` takes `{"reward": number or
        null}` or `{"error": text}`. 410: the session is over, or its worker was silent: take another one.
        """
        verb, key = request.scope["route"].path.partition("}/")[2], read_bearer(request.headers["authorization"])
        reply = await _await_while_connected(request, backend.answer_session(session, key, verb, await request.body()))
        if reply.status == 410 or (verb == "end" and reply.status == 200):
            keys.remove(session)
        return Response(reply.content, reply.status, media_type=reply.media_type)

    for verb in _VERBS:
        path = f"{PREFIX}{{session}}/{verb}"
        app.add_api_route(path, answer_session, methods=["POST"], responses=refusals, response_model=None)

    for path, method in PATHS.items():
        replies = refusals | ({200: _HISTORY} if path == CHATS else {})
        app.add_api_route(path, forward, methods=[method], responses=replies, response_model=None)
    return app


async def _stream_events(backend: ServeBackend, prompt: Prompt, parent: str) -> AsyncIterator[ServerSentEvent]:
    try:
        with _trace_ask(prompt, parent):
            async with aclosing(backend.stream_group(prompt)) as responses:
                async for response in responses:
                    name, content = build_event(response)
                    yield ServerSentEvent(data=content.model_dump_json(), event=name)
    except UnavailableError as error:
        problem = Refusal(error=Problem(message=str(error), type="unavailable"))
        yield ServerSentEvent(data=problem.model_dump_json(), event="error")


@contextmanager
def _trace_ask(prompt: Prompt, parent: str) -> Iterator[None]:
    attributes = {"http.request.method": "POST", "http.route": "/v1/ask"}
    with tracing.span("POST /v1/ask", attributes, kind=SpanKind.SERVER, parent=parent, active=False) as span:
        tracing.attach_trace_context(prompt, span)
        yield


async def _iterate_and_close(parts: AsyncGenerator[Any, None]) -> AsyncIterator[bytes]:
    async with aclosing(parts) as open_parts:
        async for part in open_parts:
            yield part


async def _await_while_connected(request: Request, answer: Awaitable[Any]) -> Any:
    """Await the answer; cancel it when the caller disconnects."""
    answering = asyncio.ensure_future(answer)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.create_task(watch())
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)  # wait: the life of a request
        if answering.done():
            return answering.result()
        raise HTTPException(499, "the connection was closed before the answer")
    finally:
        watching.cancel()
        answering.cancel()
        with suppress(BaseException):
            await asyncio.wait({answering})  # wait: a task that was cancelled


class _BodyLimit:
    """Limits bodies before anything is parsed. Pure ASGI, so that replies are streamed and not collected."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_PROTECTED_PREFIX):
            most = MAX_SESSION_BYTES if find_session(scope["path"]) else MAX_BODY_BYTES
            try:
                body = await read_body(receive, most, BODY_TIMEOUT_S)
            except BodyError as error:
                kind = "too_large" if error.status == 413 else "invalid_request"
                await _build_refusal(error.status, str(error), kind)(scope, receive, send)
                return
            receive = replay_body(body, receive)
        await self._app(scope, receive, send)


def is_protected(path: str) -> bool:
    """Whether a path needs the token: the description of the API does not, and requests of a session need its key."""
    return path.startswith(_PROTECTED_PREFIX) and not find_session(path)


def _refuse_caller(status: int, sentence: str, kind: str, headers: Mapping[str, str]) -> JSONResponse:
    return _build_refusal(status, sentence, kind, headers=headers)


def _refuse(request: Request, error: Exception) -> Response:
    match error:
        case InvalidPromptError():
            return _build_refusal(422, str(error), "invalid_request", error.field)
        case RefusedSamplingError():
            return _build_refusal(400, str(error), "invalid_request", error.parameter or None)
        case UnavailableError():
            get_logger().warning("request_refused", detail=str(error))
            return _build_refusal(503, str(error), "unavailable", headers={"Retry-After": "1"})
        case HTTPException():
            return _build_refusal(error.status_code, str(error.detail), "invalid_request")
    assert isinstance(error, RequestValidationError)
    kind = request.headers.get("content-type", "")
    if "json" not in kind:  # FastAPI reads no other body, and says of it that it is no object
        sent = f"it is {kind[:80]}" if kind else "there is none"
        sentence = f"the body must be JSON, and the header content-type must say application/json: {sent}"
        return _build_refusal(422, sentence, "invalid_request")
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    given = (
        "" if first["type"] in ("missing", "value_error") or not field else f", not {json.dumps(first['input'])[:80]}"
    )
    reason = first["msg"].removeprefix("Value error, ")
    return _build_refusal(422, f"{field}: {reason}{given}" if field else reason, "invalid_request", field or None)


def _build_refusal(
    status: int, message: str, kind: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    # What the caller sent is in both, also what no encoding has.
    param = None if param is None else printable(param)
    body = Refusal(error=Problem(message=printable(message), type=kind, param=param))
    return JSONResponse(body.model_dump(), status, headers)
