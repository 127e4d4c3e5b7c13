"""The gRPC service `forage.v1.Rollout`: prompts that do not come from the streams, and control of the engines."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import Any, NoReturn

import grpc

from forage_proto.v1.rollout_pb2 import (
    DESCRIPTOR,
    GetStatusRequest,
    GetStatusResponse,
    PauseRequest,
    PauseResponse,
    ResumeRequest,
    ResumeResponse,
    RunRequest,
    RunResponse,
    RunStreamRequest,
    RunStreamResponse,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
)
from forage_proto.v1.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from forage_proto.v1.trajectory_pb2 import Prompt
from forage_rollout.prompt_checks import InvalidPromptError, check_prompt
from forage_rollout.serve.backend import RefusedPolicyError, ServeBackend, ServiceState
from forage_runtime.addresses import bind
from forage_runtime.errors import UnavailableError
from forage_runtime.security.audit import name_grpc_caller, record_act
from forage_runtime.security.byte_budget import RequestByteBudget
from forage_runtime.security.call_guard import CallGuard
from forage_runtime.security.call_limits import guard_calls, limit_connections
from forage_runtime.security.tls import make_grpc_server_credentials
from forage_runtime.security.token_file import TokenFile
from forage_runtime.settings import TlsSettings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.grpc_probes import GrpcProbes
from forage_runtime.telemetry.tracing import Span, SpanKind

SERVICE = DESCRIPTOR.services_by_name["Rollout"].full_name
_REPLY_BYTES = 64 * 2**20
_REQUEST_BYTES = 16 * 2**20
_BYTES_IN_PROGRESS = 128 * 2**20
_CODES = {
    InvalidPromptError: grpc.StatusCode.INVALID_ARGUMENT,
    RefusedPolicyError: grpc.StatusCode.FAILED_PRECONDITION,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
}
_REFUSALS: tuple[type[Exception], ...] = tuple(_CODES)


class RolloutApi(RolloutServicer):
    """The servicer.

    Args:
        vocabulary: size of the model's vocabulary, for `check_prompt`.
        audit_file: as of `record_act`.
        has_token: whether callers must send a token.
    """

    def __init__(
        self,
        backend: ServeBackend,
        state: ServiceState,
        vocabulary: int = 0,
        audit_file: Path | None = None,
        has_token: bool = False,
    ) -> None:
        self._backend = backend
        self._state = state
        self._vocabulary = vocabulary
        self._audit_file = audit_file
        self._has_token = has_token

    async def Run(self, request: RunRequest, context: Any) -> RunResponse:  # gRPC's method names
        try:
            with _trace_call("Run", request.prompt, context) as span:
                return RunResponse(group=await self._backend.run_group(self._admit(request.prompt, span)))
        except _REFUSALS as error:
            await _abort(context, error)

    async def RunStream(self, request: RunStreamRequest, context: Any) -> AsyncIterator[RunStreamResponse]:
        try:
            with _trace_call("RunStream", request.prompt, context) as span:
                async with aclosing(self._backend.stream_group(self._admit(request.prompt, span))) as events:
                    async for event in events:
                        yield event
        except _REFUSALS as error:
            await _abort(context, error)

    async def GetStatus(self, request: GetStatusRequest, context: Any) -> GetStatusResponse:
        collector = self._state.collector
        return GetStatusResponse(
            serving=self._state.serving,
            groups_in_flight=collector.get("groups_in_flight"),
            groups_done=collector.get("groups_done"),
            tokens_generated=collector.get("generated_tokens"),
            paused=collector.get("paused") > 0,
            engines=collector.get("replicas", "Engine"),
        )

    async def Pause(self, request: PauseRequest, context: Any) -> PauseResponse:
        engines = await self._control_engines(context, lambda: self._backend.pause(request.drain))
        self._record("pause_engines", context, engines=engines, drain=request.drain)
        return PauseResponse(engines=engines)

    async def Resume(self, request: ResumeRequest, context: Any) -> ResumeResponse:
        engines = await self._control_engines(context, self._backend.resume)
        self._record("resume_engines", context, engines=engines)
        return ResumeResponse(engines=engines)

    async def UpdateWeights(self, request: UpdateWeightsRequest, context: Any) -> UpdateWeightsResponse:
        policy = request.policy
        if not policy.uri:
            detail = "policy.uri is empty: expected the folder of the weights"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, detail)
        which = {"version": policy.version, "epoch": policy.epoch, "uri": policy.uri}

        async def load() -> float:
            try:
                return await self._backend.load_policy(policy)
            except RefusedPolicyError as error:
                self._record("refuse_policy", context, **which, reason=str(error))
                raise

        pause_s = await self._control_engines(context, load)
        self._record("update_weights", context, **which)
        return UpdateWeightsResponse(serving=policy, pause_s=pause_s)

    def _admit(self, prompt: Prompt, span: Span) -> Prompt:
        """Check a prompt; returns it with a group id and the trace context of its call.

        Raises:
            InvalidPromptError, UnavailableError: it cannot be run, or not now.
        """
        check_prompt(prompt, self._vocabulary)
        self._state.require_running()
        if not prompt.group_uid:
            prompt.group_uid = f"call/{uuid.uuid4().hex}"
        tracing.attach_trace_context(prompt, span)
        return prompt

    def _record(self, act: str, context: Any, **details: Any) -> None:
        record_act(act, file=self._audit_file, **name_grpc_caller(context, self._has_token), **details)

    async def _control_engines(self, context: Any, change: Callable[[], Awaitable[Any]]) -> Any:
        try:
            self._state.require_running()
            result = await change()
            await self._state.refresh(self._backend)  # so that the next GetStatus shows the change
            return result
        except _REFUSALS as error:
            await _abort(context, error)


def _trace_call(method: str, prompt: Prompt, context: Any) -> AbstractContextManager[Span]:
    attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method}
    parent = tracing.read_trace_context(context) or prompt.traceparent
    return tracing.span(f"{SERVICE}/{method}", attributes, kind=SpanKind.SERVER, parent=parent, active=False)


def make_server(
    address: str, servicer: RolloutServicer, token: TokenFile | None, tls: TlsSettings
) -> tuple[grpc.aio.Server, GrpcProbes]:
    """Build a server that is bound but not started, and what it answers to health checks.

    Raises:
        UserError: the port is in use, or a file with a certificate is wrong.
    """
    budget = RequestByteBudget(_BYTES_IN_PROGRESS, _REQUEST_BYTES)
    credentials = make_grpc_server_credentials(tls, "rollout")
    server = grpc.aio.server(
        interceptors=(*guard_calls(token, budget, "rollout/grpc"), CallGuard()),
        options=[
            ("grpc.so_reuseport", 0),
            *limit_connections(),
            ("grpc.max_receive_message_length", _REQUEST_BYTES),
            ("grpc.max_send_message_length", _REPLY_BYTES),
        ],
    )
    add_RolloutServicer_to_server(servicer, server)
    probes = GrpcProbes(server, SERVICE)
    bind(server, address, credentials)
    return server, probes


async def _abort(context: Any, error: Exception) -> NoReturn:
    code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
    await context.abort(code, str(error))
    raise AssertionError("unreachable: abort raises")
