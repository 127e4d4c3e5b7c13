"""Interfaces of the services that a trajectory calls: the retriever over HTTP, the reward over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forage_common.clients.retriever import SearchResult
from forage_common.v1.reward_pb2 import ScoredItem, ScoreItem


class Retriever(Protocol):
    """The part of `forage_common.clients.retriever.RetrieverClient` that environments use."""

    async def search(self, queries: Sequence[str]) -> SearchResult:
        """Search documents for each query.

        Raises:
            UnavailableError: no answer within the deadline.
            RefusedError: the retriever rejects this search.
            MalformedReplyError: the reply does not have the wire format.
        """
        ...


class Reward(Protocol):
    """The part of `forage_common.clients.reward.RewardClient` that the agent uses."""

    async def score(self, items: Sequence[ScoreItem]) -> list[ScoredItem]:
        """Score items; returns the scores in their order.

        Raises:
            UnavailableError: no answer within the deadline.
            grpc.RpcError: the reward rejects the request.
            MalformedReplyError: the reply does not match the items.
        """
        ...
