"""The services that a trajectory calls: the retriever over HTTP, the reward over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forage_common.clients.retriever import SearchResult
from forage_common.v1.reward_pb2 import ScoredItem, ScoreItem


class Retriever(Protocol):
    """What a trajectory needs of `forage_common.clients.retriever.RetrieverClient`."""

    async def search(self, queries: Sequence[str]) -> SearchResult:
        """Documents for each query.

        Raises:
            UnavailableError: no answer within the deadline.
            RefusedError: the retriever will not serve this search.
            MalformedReplyError: the answer is not of the wire format.
        """
        ...


class Reward(Protocol):
    async def score(self, items: Sequence[ScoreItem]) -> list[ScoredItem]:
        """Scores in the order of the items.

        Raises:
            UnavailableError: no answer within the deadline.
            grpc.RpcError: the reward refused the request.
            MalformedReplyError: the answer does not match the items.
        """
        ...
