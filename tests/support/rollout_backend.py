"""The rollout service without Ray: the real agent over an engine that says given lines, behind `Backend`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from forage_proto.v1.reward_pb2 import ScoredItem, ScoreItem
from forage_proto.v1.rollout_pb2 import RunStreamResponse
from forage_proto.v1.trajectory_pb2 import (
    Document,
    Policy,
    Prompt,
    Provenance,
    Sampling,
    Score,
    Status,
    TemplateValues,
    TrajectoryGroup,
)
from forage_rollout.agent import Agent
from forage_rollout.engine.openai import ResponseHead
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_rollout.metrics import Snapshot
from forage_rollout.serve.backend import RefusedPolicyError
from forage_rollout.sessions.requests import HttpReply
from forage_runtime.clients.retriever import SearchResult
from forage_runtime.errors import UnavailableError
from forage_runtime.settings import Settings
from forage_runtime.text.chat_template import Chat

LINES = ("<think>hm</think><search> who </search>", "<answer> me </answer>")


@dataclass
class LineEngine:
    """Says one line a turn. `gate` holds the second turn back."""

    codec: Any
    lines: Sequence[str] = LINES
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[GenerationRequest] = field(default_factory=list)
    cancelled: int = 0

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        return RenderedPrompt(list(self.codec.encode(messages[0]["content"])))

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.append(request)
        said = self.codec.decode(request.token_ids)
        turn = sum(said.count(line) for line in set(self.lines))
        try:
            if turn:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        ids = self.codec.encode(self.lines[turn])
        return Generation(ids, [-0.1] * len(ids), False, [(3, 2, 0, len(ids))])

    async def release(self, affinity: str) -> None:
        pass


class OneDocumentRetriever:
    """A retriever with one document."""

    async def search(self, queries: Sequence[str]) -> SearchResult:
        document = Document(id="d1", contents='"T"\nbody', score=0.5)
        return SearchResult([[document] for _ in queries], Provenance(index_digest="abc"), False)


class OnePointReward:
    """A reward of one point for everybody."""

    async def score(self, items: Sequence[ScoreItem]) -> list[ScoredItem]:
        score = Score(status=Status.STATUS_OK, total=1.0)
        return [ScoredItem(trajectory_id=i.trajectory_id, score=score, validation_score=score) for i in items]


class AgentBackend:
    """`Backend` in this process; engines of its own that only know how to stand still."""

    def __init__(self, settings: Settings, engine: LineEngine) -> None:
        self._agent = Agent(
            settings, engine, OneDocumentRetriever(), OnePointReward(), engine.codec, "<eos>", "replica-1"
        )
        self.policies: list[Policy | None] = [Policy(version=3, epoch=2), Policy(version=4, epoch=2)]
        self.paused = False
        self.drained = False
        self.dead = False
        self.dispatchers: list[Snapshot] = []
        self.passed: list[tuple[str, str, list[tuple[str, str]], bytes]] = []

    async def check_sampling(self, sampling: Sampling) -> None:
        """Lines are said whatever the sampling is."""

    async def run_group(self, prompt: Prompt) -> TrajectoryGroup:
        if self.dead:
            raise UnavailableError("a part of the service failed (it was stopped): try again")
        return await self._agent.run_group(prompt)

    async def stream_group(self, prompt: Prompt) -> AsyncGenerator[RunStreamResponse, None]:
        events: asyncio.Queue[RunStreamResponse] = asyncio.Queue()
        running = asyncio.create_task(self._agent.run_group(prompt, events.put_nowait))
        running.add_done_callback(lambda _: events.put_nowait(RunStreamResponse()))
        try:
            while (event := await events.get()).WhichOneof("event"):
                yield event
            if self.dead:
                raise UnavailableError("a part of the service failed (it was stopped): try again")
            yield RunStreamResponse(group=running.result())
        finally:
            running.cancel()

    async def pause(self, drain: bool) -> int:
        self.paused, self.drained = True, drain
        return len(self.policies)

    async def resume(self) -> int:
        self.paused = False
        return len(self.policies)

    async def load_policy(self, policy: Policy) -> float:
        if policy.version <= 4:
            raise RefusedPolicyError(f"version {policy.version} is not newer than what is served, version 4 of epoch 2")
        self.policies = [policy, policy]
        return 0.25

    async def forward_openai(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        self.passed.append((method, path, list(headers), body))
        yield 200, [("content-type", "text/event-stream")]
        yield b"data: 1\n\n"
        yield b"data: [DONE]\n\n"

    async def take_session(self, wait_s: float) -> dict[str, Any] | None:
        return self._agent.sessions.take()

    async def answer_session(self, id: str, key: str, verb: str, body: bytes) -> HttpReply:
        return await self._agent.sessions.answer(id, key, verb, body)

    async def take_snapshots(self) -> dict[str, list[Snapshot]]:
        engines = [Snapshot(f"e{i}", {("paused",): float(self.paused)}, p) for i, p in enumerate(self.policies)]
        agents = [Snapshot("a", {("generated_tokens",): 7.0})]
        return {"Engine": engines, "Agent": agents, "Dispatcher": self.dispatchers}
