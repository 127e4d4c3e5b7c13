"""An engine that says given lines, and a tokenizer of single characters, for tests of the loop and the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forage_rollout.loop.generation import Generation, Request


class CharCodec:
    """One token a character; `extra` strings are tokens of their own, wherever they occur."""

    def __init__(self, extra: Sequence[str] = (), special: Sequence[str] = ()) -> None:
        self._extra = sorted((*extra, *special), key=len, reverse=True)
        self._special = tuple(special)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self._special

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(0x110000 + self._extra.index(token) for token in self._special)

    @property
    def vocabulary_size(self) -> int:
        return 0x110000 + len(self._extra)

    @property
    def max_token_chars(self) -> int:
        return max(map(len, self._extra), default=1)

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            token = next((i for i, extra in enumerate(self._extra) if text.startswith(extra)), None)
            ids.append(ord(text[0]) if token is None else 0x110000 + token)
            text = text[1 if token is None else len(self._extra[token]) :]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(i) if i < 0x110000 else self._extra[i - 0x110000] for i in token_ids)


@dataclass
class ScriptedEngine:
    """Says the same lines in every trajectory, each cut to `max_tokens`; a generation takes `delay_s`."""

    codec: Any
    lines: list[str]
    delay_s: float = 0.0
    asked: list[Request] = field(default_factory=list)
    released: list[tuple[str, int]] = field(default_factory=list)

    async def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[0]["role"] != "user":
            raise ValueError("roles must begin with user")
        return list(self.codec.encode(messages[0]["content"]))

    async def generate(self, asked: Request) -> Generation:
        before = {len(r.token_ids) for r in self.asked if r.affinity == asked.affinity}
        turn = sum(length < len(asked.token_ids) for length in before)
        self.asked.append(asked)
        await asyncio.sleep(self.delay_s)
        line = self.lines[turn]
        whole = self.codec.encode(line)
        ids = whole[: asked.max_tokens]
        return Generation(ids, [-0.1] * len(ids), len(ids) < len(whole), [(3, 2, 0, len(ids))])

    async def release(self, affinity: str) -> None:
        self.released.append((affinity, len(self.asked)))
