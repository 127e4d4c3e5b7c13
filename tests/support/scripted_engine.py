"""An engine that says given lines, for tests of the loop and the agent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from forage_proto.v1.trajectory_pb2 import TemplateValues
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_runtime.text.chat_template import Chat


@dataclass
class ScriptedEngine:
    """Says the same lines in every trajectory, each cut to `max_tokens`.

    Attributes:
        stuck_at: the turn whose generation never ends, counted from 0.
        stuck: set once a trajectory is in that turn.
    """

    codec: Any
    lines: list[str]
    stuck_at: int | None = None
    asked: list[GenerationRequest] = field(default_factory=list)
    released: list[tuple[str, int]] = field(default_factory=list)
    stuck: asyncio.Event = field(default_factory=asyncio.Event)

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        if messages[0]["role"] != "user":
            raise ValueError("roles must begin with user")
        return RenderedPrompt(list(self.codec.encode(messages[0]["content"])))

    async def generate(self, asked: GenerationRequest) -> Generation:
        before = {len(r.token_ids) for r in self.asked if r.affinity == asked.affinity}
        turn = sum(length < len(asked.token_ids) for length in before)
        self.asked.append(asked)
        await asyncio.sleep(0)
        if turn == self.stuck_at:
            self.stuck.set()
            await asyncio.Event().wait()
        line = self.lines[turn]
        whole = self.codec.encode(line)
        ids = whole[: asked.max_tokens]
        return Generation(ids, [-0.1] * len(ids), len(ids) < len(whole), [(3, 2, 0, len(ids))])

    async def release(self, affinity: str) -> None:
        self.released.append((affinity, len(self.asked)))
