"""The engine's end: answers the requests of agents on connections of their own, beside Ray Serve."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable, Coroutine
from typing import Any

from forage_rollout.links.connection import (
    NONCE_BYTES,
    FrameConnection,
    draw_nonce,
    is_foreseen,
    is_proof,
    pack_failure,
    prove,
)
from forage_rollout.links.frames import (
    VERSION,
    FrameError,
    Kind,
    pack_generation,
    pack_prompt,
    unpack_chat,
    unpack_request,
)
from forage_rollout.loop.generation import Engine
from forage_runtime.addresses import join_address, listen
from forage_runtime.security.refusals import Refusal, record_refusal
from forage_runtime.telemetry.logs import get_logger
from forage_weights.rollout.policy import NotServingError

log = get_logger()
LOAD = struct.Struct("<I")
"""Before each reply and sign of life: requests in progress at this replica, from all agents."""
WIRE = "rollout/engine-link"
MAX_REQUESTS = 4096
"""In progress at a replica; more are refused, and go elsewhere or wait at their agents."""
_MAX_STRANGERS = 64
_PROVE_TIMEOUT_S = 10.0
_BACKLOG = 1024


class EngineServer:
    """Serves one engine until `leave`, and then `close`.

    Args:
        key: what agents must know; it is never sent.
        tls: None: plain text.
        stands_still: whether the engine has work and does none, as one whose process is stopped.
    """

    def __init__(
        self,
        engine: Engine,
        key: bytes,
        tls: ssl.SSLContext | None = None,
        stands_still: Callable[[], bool] = lambda: False,
    ) -> None:
        self.engine = engine
        self.key = key
        self.stands_still = stands_still
        self.in_progress = 0
        self.is_leaving = False
        self.strangers: set[_AgentConnection] = set()
        self.agents: set[_AgentConnection] = set()
        self._tls = tls
        self._ended = asyncio.Event()
        self._listener: asyncio.Server | None = None

    async def listen(self, host: str, port: int = 0) -> str:
        """Listen from now on; returns the address. Port 0: any that is free."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: _AgentConnection(self), sock=listen(join_address(host, port)), ssl=self._tls, backlog=_BACKLOG
        )
        return join_address(host, self._listener.sockets[0].getsockname()[1])

    async def leave(self, limit_s: float) -> int:
        """Tell agents to send nothing more, and let requests in progress end; returns how many did not in time."""
        self.is_leaving = True
        for agent in self.agents:
            agent.send(Kind.LEAVING)
        try:
            async with asyncio.timeout(limit_s):
                while self.in_progress:
                    self._ended.clear()
                    await self._ended.wait()  # wait: has a time limit
        except TimeoutError:
            log.warning("requests_cut_off", count=self.in_progress, after_s=limit_s)
        return self.in_progress

    async def close(self) -> None:
        """End every connection; requests in progress are cancelled."""
        if self._listener is not None:
            self._listener.close()
        for connection in (*self.agents, *self.strangers):
            connection.close()
        await asyncio.sleep(0)

    def begin(self) -> None:
        self.in_progress += 1

    def end(self) -> None:
        self.in_progress -= 1
        if not self.in_progress:
            self._ended.set()


class _AgentConnection(FrameConnection):
    """One agent's."""

    def __init__(self, server: EngineServer) -> None:
        super().__init__()
        self._server = server
        self._nonce = draw_nonce()
        self._is_known = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unanswered: set[int] = set()
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._server.strangers) >= _MAX_STRANGERS:
            self.abort()
            return
        self._server.strangers.add(self)
        self._patience = self._loop.call_later(_PROVE_TIMEOUT_S, self.abort)
        self.send(Kind.CHALLENGE, VERSION, self._nonce)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.strangers.discard(self)
        self._server.agents.discard(self)
        if self._patience is not None:
            self._patience.cancel()
        for task in list(self._tasks.values()):
            task.cancel()

    def take(self, kind: int, number: int, body: bytes) -> None:
        if not self._is_known:
            self._admit(kind, body)
        elif kind == Kind.GENERATE:
            self._start(number, self._generate(number, body))
        elif kind == Kind.CANCEL:
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
        elif kind == Kind.RENDER:
            self._start(number, self._render(number, body))
        elif kind == Kind.PING:
            self._send_with_load(Kind.PONG, number, bytes([self._server.stands_still()]))
        elif kind == Kind.RELEASE:
            self._start(number, self._server.engine.release(body.decode(errors="replace")))
        else:
            raise FrameError(f"kind {kind} is none that an agent sends")

    def _admit(self, kind: int, body: bytes) -> None:
        theirs, proof = body[:NONCE_BYTES], body[NONCE_BYTES:]
        if kind != Kind.PROOF or not is_proof(proof, self._server.key, Kind.PROOF, self._nonce, theirs):
            record_refusal(WIRE, Refusal.WRONG_TOKEN, self.peer)
            self.abort()
            return
        self._is_known = True
        self.allow_requests()
        assert self._patience is not None
        self._patience.cancel()
        self._server.strangers.discard(self)
        self._server.agents.add(self)
        self.send(Kind.WELCOME, 0, prove(self._server.key, Kind.WELCOME, self._nonce, theirs))
        if self._server.is_leaving:
            self.send(Kind.LEAVING)

    def _start(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        if number in self._tasks:
            work.close()
            raise FrameError(f"request {number} is in progress already")
        task = self._loop.create_task(work)
        self._tasks[number] = task
        self._unanswered.add(number)
        self._server.begin()
        task.add_done_callback(lambda _: self._finish(number))

    def _finish(self, number: int) -> None:
        self._count_end(number)
        del self._tasks[number]

    def _count_end(self, number: int) -> None:
        """Count a request as ended, once: with its reply, so that none that ends beside it counts as load there."""
        if number in self._unanswered:
            self._unanswered.remove(number)
            self._server.end()

    async def _generate(self, number: int, body: bytes) -> None:
        try:
            request = unpack_request(body)
            if self._server.in_progress > MAX_REQUESTS:
                raise NotServingError(f"{MAX_REQUESTS} requests are in progress, as many as a replica takes")
            reply = pack_generation(await self._server.engine.generate(request))
        except FrameError as error:
            log.warning("link_broken", peer=self.peer, detail=str(error))
            self.abort()
        except Exception as error:  # noqa: BLE001 - the agent decides what its error means
            self._fail(number, error)
        else:
            self._reply(Kind.GENERATED, number, reply)

    async def _render(self, number: int, body: bytes) -> None:
        try:
            reply = pack_prompt(await self._server.engine.render_chat(*unpack_chat(body)))
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(number, error)
        else:
            self._reply(Kind.RENDERED, number, reply)

    def _fail(self, number: int, error: Exception) -> None:
        if not is_foreseen(error):
            log.exception("request_failed", exc_info=error)
        self._reply(Kind.FAILED, number, pack_failure(error))

    def _reply(self, kind: Kind, number: int, body: bytes) -> None:
        self._count_end(number)
        self._send_with_load(kind, number, body)

    def _send_with_load(self, kind: Kind, number: int, body: bytes) -> None:
        self.send(kind, number, LOAD.pack(self._server.in_progress) + body)
