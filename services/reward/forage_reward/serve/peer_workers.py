"""The workers of one service score a long batch together, over unix sockets that only they know."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from forage_common.v1 import reward_pb2, reward_pb2_grpc

SHARE_FROM = 64
"""Items of a batch; sending fewer elsewhere gains little."""

PATIENCE_S = 5.0
"""With a sibling; then its part is scored by who asked."""

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
"""What one of them took from a client, the others take from it."""


@dataclass(frozen=True)
class Place:
    """A worker among its siblings: the folder of their sockets, its own number from 0, and how many they are."""

    folder: Path
    index: int
    count: int

    def socket(self, index: int) -> str:
        return f"unix:{self.folder}/worker-{index}.sock"


class PartScorer(Protocol):
    """What a part of a sibling's batch is scored by."""

    @property
    def busy(self) -> bool: ...

    async def score_part(self, items: Sequence[reward_pb2.ScoreItem]) -> list[reward_pb2.ScoredItem]: ...


class Siblings:
    """Hands parts of a batch to the other workers, and scores what they hand over."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._stubs: list[reward_pb2_grpc.RewardStub] = []

    def __len__(self) -> int:
        return len(self._stubs)

    async def serve(self, scoring: PartScorer) -> grpc.aio.Server:
        """Score parts of the others' batches from now on, unless there is a long batch of one's own, and know them."""

        async def score(
            request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext
        ) -> reward_pb2.ScoreResponse:
            if scoring.busy:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy with a long batch")
            return reward_pb2.ScoreResponse(items=await scoring.score_part(request.items))

        handler = grpc.unary_unary_rpc_method_handler(
            score, reward_pb2.ScoreRequest.FromString, reward_pb2.ScoreResponse.SerializeToString
        )
        service = reward_pb2.DESCRIPTOR.services_by_name["Reward"].full_name
        server = grpc.aio.server(
            handlers=[grpc.method_handlers_generic_handler(service, {"Score": handler})], options=_OPTIONS
        )
        server.add_insecure_port(self._place.socket(self._place.index))
        await server.start()
        for index in range(self._place.count):
            if index != self._place.index:
                channel = grpc.aio.insecure_channel(self._place.socket(index), options=_OPTIONS)
                self._stubs.append(reward_pb2_grpc.RewardStub(channel))
        return server

    def ask(
        self, number: int, items: Sequence[reward_pb2.ScoreItem], deadline: float
    ) -> asyncio.Task[list[reward_pb2.ScoredItem]]:
        """Have one of them score a part; [] where it is busy, gone or leaves too little time before the deadline."""
        timeout_s = min(PATIENCE_S, (deadline - time.monotonic()) / 2)

        async def ask() -> list[reward_pb2.ScoredItem]:
            try:
                reply = await self._stubs[number].Score(reward_pb2.ScoreRequest(items=items), timeout=timeout_s)
            except grpc.RpcError:
                return []
            return list(reply.items)

        return asyncio.create_task(ask())
