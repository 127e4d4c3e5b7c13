"""Engines behind real connections: scripted, as a process of its own, and a wire that cuts connections.

`python linked_engine.py KEY` serves a `SearchingEngine` on loopback, says its address, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from char_codec import CharCodec

from forage_proto.v1.trajectory_pb2 import TemplateValues
from forage_rollout.links.frames import HEADER
from forage_rollout.links.link import EngineAddress
from forage_rollout.links.server import EngineServer
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_runtime.text.chat_template import Chat

KEY = b"k" * 32
LINES = ("<search>one</search>", "<search>two</search>", "<answer>a</answer>")


def sample(request: GenerationRequest) -> list[int]:
    """The tokens of a request, by its context and seed alone: the same on every engine."""
    chance = random.Random(f"{request.token_ids}/{request.seed}")
    return [chance.randrange(2**32) for _ in range(request.max_tokens)]


@dataclass
class SamplingEngine:
    """Samples by `sample` after `delay_s`, once `gate` is set.

    Attributes:
        gate: set unless a test clears it.
        asked: every request that began.
        finished: those that ended by themselves.
        fails: raised in place of sampling.
    """

    delay_s: float = 0.0
    asked: list[GenerationRequest] = field(default_factory=list)
    finished: list[GenerationRequest] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    fails: Exception | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        if messages[0]["role"] == "?":
            raise ValueError("no such role")
        return RenderedPrompt([len(message["content"]) for message in messages], values.today if values else "")

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.append(request)
        await asyncio.sleep(self.delay_s)
        await self.gate.wait()
        if self.fails is not None:
            raise self.fails
        self.finished.append(request)
        ids = sample(request)
        return Generation(ids, [-0.5] * len(ids), False, [(1, 2, 0, len(ids))])

    async def release(self, affinity: str) -> None:
        self.released.append(affinity)


class SearchingEngine:
    """Says line after line of `LINES` in a trajectory, the next after each search in its context."""

    def __init__(self) -> None:
        self._codec = CharCodec()

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        return RenderedPrompt(self._codec.encode(messages[0]["content"]))

    async def generate(self, request: GenerationRequest) -> Generation:
        await asyncio.sleep(random.uniform(0.2, 0.6))
        line = LINES[self._codec.decode(request.token_ids).count("</search>")]
        ids = self._codec.encode(line)
        return Generation(ids, [-0.5] * len(ids), False, [(1, 1, 0, len(ids))])

    async def release(self, affinity: str) -> None:
        pass


@asynccontextmanager
async def serve(engine: Any, key: bytes = KEY) -> AsyncIterator[tuple[EngineServer, EngineAddress]]:
    """Serve an engine in this process."""
    server = EngineServer(engine, key)
    yield server, EngineAddress(await server.listen("127.0.0.1"), key)
    await server.close()


class CuttingWire:
    """Stands between agents and a server, and cuts its connections as it is told.

    Args:
        cuts: for each connection in turn: how many frames from the server, and from the agent, pass before the cut.
            The next frame in that direction is cut in the middle. Later connections last.
    """

    def __init__(self, target: str, cuts: Sequence[tuple[int, int]]) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._cuts = list(cuts)
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.made = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Listen; yields the address."""
        listener = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        listener.close()
        for writer in self._open.values():
            writer.transport.abort()
        if self._open:
            await asyncio.wait(self._open)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies, requests = self._cuts[self.made] if self.made < len(self._cuts) else (10**9, 10**9)
        self.made += 1
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        task.add_done_callback(self._open.pop)
        try:
            their_reader, their_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        pumps = [
            asyncio.create_task(_pump(their_reader, writer, replies)),
            asyncio.create_task(_pump(reader, their_writer, requests)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        for end in (writer, their_writer):
            end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: int) -> None:
    try:
        for left in range(frames, -1, -1):
            head = await reader.readexactly(HEADER.size)
            body = await reader.readexactly(HEADER.unpack(head)[0])
            whole = head + body
            writer.write(whole if left else whole[: len(whole) // 2])
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        return


@contextmanager
def start_engine() -> Iterator[tuple[subprocess.Popen[str], EngineAddress]]:
    """A `SearchingEngine` in a process of its own, until the block ends."""
    command = [sys.executable, str(Path(__file__)), KEY.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, EngineAddress(process.stdout.readline().strip(), KEY)
        finally:
            process.kill()


async def main() -> None:
    server = EngineServer(SearchingEngine(), bytes.fromhex(sys.argv[1]))
    sys.stdout.write(await server.listen("127.0.0.1") + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
