"""`python -m forage_rollout.environments.environment_process FD CONFINEMENT PATH ENTRY_POINT`: runs one environment.

The first frame holds the settings that it needs as JSON. It confines itself, reports whether the environment could be
loaded and what it is, then carries out any number of calls at a time (`frames.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import sys
import traceback
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from itertools import count
from typing import Any

from forage_proto.v1.trajectory_pb2 import Prompt
from forage_rollout.environments import frames
from forage_rollout.environments.environment import Action, Budget, Environment, Episode, Observation
from forage_rollout.environments.loading import create_environment, explain_error
from forage_runtime.clients.retriever import RetrieverClient, SearchResult
from forage_runtime.errors import UserError
from forage_runtime.settings import RolloutSettings
from forage_sandbox.child import ParentConnection
from forage_sandbox.confinement import Confinement
from forage_sandbox.explanations import explain
from forage_sandbox.user_files import find_files

_call: ContextVar[int] = ContextVar("call", default=-1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, confinement_json, source = sys.argv[1:]
    confinement = Confinement.from_json(confinement_json)
    own = find_files(source)
    confinement = dataclasses.replace(confinement, read=(*own, *confinement.read))
    parent = ParentConnection(int(descriptor), confinement)
    rollout = RolloutSettings.model_validate_json(parent.receive() or b"")
    (route,) = rollout.environments.values()
    retriever = RelayedRetriever()
    with parent.report_start():
        try:
            environment = create_environment(route, rollout, retriever)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
            raise UserError(explain_error(error) + explain(error, confinement)) from None
    parent.send(json.dumps(_describe(environment)).encode())
    asyncio.run(_Server(environment, retriever, confinement).run(parent))


def _describe(environment: Environment) -> frames.Frame:
    kind = type(environment)
    overrides = [name for name in ("budget", "parse") if getattr(kind, name) is not getattr(Environment, name)]
    # A method that an instance has set for itself counts as well.
    overrides += [name for name in ("budget", "parse") if name in vars(environment)]
    return {
        "name": kind.__name__,
        "tags": list(environment.tags),
        "feedback": environment.feedback,
        "max_turns": environment.max_turns,
        "stops": list(environment.stops),
        "overrides": overrides,
    }


class RelayedRetriever(RetrieverClient):
    """The retriever's client of an environment without a network: the agent carries out its searches."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[SearchResult]] = {}
        self._numbers = count()
        self.writer: asyncio.StreamWriter | None = None

    async def search(
        self,
        queries: Sequence[str],
        topk: int = 0,
        filters: Mapping[str, str | Sequence[str]] | None = None,
        mode: str = "",
    ) -> SearchResult:
        """Search for documents; as that of the client."""
        if self.writer is None:
            raise RuntimeError("the retriever answers from the first call on, not while the environment is created")
        number = next(self._numbers)
        found: asyncio.Future[SearchResult] = asyncio.get_running_loop().create_future()
        self._waiting[number] = found
        query = {"queries": list(queries), "topk": topk, "filters": filters, "mode": mode}
        self.writer.write(frames.pack_frame({"search": number, "for": _call.get(), **query}))
        try:
            return await found
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Nothing: the agent has the connections."""

    def take(self, frame: frames.Frame) -> None:
        """Give the reply to a search to who waits for it."""
        found = self._waiting.get(frame["found"])
        if found is None or found.done():
            return
        if "error" in frame:
            found.set_exception(frames.read_service_error(frame["error"]) or RuntimeError(frame["error"]["text"]))
        else:
            found.set_result(frames.read_result(frame["result"]))


class _Server:
    def __init__(self, environment: Environment, retriever: RelayedRetriever, confinement: Confinement) -> None:
        self._environment = environment
        self._retriever = retriever
        self._confinement = confinement
        self._episodes: dict[int, Episode] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, parent: ParentConnection) -> None:
        """Carry out calls until the agent closes the connection."""
        connection = parent.take_socket()
        connection.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._retriever.writer = self._writer
        while True:
            try:
                frame = await frames.read_frame(reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if "call" in frame:
                self._tasks[frame["id"]] = asyncio.create_task(self._carry_out(frame))
            elif "end" in frame:
                self._episodes.pop(frame["end"], None)
            elif "cancel" in frame:
                if running := self._tasks.get(frame["cancel"]):
                    running.cancel()
            elif "found" in frame:
                self._retriever.take(frame)
            elif "ping" in frame:
                self._writer.write(frames.pack_frame({"pong": True}))

    async def _carry_out(self, frame: frames.Frame) -> None:
        _call.set(frame["id"])
        try:
            reply = {"value": await self._call(frame)}
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                return
            reply = {"error": self._pack_error(error)}
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; the agent names it
            reply = {"error": self._pack_error(error)}
        finally:
            self._tasks.pop(frame["id"], None)
        self._writer.write(_pack({"id": frame["id"], **reply}))
        await self._writer.drain()

    def _pack_error(self, error: BaseException) -> frames.Frame:
        stack = "".join(traceback.format_exception(error))[-4000:]
        return frames.pack_error(error, stack, explain(error, self._confinement))

    async def _call(self, frame: frames.Frame) -> Any:
        environment = self._environment
        if frame["call"] == "close":
            return await environment.close()
        if begin := frame.get("begin"):
            prompt = Prompt.FromString(b64decode(begin["prompt"]))
            self._episodes[frame["episode"]] = Episode(prompt, begin["sample"])
        episode = self._episodes[frame["episode"]]
        episode.turn, episode.hit_length = frame["turn"], frame["hit_length"]
        match frame["call"]:
            case "budget":
                return frames.pack_budget(_check(environment.budget(episode), Budget, "budget"))
            case "parse":
                return frames.pack_action(_check(environment.parse(frame["text"], episode), Action, "parse"))
        action = frames.read_action(frame["action"])
        return frames.pack_observation(_check(await environment.respond(action, episode), Observation, "respond"))


def _check(value: Any, kind: type, method: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{method} returned {value!r:.100}: expected {kind.__name__}")
    return value


def _pack(frame: frames.Frame) -> bytes:
    try:
        return frames.pack_frame(frame)
    except (TypeError, ValueError) as error:  # an observation whose text is no text
        return frames.pack_frame({"id": frame["id"], "error": frames.pack_error(error)})


if __name__ == "__main__":
    main()
