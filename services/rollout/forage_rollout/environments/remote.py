"""An environment of the operator's own, as the agent sees it: the same calls, carried out in a confined process.

A process that crashes or hangs fails the trajectories that are in it, and is started again for the next ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from itertools import count
from typing import Any

from forage_rollout.environments import frames
from forage_rollout.environments.environment import (
    Action,
    Budget,
    Environment,
    EnvironmentFailedError,
    Episode,
    Observation,
)
from forage_rollout.environments.loading import check_description
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting
from forage_runtime.text.redaction import redact_url
from forage_sandbox.child import START_TIMEOUT_S, Child, ChildError
from forage_sandbox.support import build_confinement

log = get_logger()
MODULE = "forage_rollout.environments.environment_process"
MAX_SEARCHES = 1024
"""Searches of one environment at a time; more are no environment's need."""
MAX_UNREAD_BYTES = 256 * 2**20
"""Waiting for a process that does not read what it asked for; more would fill the agent's memory."""
_PING_S = 1.0
_CLOSE_S = 5.0
_MAX_RETRY_S = 30.0


class RemoteEnvironment:
    """One environment in its process. `budget` and `parse` of the base class are computed here, without a call.

    Args:
        source: the data source whose route of `rollout.environments` it is.

    Raises:
        ChildError, UserError: it cannot be loaded; the message says why.
        SettingsError: security.user_code asks for more than this machine has.
    """

    def __init__(self, source: str, settings: Settings, retriever: RetrieverClient) -> None:
        rollout = settings.rollout
        self._route = rollout.environments[source]
        self._source = source
        setting = f"rollout.environments.{source}"
        self._confinement = build_confinement(setting, self._route, self._route.memory_mib, settings.security.user_code)
        # Other environments' parameters and the places of tokens are none of its business.
        self._rollout_json = rollout.model_copy(
            update={
                "environments": {source: self._route},
                "auth_token_file": None,
                "engine": rollout.engine.model_copy(
                    update={"endpoint": redact_url(rollout.engine.endpoint), "endpoint_token_file": None}
                ),
            }
        ).model_dump_json()
        self._base = Environment(rollout, retriever)
        self._retriever = retriever
        self._ids = count()
        self._calls: dict[int, _Call] = {}
        self._episodes: dict[int, tuple[int, _Connection]] = {}  # of an episode, by id(): its number, its process
        self._searches: set[asyncio.Task[None]] = set()
        self._connection: _Connection | None = None
        self._starting: asyncio.Task[_Connection] | None = None
        self._closed = False
        self._is_retired = False
        self._child = self._start()

    def budget(self, episode: Episode) -> Budget | Awaitable[Budget]:
        """Limits of the next generation's length."""
        if "budget" not in self._overrides:
            return self._base.budget(episode)
        return self._call("budget", episode, frames.read_budget)

    def parse(self, text: str, episode: Episode) -> Action | Awaitable[Action]:
        """Read the action of a generation."""
        if "parse" not in self._overrides:
            return self._base.parse(text, episode)
        return self._call("parse", episode, frames.read_action, text=text)

    async def respond(self, action: Action, episode: Episode) -> Observation:
        """Carry out an action.

        Raises:
            UnavailableError, RefusedError, MalformedReplyError: a service failed, as in the environment.
            EnvironmentFailedError: its own code failed, or its process ended.
        """
        packed = frames.pack_action(action)
        observation: Observation = await self._call("respond", episode, frames.read_observation, action=packed)
        return observation

    def end(self, episode: Episode) -> None:
        """Forget a trajectory."""
        number, connection = self._episodes.pop(id(episode), (0, None))
        if connection is not None and connection is self._connection:
            connection.send({"end": number})

    async def close(self) -> None:
        """Let it close its connections and files, then end its process."""
        self._closed = True
        if self._child.is_alive:
            with contextlib.suppress(EnvironmentFailedError, TimeoutError, UserError, ChildError):
                async with asyncio.timeout(_CLOSE_S):
                    connection = self._connection or await self._connect(self._child)
                    await self._send_call(connection, {"call": "close"}, lambda value: value)
        self.kill()

    def kill(self) -> None:
        """End its process."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
        self._child.kill()

    async def _call(self, call: str, episode: Episode, read: Callable[[Any], Any], **fields: object) -> Any:
        connection = await self._find_connection()
        key = id(episode)
        frame = {"call": call, "turn": episode.turn, "hit_length": episode.hit_length, **fields}
        if key not in self._episodes:
            self._episodes[key] = (next(self._ids), connection)
            prompt = b64encode(episode.prompt.SerializeToString()).decode()
            frame["begin"] = {"prompt": prompt, "sample": episode.sample}
        number, home = self._episodes[key]
        if home is not connection:
            raise self._failed("its process ended, and with it the state of this trajectory")
        return await self._send_call(connection, {**frame, "episode": number}, read)

    async def _send_call(self, connection: _Connection, frame: frames.Frame, read: Callable[[Any], Any]) -> Any:
        number = next(self._ids)
        call = self._calls[number] = _Call(connection)
        connection.send({"id": number, **frame})
        try:
            with connection.child.working():
                reply = await call.reply
        except asyncio.CancelledError:
            connection.send({"cancel": number})
            raise
        finally:
            del self._calls[number]
        try:
            if "error" in reply:
                error = reply["error"]
                if known := frames.read_service_error(error):
                    raise known
                raise self._failed(*frames.read_own_error(error))
            return read(reply.get("value"))
        except frames.FrameError as error:
            self._restart(connection, "crash", f"sent {error}")
            raise self._failed(f"its process sent {error}") from None

    def _failed(self, reason: str, stack: str = "") -> EnvironmentFailedError:
        return EnvironmentFailedError(f"environment {self.name}: {reason}", stack)

    def _start(self) -> Child:
        """Start a process and read what its environment is; takes a second or two."""
        child = Child(
            MODULE,
            [self._route.name],
            first_frame=self._rollout_json.encode(),
            confinement=self._confinement,
        ).wait_until_ready()
        try:
            about = frames.read_description(child.receive(START_TIMEOUT_S))
            check_description(about.tags, about.feedback, about.max_turns, about.stops)
        except (ChildError, ValueError):  # ValueError: what it says of itself is wrong, or no frame
            child.kill()
            raise
        self.name, self.tags, self.feedback = about.name, about.tags, about.feedback
        self.max_turns, self.stops, self._overrides = about.max_turns, about.stops, about.overrides
        self._base.tags = about.tags
        if self._closed:  # `close` came while it was started
            child.kill()
        return child

    async def _find_connection(self) -> _Connection:
        if self._connection is not None and not self._connection.child.is_alive:
            self._restart(self._connection, "crash", self._connection.child.describe_end())
        if self._connection is None:
            if self._starting is None:
                self._starting = asyncio.create_task(self._connect_again())
            try:
                await asyncio.shield(self._starting)  # a trajectory that is out of time does not stop the start
            finally:
                if self._starting is not None and self._starting.done():
                    self._starting = None
        if self._connection is None:
            raise self._failed("its process is gone")
        return self._connection

    async def _connect_again(self) -> _Connection:
        delay_s = 0.1
        while (self._is_retired or not self._child.is_alive) and not self._closed:
            if not self._is_retired:  # it ended before its first call
                self._child.kill()
                self._is_retired = True
            try:
                self._child = await asyncio.to_thread(self._start)
                self._is_retired = False
            except (ChildError, UserError, ValueError) as error:  # ValueError: what it says of itself is wrong
                log.error("environment_cannot_start", environment=self._source, error=str(error), retry_s=delay_s)
                with waiting("the next start of a process", on=f"environment {self._source}", limit_s=delay_s):
                    await asyncio.sleep(delay_s)
                delay_s = min(_MAX_RETRY_S, 2 * delay_s)
        return await self._connect(self._child)

    async def _connect(self, child: Child) -> _Connection:
        connection = _Connection(child, await open_streams(child))
        connection.tasks = [
            asyncio.create_task(self._read(connection)),
            asyncio.create_task(self._watch(connection)),
        ]
        self._connection = connection
        return connection

    async def _read(self, connection: _Connection) -> None:
        """Give replies to who waits for them, and carry out searches, until the process ends."""
        reason, detail = "crash", ""
        try:
            while True:
                frame = await frames.read_frame(connection.reader)
                connection.heard = time.monotonic()
                if connection.unread_bytes > MAX_UNREAD_BYTES:
                    raise frames.FrameError(f"requests while it left {connection.unread_bytes} bytes unread")
                if "id" in frame:
                    call = self._calls.get(frame["id"]) if isinstance(frame["id"], int) else None
                    if call is not None and call.connection is connection and not call.reply.done():
                        call.reply.set_result(frame)
                elif "search" in frame:
                    if len(self._searches) >= MAX_SEARCHES:
                        raise frames.FrameError(f"more than {MAX_SEARCHES} searches at a time")
                    task = asyncio.create_task(self._search(connection, frame), context=self._find_context(frame))
                    self._searches.add(task)
                    task.add_done_callback(self._searches.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            detail = await asyncio.to_thread(connection.child.describe_end)
        except frames.FrameError as error:
            detail = f"sent {error}"
        self._restart(connection, reason, detail)

    def _find_context(self, frame: frames.Frame) -> Context:
        """That of the call which searches: its trace goes on in the search."""
        call = self._calls.get(frame["for"]) if isinstance(frame.get("for"), int) else None
        return call.context.copy() if call else copy_context()

    async def _search(self, connection: _Connection, frame: frames.Frame) -> None:
        reply: frames.Frame = {"found": frame["search"]}
        try:
            query = {name: frame.get(name) for name in ("queries", "topk", "filters", "mode")}
            reply["result"] = frames.pack_result(await self._retriever.search(**query))  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - whatever it asked for; it learns of it as its caller would
            reply["error"] = frames.pack_error(error)
        connection.send(reply)

    async def _watch(self, connection: _Connection) -> None:
        """Find a process whose event loop stands still while somebody waits for it."""
        limit_s = self._route.timeout_s
        while True:
            connection.heard = time.monotonic()
            while any(call.connection is connection for call in self._calls.values()):
                connection.send({"ping": True})
                await asyncio.sleep(min(_PING_S, limit_s / 4))  # wait: pause between two looks
                if time.monotonic() - connection.heard > limit_s:
                    detail = f"its event loop stood still for timeout_s={limit_s:g} s"
                    return self._restart(connection, "hang", detail)
            await asyncio.sleep(min(_PING_S, limit_s / 4))  # wait: pause between two looks

    def _restart(self, connection: _Connection, reason: str, detail: str) -> None:
        """Fail what is in a process and end it; the next call starts another."""
        if connection is not self._connection:
            return
        self._connection = None
        self._is_retired = True
        connection.close()
        # On a thread: the end of a process takes a moment, and the other trajectories go on.
        threading.Thread(target=connection.child.kill, name="kill", daemon=True).start()
        if not self._closed:
            log.warning("environment_restarted", environment=self._source, reason=reason, detail=detail)
        for call in self._calls.values():
            if call.connection is connection and not call.reply.done():
                call.reply.set_exception(self._failed(f"{detail}: its process is started again"))


class _Call:
    """A call that waits for its reply."""

    def __init__(self, connection: _Connection) -> None:
        self.connection = connection
        self.reply: asyncio.Future[frames.Frame] = asyncio.get_running_loop().create_future()
        self.context = copy_context()


class _Connection:
    """The connection to one process, of one event loop."""

    def __init__(self, child: Child, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self.child = child
        self.reader, self._writer = streams
        self.heard = time.monotonic()
        self.tasks: list[asyncio.Task[None]] = []

    def send(self, frame: frames.Frame) -> None:
        """Send a frame; one that has ended is found by whoever reads."""
        if not self._writer.is_closing():
            self._writer.write(frames.pack_frame(frame))

    @property
    def unread_bytes(self) -> int:
        """Bytes that it was sent and has not read."""
        return self._writer.transport.get_write_buffer_size()

    def close(self) -> None:
        """Close it, from its own event loop or after that has ended."""
        current = None
        with contextlib.suppress(RuntimeError):
            current = asyncio.current_task()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            for task in self.tasks:
                if task is not current:
                    task.cancel()
            self._writer.close()


async def open_streams(child: Child) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The connection to a child for asyncio."""
    connection = child.take_socket()
    connection.setblocking(False)
    return await asyncio.open_connection(sock=connection)
