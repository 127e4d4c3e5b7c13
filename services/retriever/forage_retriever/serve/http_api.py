"""Searches in the formats of several projects' clients, probes, metrics, and the reload of the index.

Replies to POST carry the headers `X-Forage-Corpus-Digest`, `X-Forage-Encoder-Digest`,
`X-Forage-Index-Digest` and `X-Forage-Mode`; one that lacks the passages of some shards also has `X-Forage-Partial: 1`.

Errors are `{"detail": sentence}`:

- 422: the request is invalid; the sentence names the field, the error and what to send.
- 401: the token is missing or wrong, where `retriever.auth_token_file` is set; 403: the client certificate is missing.
- 413, 408: the body is larger than 16 MiB, or did not arrive within 20 s.
- 503 with `Retry-After`: the same request may succeed later. A search waits for a busy queue, an index that is still
  loading or an encoder that is down, so it comes only where 300 s or the request's `timeout_s` are
  over, 65,536 queries wait already, or the service stops.
- 409: there is no index to reload, or it cannot be loaded.
- 500: an internal error; the log has the details.

The service itself shows this API at `/docs`, for a browser, and at `/openapi.json`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import lru_cache, reduce
from operator import or_
from typing import Any, TypeAlias, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, Counter, generate_latest
from pydantic import BaseModel, ValidationError

from forage_retriever.hits import Provenance
from forage_retriever.serve import adapters
from forage_retriever.serve.adapters import Body
from forage_retriever.serve.batcher import OverloadedError
from forage_retriever.serve.retrieval import SECONDS, NotReadyError, Retrieval
from forage_retriever.serve.source import InvalidRequestError
from forage_retriever.serve.swap import IndexSwap, ReloadError, ReloadReply
from forage_runtime.errors import UnavailableError
from forage_runtime.security.audit import name_http_caller
from forage_runtime.security.http.guard import BodyError, RequestGuard, read_body
from forage_runtime.security.token_file import TokenFile
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.tracing import SpanKind
from forage_runtime.telemetry.waits import list_waits

WIRE = "retriever/http"
MAX_BODY_BYTES = 16 * 2**20
BODY_TIMEOUT_S = 20.0
RETRY_AFTER_S = 1
REQUESTS = Counter("forage_retriever_requests_total", "Requests answered", ["transport", "code"])

_REQUEST: ContextVar[Request] = ContextVar("request")
_B = TypeVar("_B", bound=Body)
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
Answer: TypeAlias = Callable[[bytes], Awaitable[Response]]


class Refusal(BaseModel):
    """The reason why a request was not served."""

    detail: str


class Readiness(BaseModel):
    """Whether searches are answered and, if not, what the service is waiting for."""

    ready: bool
    waiting_for: dict[str, str]


class _RefusedError(Exception):
    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class _Route(APIRoute):  # type: ignore[misc]
    """A route that FastAPI only describes: its parsing of requests would cost more than a search."""

    def get_route_handler(self) -> Endpoint:
        endpoint: Endpoint = self.endpoint
        return endpoint


def make_app(
    retrieval: Retrieval,
    health: Health,
    swap: IndexSwap | None = None,
    tokens: TokenFile | None = None,
    *,
    needs_certificate: bool = False,
) -> FastAPI:
    """The application.

    Args:
        health: says what the start is waiting for.
        swap: reloads the index; None for a front.
        tokens: what callers must send, except to probes and metrics; None: they need no token.
        needs_certificate: whether callers need a client certificate, except for probes.
    """
    app = FastAPI(title="Forage retriever", description=__doc__, redirect_slashes=False)
    app.add_middleware(
        RequestGuard, wire=WIRE, refuse=_refuse_caller, tokens=tokens, needs_certificate=needs_certificate
    )
    app.router.route_class = _Route

    async def retrieve(body: bytes) -> Response:
        """Documents for each query. `queries` as Search-R1 sends them, or one `query` as SkyRL and rLLM do."""
        return await _search(retrieval, _parse_search(body))

    async def queries(body: bytes) -> Response:
        """Documents for each query, for the clients of R1-Searcher."""
        return await _search(retrieval, _parse_body(adapters.QueriesRequest, body))

    async def access(body: bytes) -> Response:
        """Pages by address, for the clients of ASearcher. Needs the field `url` in `retriever.filter_fields`."""
        return JSONResponse({"result": await retrieval.find_pages(_parse_body(adapters.AccessRequest, body).urls)})

    async def healthz(_: Request) -> Response:
        """Whether the process answers."""
        return JSONResponse({"status": "ok"})

    async def readyz(_: Request) -> Response:
        """Whether searches are answered."""
        waiting = health.waiting
        return JSONResponse({"ready": not waiting, "waiting_for": waiting}, 503 if waiting else 200)

    async def waitz(_: Request) -> Response:
        """Every wait in progress: for what, on whom, since when, and when it gives up."""
        return JSONResponse({"waits": list_waits()})

    async def metrics(_: Request) -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def reload(_: bytes) -> Response:
        """Replace the index by the one that the settings name now; takes no body."""
        if swap is None:
            raise _RefusedError(409, "this retriever merges the answers of shards: reload the shards")
        caller = name_http_caller(_REQUEST.get(), tokens is not None)
        return JSONResponse((await swap.reload(**caller)).model_dump())

    def post(path: str, answer: Answer, bodies: tuple[type[Body], ...], replies: tuple[type[BaseModel], ...]) -> None:
        codes = (400, 401, 403, 408, 413, 422, 500, 503) if bodies else (401, 403, 409, 500)
        endpoint = _make_endpoint(retrieval, health, answer, path)
        app.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            name=answer.__name__,
            description=answer.__doc__,
            responses={200: {"model": reduce(or_, replies)}} | {code: {"model": Refusal} for code in codes},
            openapi_extra={"requestBody": _describe_bodies(bodies)} if bodies else None,
        )
        # FastAPI would redirect, to the address that it believes to have.
        app.add_api_route(f"{path}/", endpoint, methods=["POST"], include_in_schema=False)

    bodies = adapters.RetrieveRequest, adapters.QueryRequest
    post("/retrieve", retrieve, bodies, (adapters.RetrieveReply, adapters.QueryReply))
    post("/queries", queries, (adapters.QueriesRequest,), (adapters.QueriesReply,))
    post("/access", access, (adapters.AccessRequest,), (adapters.AccessReply,))
    post("/reload", reload, (), (ReloadReply,))
    states: dict[int | str, dict[str, Any]] = {200: {"model": Readiness}, 503: {"model": Readiness}}
    app.add_api_route("/readyz", readyz, methods=["GET"], responses=states)
    app.add_api_route("/healthz", healthz, methods=["GET"])
    app.add_api_route("/waitz", waitz, methods=["GET"])
    app.add_api_route("/health", healthz, methods=["GET"], include_in_schema=False)  # rLLM's client probes it
    app.add_api_route("/metrics", metrics, methods=["GET"], response_class=Response)
    return app


def _make_endpoint(retrieval: Retrieval, health: Health, answer: Answer, path: str) -> Endpoint:
    name, attributes = f"POST {path}", {"http.request.method": "POST", "http.route": path}

    async def endpoint(request: Request) -> Response:
        _REQUEST.set(request)
        with tracing.span(
            name, attributes, kind=SpanKind.SERVER, parent=request.headers.get(tracing.HEADER, "")
        ) as span:
            response = await _answer_safely(request, answer, health)
            span.set_attributes({"http.response.status_code": response.status_code})
            if response.status_code >= 500:
                tracing.mark_failed(span, bytes(response.body).decode())
        if "x-forage-mode" not in response.headers and (source := retrieval.provenance) is not None:
            response.raw_headers += _provenance_headers(source)
        REQUESTS.labels("http", str(response.status_code)).inc()
        return response

    return endpoint


async def _search(retrieval: Retrieval, search: adapters.Search) -> Response:
    with SECONDS.time():
        results = await retrieval.retrieve(
            search.texts, search.limit, search.conditions, search.mode or "", search.urgency
        )
    response = Response(search.build_reply(results), media_type="application/json")
    response.raw_headers += _provenance_headers(results.provenance)
    if results.partial:
        response.headers["X-Forage-Partial"] = "1"
    return response


@lru_cache(16)
def _provenance_headers(source: Provenance) -> list[tuple[bytes, bytes]]:
    return [
        (b"x-forage-corpus-digest", source.corpus.encode()),
        (b"x-forage-encoder-digest", source.encoder.encode()),
        (b"x-forage-index-digest", source.index.encode()),
        (b"x-forage-mode", source.mode.encode()),
    ]


def _parse_search(body: bytes) -> adapters.Search:
    try:
        return adapters.RetrieveRequest.model_validate_json(body)
    except ValidationError as error:
        if not _lacks_field(error, "queries"):
            raise _make_refusal(error, adapters.RetrieveRequest) from None
    try:
        return adapters.QueryRequest.model_validate_json(body)
    except ValidationError as error:
        if _lacks_field(error, "query"):
            raise _RefusedError(422, f"queries: Field required; send {adapters.RetrieveRequest.example}") from None
        raise _make_refusal(error, adapters.QueryRequest) from None


def _lacks_field(error: ValidationError, field: str) -> bool:
    return any(wrong["type"] == "missing" and wrong["loc"] == (field,) for wrong in error.errors(include_url=False))


def _parse_body(model: type[_B], body: bytes) -> _B:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _make_refusal(error, model) from None


def _make_refusal(error: ValidationError, model: type[Body]) -> _RefusedError:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part)[:80] for part in first["loc"]) or "the body"
    return _RefusedError(422, f"{place}: {first['msg']}; send {model.example}")


async def _answer_safely(request: Request, answer: Answer, health: Health) -> Response:
    try:
        body = await read_body(request.receive, MAX_BODY_BYTES, BODY_TIMEOUT_S, "send fewer queries at a time")
        return await _while_connected(request, answer(body))
    except BodyError as error:
        return _refuse(error.status, str(error))
    except _RefusedError as error:
        return _refuse(error.code, str(error))
    except InvalidRequestError as error:
        return _refuse(422, str(error))
    except ReloadError as error:
        return _refuse(409, str(error))
    except NotReadyError:
        return _refuse_for_now("; ".join(health.waiting.values()) or "starting")
    except OverloadedError as error:
        return _refuse_for_now(f"overloaded: {error}")
    except UnavailableError as error:
        return _refuse_for_now(str(error))
    except TimeoutError:
        return _refuse_for_now("the search took too long")
    except Exception:  # noqa: BLE001 - a failed search must not cost the connection; counted by its code
        get_logger().exception("request_failed", path=request.url.path)
        return _refuse(500, "the request failed; the service's log says why")


async def _while_connected(request: Request, answer: Awaitable[Response]) -> Response:
    """The answer; cancelled when the caller disconnects, because nobody would read it."""
    answering = asyncio.current_task()
    assert answering is not None
    disconnected = False

    async def watch() -> None:
        nonlocal disconnected
        while (await request.receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        answering.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await answer
    except asyncio.CancelledError:
        if not disconnected or answering.uncancel():
            raise  # cancelled by this process, not by the caller
        return _refuse(400, "the connection was closed before the answer")
    finally:
        watching.cancel()


def _refuse_for_now(sentence: str) -> Response:
    response = _refuse(503, sentence)
    response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def _refuse(code: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"detail": sentence}, code, headers)


def _refuse_caller(code: int, sentence: str, _: str, headers: Mapping[str, str]) -> Response:
    return _refuse(code, sentence, headers)


def _describe_bodies(bodies: tuple[type[Body], ...]) -> dict[str, Any]:
    schemas = [body.model_json_schema() for body in bodies]
    schema = {"anyOf": schemas} if len(schemas) > 1 else schemas[0]
    return {"required": True, "content": {"application/json": {"schema": schema}}}
