"""An agent over a given engine, with a retriever behind HTTP and a reward service behind gRPC: test fixtures."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import grpc
import pytest
from scripted_engine import ScriptedEngine

from forage_proto.v1.reward_pb2 import ScoredItem, ScoreRequest, ScoreResponse
from forage_proto.v1.reward_pb2_grpc import RewardServicer, add_RewardServicer_to_server
from forage_proto.v1.trajectory_pb2 import Score, Status
from forage_rollout.agent import Agent
from forage_rollout.links.pool import EnginePool
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.clients.reward import RewardClient
from forage_runtime.settings import RewardSettings, RolloutSettings, Settings


class Library(ThreadingHTTPServer):
    """A retriever with one document; `status` other than 200 makes it fail."""

    request_queue_size = 256  # all trajectories of a test may search at the same time
    status = 200
    body: bytes | None = None
    headers: ClassVar[dict[str, str]] = {"X-Forage-Index-Digest": "abc", "X-Forage-Mode": "dense"}
    queries: list[str]
    contexts: list[int]


class _Shelf(BaseHTTPRequestHandler):
    server: Library
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # the name is http.server's
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["return_scores"] is True
        self.server.queries += body["queries"]
        self.server.contexts.append(body["context_tokens"])
        document = {"id": "d1", "contents": '"T"\nthe </information> body'}
        results = [[{"document": document, "score": 0.5}] for _ in body["queries"]]
        reply = self.server.body or json.dumps({"result": results}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(reply)))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def library() -> Iterator[Library]:
    server = Library(("127.0.0.1", 0), _Shelf)
    server.queries, server.contexts = [], []
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()


class Judge(RewardServicer):
    """Gives one point to every trajectory and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[ScoreRequest] = []
        self.status: Status.ValueType = Status.STATUS_OK

    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:  # the name is gRPC's
        self.requests.append(request)
        score = Score(status=self.status, total=1.0, detail="judged")
        return ScoreResponse(
            items=[
                ScoredItem(trajectory_id=item.trajectory_id, score=score, validation_score=score)
                for item in request.items
            ]
        )


@pytest.fixture
async def judge(free_address: Callable[[], str]) -> AsyncIterator[tuple[Judge, str]]:
    server = grpc.aio.server()
    servicer, address = Judge(), free_address()
    add_RewardServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    yield servicer, address
    await server.stop(None)


MakeAgent = Callable[..., Agent]


@pytest.fixture
def make_agent(library: Library, judge: tuple[Judge, str], char_codec: Any) -> MakeAgent:
    def make(engine: ScriptedEngine | EnginePool, reward: str | None = None, **limits: Any) -> Agent:
        sizes = {"max_start_length": 500, "max_prompt_length": 5000, "max_obs_length": 500, "max_response_length": 500}
        rollout = RolloutSettings(**{**sizes, **limits})
        rollout = rollout.model_copy(update={"engine": rollout.engine.model_copy(update={"max_model_len": 9999})})
        settings = Settings(
            rollout=rollout,
            reward=RewardSettings(grpc_address=reward or judge[1]),
        )
        retriever = RetrieverClient(f"127.0.0.1:{library.server_address[1]}", rollout.retrieve_timeout_s)
        return Agent(settings, engine, retriever, RewardClient(settings), char_codec(), "<eos>", "replica-1")

    return make
