"""The workers of one service score a long batch together, over private unix sockets."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from forage_proto.v1 import reward_pb2, reward_pb2_grpc

MIN_SHARED_ITEMS = 64
"""Items from which a batch is shared; for fewer the transfer costs more than it saves."""

PART_TIMEOUT_S = 5.0
"""Time limit of a peer; then the caller scores that part itself."""

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
"""Unlimited, because a worker has already accepted these items from a client."""


@dataclass(frozen=True)
class WorkerAddress:
    """A worker among its peers: the folder of their sockets, its own index from 0, and the number of workers."""

    folder: Path
    index: int
    count: int

    def socket(self, index: int) -> str:
        return f"unix:{self.folder}/worker-{index}.sock"


class PartScorer(Protocol):
    """Scores parts of peers' batches."""

    @property
    def is_busy(self) -> bool: ...

    async def score_part(self, items: Sequence[reward_pb2.ScoreItem]) -> list[reward_pb2.ScoredItem]: ...


class PeerWorkers:
    """Sends parts of a batch to the other workers, and scores the parts that they send."""

    def __init__(self, address: WorkerAddress) -> None:
        self._address = address
        self._stubs: list[reward_pb2_grpc.RewardStub] = []

    def __len__(self) -> int:
        return len(self._stubs)

    async def serve(self, scorer: PartScorer) -> grpc.aio.Server:
        """Start to score parts of peers' batches (refused during a long batch of its own), and connect to the peers."""

        async def score(
            request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext
        ) -> reward_pb2.ScoreResponse:
            if scorer.is_busy:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy with a long batch")
            return reward_pb2.ScoreResponse(items=await scorer.score_part(request.items))

        handler = grpc.unary_unary_rpc_method_handler(
            score, reward_pb2.ScoreRequest.FromString, reward_pb2.ScoreResponse.SerializeToString
        )
        service = reward_pb2.DESCRIPTOR.services_by_name["Reward"].full_name
        server = grpc.aio.server(
            handlers=[grpc.method_handlers_generic_handler(service, {"Score": handler})], options=_OPTIONS
        )
        server.add_insecure_port(self._address.socket(self._address.index))
        await server.start()
        os.chmod(self._address.socket(self._address.index).removeprefix("unix:"), 0o600)
        for index in range(self._address.count):
            if index != self._address.index:
                channel = grpc.aio.insecure_channel(self._address.socket(index), options=_OPTIONS)
                self._stubs.append(reward_pb2_grpc.RewardStub(channel))
        return server

    def request_scores(
        self, number: int, items: Sequence[reward_pb2.ScoreItem], deadline: float
    ) -> asyncio.Task[list[reward_pb2.ScoredItem]]:
        """Ask a peer to score a part; [] where it is busy, unavailable, or too slow for the deadline."""
        # Half of the time that is left, so that there is time to score the part here when the peer fails.
        timeout_s = min(PART_TIMEOUT_S, (deadline - time.monotonic()) / 2)

        async def request() -> list[reward_pb2.ScoredItem]:
            try:
                reply = await self._stubs[number].Score(reward_pb2.ScoreRequest(items=items), timeout=timeout_s)
            except grpc.RpcError:
                return []
            return list(reply.items)

        return asyncio.create_task(request())
