"""One shard: a retriever in another process with a part of the corpus."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import grpc
from prometheus_client import Counter, Gauge

from forage_proto.v1 import retriever_pb2, retriever_pb2_grpc
from forage_retriever.hits import Provenance
from forage_retriever.serve.batcher import OverloadedError
from forage_retriever.serve.grpc_api import MAX_MESSAGE_BYTES
from forage_retriever.serve.source import InvalidRequestError
from forage_retriever.serve.urgency import Urgency
from forage_retriever.serve.waiting import SearchOptions
from forage_runtime.clients.circuit import Circuit, CircuitOpenError
from forage_runtime.clients.reasons import describe_error
from forage_runtime.security.channels import open_channel
from forage_runtime.security.handshakes import record_failure
from forage_runtime.security.token_file import open_token_file
from forage_runtime.settings import Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.log_sampling import LogSampler
from forage_runtime.telemetry.logs import get_logger

PROBE_S = 1.0
"""Interval of probes."""

PROBE_TIMEOUT_S = 1.0
"""Time limit of a probe."""

FAILURES_TO_OPEN = 3

UP = Gauge("forage_retriever_shard_up", "1 where a shard answers", ["shard"])
SHARD_FAILURES = Counter(
    "forage_retriever_shard_failures_total", "Calls that a shard did not answer", ["shard", "code"]
)


class ShardUnavailableError(Exception):
    """The shard did not answer, or is not called because its circuit is open."""


class Shard:
    """Searches one shard. A circuit breaker skips an unavailable one; `watch` detects when it is back."""

    def __init__(self, address: str, settings: Settings, report_change: Callable[[], None]) -> None:
        """`report_change` is called when the shard comes, goes or changes its index.

        Raises:
            SettingsError: the file of the token, or of a certificate, cannot be read.
        """
        self.address = address
        self.provenance: Provenance | None = None
        self._report = report_change
        self._circuit = Circuit("shard", address, FAILURES_TO_OPEN, PROBE_S)
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ]
        tokens = open_token_file(settings.retriever.auth_token_file, "retriever.auth_token_file")
        self._channel = open_channel(address, settings.tls, options, tokens)
        self._stub = retriever_pb2_grpc.RetrieverStub(self._channel)
        self._sampler = LogSampler(per_minute=1)
        self._reported: tuple[bool, Provenance | None] = (False, None)
        UP.labels(address).set(0)

    @property
    def is_up(self) -> bool:
        """Whether it has answered, and its circuit is closed."""
        return self.provenance is not None and not self._circuit.is_open

    async def search(
        self, queries: Sequence[str], options: SearchOptions, urgency: Urgency
    ) -> retriever_pb2.RetrieveResponse:
        """The shard's best passages for each query, as whole rows.

        Raises:
            ShardUnavailableError: there was no answer within `urgency.timeout_s`.
            OverloadedError: the shard is overloaded.
            InvalidRequestError: the shard rejects the request.
        """
        if not self.is_up:
            raise ShardUnavailableError(f"shard {self.address} is unavailable")
        filters = [retriever_pb2.Filter(field=field, values=values) for field, values in options.filters]
        request = retriever_pb2.RetrieveRequest(
            queries=queries,
            topk=options.topk,
            filters=filters,
            mode=options.mode,
            rows=True,
            context_tokens=urgency.context_tokens,
        )
        with tracing.span("retriever.shard", {"server.address": self.address}, kind=tracing.SpanKind.CLIENT):
            return await self._call(request, urgency.timeout_s)

    async def watch(self) -> None:
        """Probe it for its provenance until cancelled."""
        while True:
            with contextlib.suppress(ShardUnavailableError, OverloadedError, InvalidRequestError):
                await self._call(retriever_pb2.RetrieveRequest(), PROBE_TIMEOUT_S)
            await asyncio.sleep(PROBE_S)  # wait: pause between two probes

    async def close(self) -> None:
        await self._channel.close()

    async def _call(self, request: retriever_pb2.RetrieveRequest, timeout_s: float) -> retriever_pb2.RetrieveResponse:
        try:
            with self._circuit.attempt():
                reply: retriever_pb2.RetrieveResponse = await self._stub.Retrieve(
                    request, timeout=timeout_s, metadata=tracing.trace_metadata()
                )
        except CircuitOpenError as error:
            raise ShardUnavailableError(str(error)) from None
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidRequestError(error.details()) from None
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise OverloadedError(f"shard {self.address}: {error.details()}") from None
            SHARD_FAILURES.labels(self.address, error.code().name).inc()
            self._report_change()
            reason = record_failure("shard", self.address, error) or describe_error(error)
            if self._sampler.admit(reason):
                get_logger().warning("shard_unavailable", shard=self.address, detail=reason)
            raise ShardUnavailableError(f"shard {self.address}: {reason}") from None
        source = reply.provenance
        self._report_change(Provenance(source.corpus_digest, source.encoder_digest, source.index_digest, source.mode))
        return reply

    def _report_change(self, source: Provenance | None = None) -> None:
        now = (self.is_up, source or self.provenance)
        if now == self._reported:
            return
        self.provenance = now[1]
        self._reported = (self.is_up, self.provenance)
        UP.labels(self.address).set(self.is_up)
        index = self.provenance.index if self.provenance else None
        get_logger().info("shard_changed", shard=self.address, up=self.is_up, index=index)
        self._report()
