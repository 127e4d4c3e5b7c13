"""The asynchronous client of the rollout service, for prompts that do not use the streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import grpc
from google.protobuf.message import Message

from forage_proto.v1.rollout_pb2 import (
    GetStatusRequest,
    GetStatusResponse,
    RunRequest,
    RunResponse,
    RunStreamRequest,
    RunStreamResponse,
)
from forage_proto.v1.rollout_pb2_grpc import RolloutStub
from forage_proto.v1.trajectory_pb2 import Prompt, TrajectoryGroup
from forage_runtime.clients.calls import RefusedError, call, check_token
from forage_runtime.clients.circuit import Circuit
from forage_runtime.clients.reasons import describe_error
from forage_runtime.errors import UnavailableError
from forage_runtime.security.channels import open_channel
from forage_runtime.security.token_file import open_token_file
from forage_runtime.settings import Settings

_MESSAGE_BYTES = 64 * 2**20
_MARGIN_S = 10.0
_STATUS_S = 30.0
_TOKEN_SETTING = "rollout.auth_token_file"


class RolloutClient:
    """Runs prompts at `rollout.grpc_address`, with the token of `rollout.auth_token_file`.

    Example:
        async with RolloutClient(settings) as rollout:
            group = await rollout.run(prompt)
    """

    def __init__(self, settings: Settings) -> None:
        """Connect on the first prompt.

        Raises:
            SettingsError: the file of the token, or of a certificate, cannot be read.
        """
        self._address = settings.rollout.grpc_address
        self._timeout_s = settings.rollout.trajectory_timeout_s + settings.rollout.score_timeout_s + _MARGIN_S
        self._circuit = Circuit("rollout", self._address)
        sizes = [("grpc.max_send_message_length", _MESSAGE_BYTES), ("grpc.max_receive_message_length", _MESSAGE_BYTES)]
        tokens = open_token_file(settings.rollout.auth_token_file, _TOKEN_SETTING)
        self._channel = open_channel(self._address, settings.tls, sizes, tokens)
        self._stub = RolloutStub(self._channel)

    async def run(self, prompt: Prompt) -> TrajectoryGroup:
        """Run all samples of a prompt; the call is repeated while an engine restarts.

        Raises:
            UnavailableError: no answer within the deadline.
            SettingsError: the token is rejected.
            RefusedError: the service rejects the prompt; the message names the field.
        """
        reply: RunResponse = await self._call(self._stub.Run, RunRequest(prompt=prompt), self._timeout_s)
        return reply.group

    async def stream(self, prompt: Prompt) -> AsyncGenerator[RunStreamResponse, None]:
        """Stream events of a prompt as they happen, the whole group last; raises as `run`, at the first failure."""
        reply = self._stub.RunStream(RunStreamRequest(prompt=prompt), timeout=self._timeout_s)
        try:
            async for event in reply:
                yield event
        except grpc.RpcError as error:
            raise self._to_typed_error(error) from error
        finally:
            reply.cancel()

    async def status(self) -> GetStatusResponse:
        """Ask for the policy that is served and the work in progress; raises as `run`."""
        reply: GetStatusResponse = await self._call(self._stub.GetStatus, GetStatusRequest(), _STATUS_S)
        return reply

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _call(self, method: Any, request: Message, timeout_s: float) -> Any:
        try:
            return await call(self._circuit, lambda left_s: method(request, timeout=left_s), timeout_s)
        except grpc.RpcError as error:
            raise self._to_typed_error(error) from error

    def _to_typed_error(self, error: grpc.RpcError) -> Exception:
        check_token(error, _TOKEN_SETTING)
        if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
            return RefusedError(error.details())
        return UnavailableError(f"the rollout service at {self._address} gave no answer: {describe_error(error)}")
