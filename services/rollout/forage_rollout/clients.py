"""The services that a trajectory calls: the retriever over HTTP, the reward over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import httpx

from forage_common.calls import call
from forage_common.settings import Settings
from forage_common.v1.reward_pb2 import ScoredItem, ScoreItem, ScoreRequest, ScoreResponse
from forage_common.v1.reward_pb2_grpc import RewardStub
from forage_common.v1.trajectory_pb2 import Document

INDEX_DIGEST_HEADER = "x-forage-index-digest"
_MESSAGE_BYTES = 256 * 2**20


class MalformedReplyError(ValueError):
    """A service answered, but not what its contract says."""


@dataclass(frozen=True)
class Found:
    """What a search returned, best first, and the digest of the index that answered."""

    documents: list[Document]
    index_digest: str


class Retriever(Protocol):
    async def search(self, query: str) -> Found:
        """Documents for one query.

        Raises:
            UnavailableError: no answer within the deadline.
            httpx.HTTPStatusError: the retriever refused the query.
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


class HttpRetriever:
    """`POST /retrieve` on kept-alive connections."""

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.rollout.retrieve_timeout_s
        self._client = httpx.AsyncClient(
            base_url=f"http://{settings.retriever.http_address}",
            timeout=self._timeout_s,
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=16),
            trust_env=False,
        )

    async def search(self, query: str) -> Found:
        body = {"queries": [query], "return_scores": True}

        async def attempt() -> httpx.Response:
            return (await self._client.post("/retrieve", json=body)).raise_for_status()

        response = await call("retriever", attempt, self._timeout_s)
        return Found(_documents(response), response.headers.get(INDEX_DIGEST_HEADER, ""))


def _documents(response: httpx.Response) -> list[Document]:
    try:
        (pairs,) = response.json()["result"]
        return [
            Document(id=str(pair["document"]["id"]), contents=pair["document"]["contents"], score=float(pair["score"]))
            for pair in pairs
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedReplyError(
            f"the retriever's answer is not of the /retrieve format ({error!r}): is its address right?"
        ) from error


class GrpcReward:
    """`forage.v1.Reward.Score`."""

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.rollout.score_timeout_s
        sizes = [("grpc.max_send_message_length", _MESSAGE_BYTES), ("grpc.max_receive_message_length", _MESSAGE_BYTES)]
        self._stub = RewardStub(grpc.aio.insecure_channel(settings.reward.grpc_address, options=sizes))

    async def score(self, items: Sequence[ScoreItem]) -> list[ScoredItem]:
        request = ScoreRequest(items=items)

        async def attempt() -> ScoreResponse:
            reply: ScoreResponse = await self._stub.Score(request, timeout=self._timeout_s)
            return reply

        reply = await call("reward", attempt, self._timeout_s)
        if [item.trajectory_id for item in reply.items] != [item.trajectory_id for item in items]:
            raise MalformedReplyError("the reward's answer does not match the trajectories it was asked to score")
        return list(reply.items)
