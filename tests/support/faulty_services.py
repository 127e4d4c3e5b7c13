"""A retriever that fails as told, and the real agent over it, for tests of faults under the rollout service."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forage_proto.v1.trajectory_pb2 import (
    ChatMessage,
    GroundTruth,
    Prompt,
    Purpose,
    Role,
    Sampling,
    TemplateValues,
    Trajectory,
)
from forage_rollout.agent import Agent
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.clients.reward import RewardClient
from forage_runtime.settings import (
    RedisSettings,
    RetrieverSettings,
    RewardPart,
    RewardSettings,
    RolloutSettings,
    Settings,
)
from forage_runtime.text.chat_template import Chat

SEARCH, ANSWER = "<think>hm</think><search> who </search>", "<think>ah</think><answer> me </answer>"
UNSCORED = Purpose.PURPOSE_ASK
Reply = tuple[int, bytes]


class FaultyRetriever(ThreadingHTTPServer):
    """A retriever. `reply` makes the answer to a search, or None to hang; ready as long as `is_ready`."""

    daemon_threads = True
    request_queue_size = 128
    is_ready = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _RequestHandler)
        self.reply: Callable[[list[str]], Reply | None] = reply_with_documents
        self.searches = 0
        self.closing = threading.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _RequestHandler(BaseHTTPRequestHandler):
    server: FaultyRetriever
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # the name is http.server's
        self._send(200 if self.server.is_ready else 503, b"{}")

    def do_POST(self) -> None:  # the name is http.server's
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.searches += 1
        reply = self.server.reply(body["queries"])
        if reply is None:
            self.server.closing.wait()
            self.close_connection = True
        else:
            self._send(*reply)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def reply_with_documents(queries: list[str], contents: str = '"T"\nbody') -> Reply:
    pairs = [[{"document": {"id": "d", "contents": contents}, "score": 0.5}] for _ in queries]
    return 200, json.dumps({"result": pairs}).encode()


@pytest.fixture
def faulty_retriever() -> Iterator[FaultyRetriever]:
    server = FaultyRetriever()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


class ScriptedSampler:
    """An engine that searches until its context has an observation, and then answers."""

    def __init__(self, codec: FileTokenizer) -> None:
        self._codec = codec

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        return RenderedPrompt(self._codec.encode(messages[0]["content"]))

    async def generate(self, request: GenerationRequest) -> Generation:
        ids = self._codec.encode(ANSWER if "<information>" in self._codec.decode(request.token_ids) else SEARCH)
        return Generation(ids, [-0.1] * len(ids), False, [(1, 1, 0, len(ids))])

    async def release(self, affinity: str) -> None:
        pass


@pytest.fixture(scope="session")
def codec(repository: Path) -> FileTokenizer:
    return FileTokenizer(repository / "models/tiny-policy")


@dataclass
class Parts:
    """Settings, and the agent that keeps them."""

    settings: Settings
    agent: Agent

    async def run(self, **fields: Any) -> list[Trajectory]:
        return list((await self.agent.run_group(build_prompt(**fields))).trajectories)


MakeParts = Callable[..., Parts]


@pytest.fixture
def make_parts(faulty_retriever: FaultyRetriever, codec: FileTokenizer, free_address: Callable[[], str]) -> MakeParts:
    """`make(reward="host:port", **rollout)`; without an address there is no reward, which is soon given up."""
    nowhere = free_address()

    def make(reward: str = nowhere, redis: RedisSettings | None = None, **rollout: Any) -> Parts:
        patience_s = 0.2 if reward == nowhere else 300.0
        limits: dict[str, Any] = {
            "retrieve_timeout_s": 300.0,
            "score_timeout_s": patience_s,
            "max_prompt_length": 600,
            "max_obs_length": 128,
        }
        settings = Settings(
            redis=redis or RedisSettings(),
            retriever=RetrieverSettings(http_address=faulty_retriever.address),
            reward=RewardSettings(grpc_address=reward, routes={"s": (RewardPart(name="em"),)}),
            rollout=RolloutSettings(**{**limits, **rollout}),
        )
        retriever = RetrieverClient(faulty_retriever.address, settings.rollout.retrieve_timeout_s)
        return Parts(
            settings, Agent(settings, ScriptedSampler(codec), retriever, RewardClient(settings), codec, "</s>", "r1")
        )

    return make


def build_prompt(**fields: Any) -> Prompt:
    known: dict[str, Any] = {
        "run_id": "r",
        "group_uid": "g/train/1/0",
        "data_source": "s",
        "messages": [ChatMessage(role="user", content="Who?")],
        "ground_truth": GroundTruth(targets=["me"]),
        "samples": 4,
        "sampling": Sampling(temperature=1.0, seed=1),
        "batch": 1,
    }
    return Prompt(**{**known, **fields})


def list_actions(trajectory: Trajectory) -> list[tuple[int, str]]:
    return [(turn.action, turn.content) for turn in trajectory.turns]


def list_observations(trajectory: Trajectory) -> list[tuple[str, list[int]]]:
    """List (text, tokens) of the observations."""
    spans = [span for span in trajectory.spans if span.role == Role.ROLE_ENV]
    return [(span.text, list(trajectory.token_ids[span.begin : span.end])) for span in spans]
