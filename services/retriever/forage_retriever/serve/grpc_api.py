"""The gRPC server: `forage.v1.Retriever`, health and reflection, on the event loop of the HTTP server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from functools import partial

import grpc
from google.protobuf.message import DecodeError

from forage_proto.v1 import retriever_pb2, retriever_pb2_grpc, trajectory_pb2
from forage_retriever.hits import Hit
from forage_retriever.serve.batcher import OverloadedError
from forage_retriever.serve.http_api import REQUESTS
from forage_retriever.serve.retrieval import SECONDS, NotReadyError, Results, Retrieval
from forage_retriever.serve.source import InvalidRequestError, QueryResult
from forage_retriever.serve.urgency import Urgency
from forage_runtime.addresses import bind
from forage_runtime.errors import UnavailableError
from forage_runtime.security.byte_budget import RequestByteBudget, Reservation
from forage_runtime.security.call_guard import CallGuard
from forage_runtime.security.call_limits import guard_calls, limit_connections
from forage_runtime.security.tls import make_grpc_server_credentials
from forage_runtime.security.token_file import open_token_file
from forage_runtime.settings import Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.grpc_probes import GrpcProbes
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.tracing import SpanKind

MAX_MESSAGE_BYTES = 256 * 2**20
"""Of a reply, which holds passages: 100,000 at most."""

MAX_REQUEST_BYTES = 16 * 2**20
"""Of a request, as over HTTP: thousands of queries."""

MAX_BYTES_IN_PROGRESS = 128 * 2**20
"""Of all requests of a process; further ones wait unread, and are refused after a while."""

MAX_CONCURRENT_CALLS = 512
"""Further calls end with RESOURCE_EXHAUSTED, and clients retry them later."""

MAX_IN_FLIGHT = 64
"""Requests of one stream that are answered concurrently; more are read as these finish."""

_ANSWERED_WITHIN = 0.95
"""Part of a call's time after which it fails."""

SERVICE = retriever_pb2.DESCRIPTOR.services_by_name["Retriever"].full_name

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: trajectory_pb2.STATUS_INVALID_INPUT,
    grpc.StatusCode.UNAVAILABLE: trajectory_pb2.STATUS_TIMEOUT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: trajectory_pb2.STATUS_TIMEOUT,
    grpc.StatusCode.DEADLINE_EXCEEDED: trajectory_pb2.STATUS_TIMEOUT,
    grpc.StatusCode.INTERNAL: trajectory_pb2.STATUS_INTERNAL,
}


class _RefusedError(Exception):
    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class RetrieverServicer(retriever_pb2_grpc.RetrieverServicer):
    """`forage.v1.Retriever` over the shared core."""

    def __init__(self, retrieval: Retrieval, ready: Health, budget: RequestByteBudget) -> None:
        self._retrieval = retrieval
        self._budget = budget
        self._ready = ready

    async def Retrieve(
        self, request: retriever_pb2.RetrieveRequest | None, context: grpc.aio.ServicerContext
    ) -> retriever_pb2.RetrieveResponse:
        try:
            parent = tracing.read_trace_context(context)
            return await self._answer_traced("Retrieve", request, parent, _read_timeout(context))
        except _RefusedError as error:
            await context.abort(error.code, str(error))
            raise AssertionError("unreachable: abort raises") from None

    async def RetrieveStream(  # type: ignore[override]  # a coroutine that writes, which grpc.aio accepts too
        self,
        requests: AsyncIterator[retriever_pb2.RetrieveStreamRequest | None],
        context: grpc.aio.ServicerContext,
    ) -> None:
        window, writing = asyncio.Semaphore(MAX_IN_FLIGHT), asyncio.Lock()
        parent = tracing.read_trace_context(context)

        async def answer(stream_request: retriever_pb2.RetrieveStreamRequest | None) -> None:
            reply = retriever_pb2.RetrieveStreamResponse(status=trajectory_pb2.STATUS_OK)
            try:
                if stream_request is not None:
                    reply.id = stream_request.id
                request = stream_request.request if stream_request is not None else None
                reply.response.CopyFrom(await self._answer_traced("RetrieveStream", request, parent))
            except _RefusedError as error:
                reply.status, reply.detail = _STATUS[error.code], str(error)
            async with writing:
                await context.write(reply)
            window.release()

        async with asyncio.TaskGroup() as answers:
            async for stream_request in requests:
                await window.acquire()
                reservation = await self._budget.take(stream_request.ByteSize() if stream_request else 0, None)
                answers.create_task(answer(stream_request)).add_done_callback(partial(_leave, reservation))

    async def _answer_traced(
        self, method: str, request: retriever_pb2.RetrieveRequest | None, parent: str, timeout_s: float = math.inf
    ) -> retriever_pb2.RetrieveResponse:
        if request is None or not request.queries:  # a front's probe of a shard
            return await self._answer(request, timeout_s)
        attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method}
        with tracing.span(f"{SERVICE}/{method}", attributes, kind=SpanKind.SERVER, parent=parent):
            return await self._answer(request, timeout_s)

    async def _answer(
        self, request: retriever_pb2.RetrieveRequest | None, timeout_s: float
    ) -> retriever_pb2.RetrieveResponse:
        if request is None:
            raise self._refuse(grpc.StatusCode.INVALID_ARGUMENT, "the bytes are not a message of this call")
        try:
            filters = tuple(sorted((one.field, tuple(sorted(set(one.values)))) for one in request.filters))
            with SECONDS.time():
                results = await self._retrieval.retrieve(
                    list(request.queries),
                    request.topk,
                    filters,
                    request.mode,
                    Urgency(request.context_tokens, timeout_s),
                )
            reply = _build_response(results, request.rows)
        except InvalidRequestError as error:
            raise self._refuse(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        except NotReadyError:
            waits_for = "; ".join(self._ready.waiting.values()) or "starting"
            raise self._refuse(grpc.StatusCode.UNAVAILABLE, waits_for) from None
        except UnavailableError as error:
            raise self._refuse(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        except OverloadedError as error:
            raise self._refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, f"overloaded: {error}") from None
        except TimeoutError:
            raise self._refuse(grpc.StatusCode.DEADLINE_EXCEEDED, "the search took too long") from None
        except Exception:  # noqa: BLE001 - gRPC would send the exception's text to the caller; counted by its code
            get_logger().exception("retrieve_failed")
            sentence = "the search failed; the service's log says why"
            raise self._refuse(grpc.StatusCode.INTERNAL, sentence) from None
        REQUESTS.labels("grpc", grpc.StatusCode.OK.name).inc()
        return reply

    def _refuse(self, code: grpc.StatusCode, sentence: str) -> _RefusedError:
        REQUESTS.labels("grpc", code.name).inc()
        return _RefusedError(code, sentence)


class GrpcServer:
    """The server and its health entries, which are NOT_SERVING until `mark_serving`."""

    def __init__(self, settings: Settings, retrieval: Retrieval, ready: Health) -> None:
        """Bind the address.

        Raises:
            UserError: the port is in use, or a file with a certificate or tokens is wrong.
        """
        options = [
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            *limit_connections(),
            ("grpc.so_reuseport", 0),  # else a second server would silently share the port
        ]
        budget = RequestByteBudget(MAX_BYTES_IN_PROGRESS, MAX_REQUEST_BYTES)
        credentials = make_grpc_server_credentials(settings.tls, "retriever")
        tokens = open_token_file(settings.retriever.auth_token_file, "retriever.auth_token_file")
        self._server = grpc.aio.server(
            options=options,
            interceptors=(*guard_calls(tokens, budget, "retriever/grpc", MAX_CONCURRENT_CALLS), CallGuard()),
        )
        self._server.add_generic_rpc_handlers((_build_handlers(RetrieverServicer(retrieval, ready, budget)),))
        self._probes = GrpcProbes(self._server, SERVICE)
        bind(self._server, settings.retriever.grpc_address, credentials)

    async def start(self) -> None:
        """Accept calls."""
        await self._server.start()
        await self._probes.set_serving(False)

    async def mark_serving(self) -> None:
        """Report SERVING to probes: there is an index."""
        await self._probes.set_serving(True)

    async def stop(self, grace_s: float) -> None:
        """Finish the calls in progress."""
        await self._probes.begin_shutdown()
        await self._server.stop(grace_s)


def _read_timeout(context: grpc.aio.ServicerContext) -> float:
    """Seconds in which a call needs its answer, so that the caller still reads the reason if there is none."""
    remaining = context.time_remaining()
    return math.inf if remaining is None else remaining * _ANSWERED_WITHIN


def _leave(reservation: Reservation, _: object) -> None:
    reservation.shrink(0)


def _build_handlers(servicer: RetrieverServicer) -> grpc.GenericRpcHandler:
    """The generated handlers, except that bytes which are no message are an invalid request, not an internal error."""
    to_bytes = retriever_pb2.RetrieveResponse.SerializeToString
    one = grpc.unary_unary_rpc_method_handler(servicer.Retrieve, _parse_request, to_bytes)
    to_bytes = retriever_pb2.RetrieveStreamResponse.SerializeToString
    stream = grpc.stream_stream_rpc_method_handler(servicer.RetrieveStream, _parse_stream_request, to_bytes)
    return grpc.method_handlers_generic_handler(SERVICE, {"Retrieve": one, "RetrieveStream": stream})


def _parse_request(message: bytes) -> retriever_pb2.RetrieveRequest | None:
    try:
        return retriever_pb2.RetrieveRequest.FromString(message)
    except DecodeError:
        return None


def _parse_stream_request(message: bytes) -> retriever_pb2.RetrieveStreamRequest | None:
    try:
        return retriever_pb2.RetrieveStreamRequest.FromString(message)
    except DecodeError:
        return None


def _build_response(results: Results, with_rows: bool) -> retriever_pb2.RetrieveResponse:
    source = results.provenance
    return retriever_pb2.RetrieveResponse(
        results=[_build_documents(result, with_rows) for result in results.per_query],
        provenance=trajectory_pb2.Provenance(
            corpus_digest=source.corpus, encoder_digest=source.encoder, index_digest=source.index, mode=source.mode
        ),
        partial=results.partial,
    )


def _build_documents(result: QueryResult, with_rows: bool) -> retriever_pb2.DocumentList:
    ids = result.passages.ids
    if with_rows:
        documents = [trajectory_pb2.Document(id=ids[row], score=score) for row, score in result.hits]
        return retriever_pb2.DocumentList(
            documents=documents, rows=[result.passages.rows[row] for row, _ in result.hits]
        )
    return retriever_pb2.DocumentList(documents=[_build_document(result, hit) for hit in result.hits])


def _build_document(result: QueryResult, hit: Hit) -> trajectory_pb2.Document:
    passages = result.passages
    return trajectory_pb2.Document(id=passages.ids[hit.row], contents=passages.contents[hit.row], score=hit.score)
