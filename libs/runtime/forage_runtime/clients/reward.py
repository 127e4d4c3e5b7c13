"""The asynchronous client of the reward service, and the message it sends for a trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from forage_proto.v1.reward_pb2 import (
    DescribeRequest,
    DescribeResponse,
    ExplainRequest,
    ExplainResponse,
    ScoredItem,
    ScoreItem,
    ScoreRequest,
    ScoreResponse,
)
from forage_proto.v1.reward_pb2_grpc import RewardStub
from forage_proto.v1.trajectory_pb2 import Score, Trajectory, Turn
from forage_runtime.clients.calls import MalformedReplyError, RefusedError, call, check_token
from forage_runtime.clients.circuit import Circuit
from forage_runtime.security.channels import open_channel
from forage_runtime.security.token_file import open_token_file
from forage_runtime.settings import Settings
from forage_runtime.telemetry import tracing

_MESSAGE_BYTES = 32 * 2**20
"""The most that the service reads at once."""

_BATCH_BYTES = 8 * 2**20
"""Of the items of one request: more are sent in several, one after the other."""

_OVERHEAD_BYTES = 64
_DESCRIBE_S = 4.0
_TOKEN_SETTING = "reward.auth_token_file"


class RewardClient:
    """Calls `forage.v1.Reward.Score`, at all replicas that the address resolves to in turn."""

    def __init__(self, settings: Settings) -> None:
        """Connect on the first call.

        Raises:
            SettingsError: the file of the token, or of a certificate, cannot be read.
        """
        address = settings.reward.grpc_address
        self._timeout_s = settings.rollout.score_timeout_s
        self._circuit = Circuit("reward", address)
        sizes = [("grpc.max_send_message_length", _MESSAGE_BYTES), ("grpc.max_receive_message_length", _MESSAGE_BYTES)]
        tokens = open_token_file(settings.reward.auth_token_file, _TOKEN_SETTING)
        self._channel = open_channel(address, settings.tls, sizes, tokens)
        self._stub = RewardStub(self._channel)

    async def score(self, items: Sequence[ScoreItem]) -> list[ScoredItem]:
        """Score items; the results are in the order of the items.

        Raises:
            UnavailableError: no answer within the deadline.
            SettingsError: the token is rejected.
            grpc.RpcError: the service rejected the request.
            MalformedReplyError: the reply does not match the items.
            RefusedError: an item is larger than the service reads.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        batches = list(split_items(items))
        return [scored for batch in batches for scored in await self._score_batch(batch, deadline)]

    async def _score_batch(self, items: Sequence[ScoreItem], deadline: float) -> Sequence[ScoredItem]:
        request = ScoreRequest(items=items)
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        attributes: tracing.Attributes = {"server.address": self._circuit.address, "forage.items": len(items)}
        with tracing.span("reward.score", attributes, kind=tracing.SpanKind.CLIENT):
            reply: ScoreResponse = await self._call(self._stub.Score, request, left_s)
            if [item.trajectory_id for item in reply.items] != [item.trajectory_id for item in items]:
                raise MalformedReplyError("the reply of the reward service does not match the request")
        return reply.items

    async def list_data_sources(self) -> frozenset[str]:
        """List the data sources that have a reward; raises as `score`."""
        reply: DescribeResponse = await self._call(self._stub.Describe, DescribeRequest(), _DESCRIBE_S)
        return frozenset(use.data_source for reward in reply.rewards for use in reward.uses if not use.shadow)

    async def explain(self, item: ScoreItem, score: Score) -> str:
        """Explain the score of an item for people; raises as `score`."""
        request = ExplainRequest(item=item, score=score)
        reply: ExplainResponse = await self._call(self._stub.Explain, request, _DESCRIBE_S)
        return reply.text

    async def close(self) -> None:
        await self._channel.close()

    async def _call(self, method: Any, request: Message, timeout_s: float) -> Any:
        metadata = tracing.trace_metadata()
        try:
            return await call(
                self._circuit, lambda left_s: method(request, timeout=left_s, metadata=metadata), timeout_s
            )
        except grpc.RpcError as error:
            check_token(error, _TOKEN_SETTING)
            raise


def split_items(items: Sequence[ScoreItem], most: int = _BATCH_BYTES) -> Iterator[list[ScoreItem]]:
    """Split items into batches that the service reads.

    Args:
        most: bytes of a batch of several items.

    Raises:
        RefusedError: an item is larger than the service reads.
    """
    batch: list[ScoreItem] = []
    held = 0
    for item in items:
        size = item.ByteSize()
        if size > _MESSAGE_BYTES - _OVERHEAD_BYTES:
            sentence = f"trajectory {item.trajectory_id} has {size} bytes, and rewards read {_MESSAGE_BYTES} at most"
            raise RefusedError(sentence)
        if batch and held + size > most:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch


def build_score_item(trajectory: Trajectory, end_of_turn: str) -> ScoreItem:
    """Build the part of a trajectory that rewards read; the passages are in its spans.

    Args:
        end_of_turn: text with which the policy's tokenizer ends a turn.
    """
    return ScoreItem(
        trajectory_id=trajectory.id,
        data_source=trajectory.data_source,
        spans=trajectory.spans,
        ground_truth=trajectory.ground_truth,
        end_of_turn=end_of_turn,
        # Without the documents.
        turns=[
            Turn(
                index=turn.index,
                action=turn.action,
                content=turn.content,
                executed=turn.executed,
                retrieval_status=turn.retrieval_status,
                tag=turn.tag,
            )
            for turn in trajectory.turns
        ],
    )
