"""The agent's end of a connection to one engine replica: many requests at a time, told apart by number."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from contextlib import suppress
from dataclasses import dataclass, field

from forage_proto.v1.trajectory_pb2 import TemplateValues
from forage_rollout.links.connection import (
    NONCE_BYTES,
    FrameConnection,
    LinkLostError,
    draw_nonce,
    is_proof,
    prove,
    unpack_failure,
)
from forage_rollout.links.frames import (
    VERSION,
    FrameError,
    Kind,
    pack_chat,
    pack_request,
    unpack_generation,
    unpack_prompt,
)
from forage_rollout.links.server import LOAD
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_runtime.addresses import split_address
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.text.chat_template import Chat

log = get_logger()
PING_S = 1.0
MOST_SILENT = 8
"""Signs of life in a row that may be missing. They are counted, and no time is measured: where this process stood still
itself, it reads what has come meanwhile before it counts."""
_CONNECT_TIMEOUT_S = 10.0
_NUMBERS = 2**32


@dataclass(frozen=True)
class EngineAddress:
    """Where a replica listens, and the key that it wants to be known."""

    host_port: str
    key: bytes = field(repr=False)


class EngineLink(FrameConnection):
    """One connection, from `connect` until `ended`.

    Attributes:
        others: requests in progress at the replica for other agents, as of its last reply or sign of life.
        stands_still: its engine has work and does none, as of its last sign of life.
        is_leaving: the replica has said that it ends.
        ended: set when the connection has ended, whoever ended it.
    """

    def __init__(self, address: EngineAddress) -> None:
        super().__init__()
        self._address = address
        self._nonce = draw_nonce()
        self._theirs = b""
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._welcome: asyncio.Future[None] = self._loop.create_future()
        self.others = 0
        self.stands_still = False
        self._is_heard = False
        self.is_leaving = False
        self._is_retired = False
        self.ended = asyncio.Event()

    @classmethod
    async def connect(cls, address: EngineAddress, tls: ssl.SSLContext | None = None) -> EngineLink:
        """Connect, and prove to each other who they are.

        Raises:
            OSError: there is no connection.
            LinkLostError: the other end is not the replica, or does not want this agent.
        """
        host, port = split_address(address.host_port)
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, link = await asyncio.get_running_loop().create_connection(lambda: cls(address), host, port, ssl=tls)
            try:
                await link._welcome
            except BaseException:
                link.abort()
                raise
        return link

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent."""
        return not (self.is_leaving or self.ended.is_set())

    @property
    def in_progress(self) -> int:
        """Requests of this agent without a reply."""
        return len(self._waiting)

    async def watch(self) -> None:
        """Ask for signs of life until the connection has ended, and end it where none comes.

        A process that is stopped, or whose event loop hangs, keeps its connections: the kernel answers for it.
        """
        silent = 0
        while not self.ended.is_set():
            self._is_heard = False
            self.send(Kind.PING, self._next_number())
            with suppress(TimeoutError):
                async with asyncio.timeout(PING_S):
                    await self.ended.wait()  # wait: pause between two signs of life
            silent = 0 if self._is_heard else silent + 1
            if silent == MOST_SILENT and not self.ended.is_set():
                log.warning("engine_is_silent", address=self._address.host_port, silent_s=silent * PING_S)
                self.abort()
                await self.ended.wait()  # wait: for the next turn of the event loop

    async def generate(self, request: GenerationRequest) -> Generation:
        """Have the replica generate; a caller that is cancelled ends the sampling, too.

        Raises:
            LinkLostError: the connection ended first; whether the replica has sampled is not known.
            Exception: see `connection.pack_failure`.
        """
        return unpack_generation(await self._ask(Kind.GENERATE, pack_request(request)))

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        """See `loop.generation.Engine`; raises as `generate`."""
        return unpack_prompt(await self._ask(Kind.RENDER, pack_chat(messages, values or TemplateValues())))

    def release(self, affinity: str) -> None:
        """Tell the replica that the affinity gets no more requests."""
        self.send(Kind.RELEASE, self._next_number(), affinity.encode())

    def end_when_idle(self) -> None:
        """Send nothing more, and end the connection once every reply is here."""
        self.is_leaving = self._is_retired = True
        if not self._waiting:
            self.close()

    async def _ask(self, kind: Kind, body: bytes) -> bytes:
        if self.ended.is_set():
            raise LinkLostError(f"the connection to the engine at {self._address.host_port} has ended")
        number = self._next_number()
        reply = self._waiting[number] = self._loop.create_future()
        self.send(kind, number, body)
        try:
            content: bytes = await reply
            return content
        except asyncio.CancelledError:
            self.send(Kind.CANCEL, number)
            raise
        finally:
            self._waiting.pop(number, None)
            if self._is_retired and not self._waiting:
                self.close()

    def _next_number(self) -> int:
        return next(self._numbers) % _NUMBERS

    def data_received(self, data: bytes) -> None:
        self._is_heard = True
        super().data_received(data)

    def take(self, kind: int, number: int, body: bytes) -> None:
        if not self._welcome.done():
            self._introduce(kind, number, body)
        elif kind == Kind.LEAVING:
            self.is_leaving = True
        elif kind == Kind.PONG and len(body) == LOAD.size + 1:
            (load,) = LOAD.unpack_from(body)
            self.others = max(0, load - len(self._waiting))
            self.stands_still = bool(body[LOAD.size])
        elif kind in (Kind.GENERATED, Kind.RENDERED, Kind.FAILED) and len(body) >= LOAD.size:
            (load,) = LOAD.unpack_from(body)
            reply = self._waiting.pop(number, None)  # None: it was given up meanwhile
            self.others = max(0, load - len(self._waiting))
            if reply is None or reply.done():
                return
            if kind == Kind.FAILED:
                reply.set_exception(unpack_failure(body[LOAD.size :]))
            else:
                reply.set_result(body[LOAD.size :])
        else:
            raise FrameError(f"kind {kind} with {len(body)} bytes is none that an engine sends")

    def _introduce(self, kind: int, number: int, body: bytes) -> None:
        if kind == Kind.CHALLENGE and not self._theirs and len(body) == NONCE_BYTES:
            if number != VERSION:
                raise FrameError(f"version {number} of the frames, this agent has {VERSION}: it is another release")
            self._theirs = body
            self.send(Kind.PROOF, 0, self._nonce + prove(self._address.key, Kind.PROOF, body, self._nonce))
        elif kind == Kind.WELCOME and self._theirs:
            if not is_proof(body, self._address.key, Kind.WELCOME, self._theirs, self._nonce):
                raise FrameError("it does not know the key of the replica")
            self.allow_requests()
            self._welcome.set_result(None)
        else:
            raise FrameError(f"kind {kind} before the welcome")

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()
        lost = f"the connection to the engine at {self._address.host_port} has ended ({error or 'closed there'})"
        if not self._welcome.done():
            self._welcome.set_exception(LinkLostError(lost))
            self._welcome.exception()  # seen: who connects may have given up
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(LinkLostError(lost))
