"""Serve deployments around engines that are scripted. Import it where Ray's environment is set: it imports Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ray import serve
from waiting import wait_until_async

from forage_proto.v1.trajectory_pb2 import Policy, TemplateValues
from forage_rollout.deployments.application import build_engine_deployment
from forage_rollout.deployments.autoscaling import ONGOING
from forage_rollout.deployments.engine import EngineDeployment
from forage_rollout.deployments.engine_links import open_pool, open_server
from forage_rollout.deployments.replica import CheckPace, broadcast, start_process
from forage_rollout.engine.engine_counts import EngineCounts
from forage_rollout.engine.leases import Leases
from forage_rollout.links.pool import EnginePool
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_runtime.settings import ReplicaSettings, Settings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.text.chat_template import Chat
from forage_weights.announcement import PolicyError
from forage_weights.rollout.policy import NotServingError


class Inside(NamedTuple):
    """An engine's process, the affinities that were released, and its generations that were cancelled or run."""

    pid: int
    released: list[str]
    cancelled: int
    running: int


@dataclass
class Scripted:
    """A scripted engine; its tokens are the id of its process. Names that begin with "leased" hold leases.

    gate: generations end once it is set.
    """

    serving: Policy | None = None
    out_of_service: str = ""
    difference: float | None = None
    released: list[str] = field(default_factory=list)
    leases: Leases = field(default_factory=lambda: Leases(600.0))
    counts: EngineCounts = field(default_factory=EngineCounts)
    cancelled: int = 0
    running: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    end_of_turn: str = ""

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        raise ValueError("no such role")

    async def generate(self, request: GenerationRequest) -> Generation:
        if self.out_of_service:
            raise NotServingError(self.out_of_service)
        if request.affinity.startswith("leased"):
            await self.leases.acquire(request.affinity)
        self.running += 1
        try:
            await asyncio.sleep(request.max_tokens / 100)
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        self.counts.requests += 1
        assert request == GenerationRequest(
            request.token_ids, request.max_tokens, 0.5, 0.9, 7, 11, ("</x>",), 2, request.affinity
        )
        return Generation([os.getpid()], [-0.5], True, [(1, 2, 0, 1)])

    async def release(self, affinity: str) -> None:
        self.released.append(affinity)
        await self.leases.release(affinity)

    async def load_policy(self, policy: Policy) -> float:
        if policy.version == 13:
            raise PolicyError("altered")
        async with self.leases.drain():
            self.serving = policy
        return 0.25


class ScriptedDeployment(EngineDeployment):
    """The engine deployment around a scripted engine."""

    async def __init__(self) -> None:  # type: ignore[misc]
        start_process()
        self._replica = str(os.getpid())
        self._check_pace = CheckPace()
        self._engine: Any = Scripted()
        self._engine.gate.set()
        self._drain_timeout_s = 60.0
        self._server, self._address = await open_server(self._engine)

    async def check_health(self) -> None:
        pass

    async def forward_openai(self, *request: Any, chat: str = "") -> AsyncGenerator[Any, None]:
        yield os.getpid()

    async def fail(self, pid: int, why: str) -> None:
        if pid == os.getpid():
            self._engine.out_of_service = why

    async def say(self, word: str) -> None:
        get_logger().info(word)

    async def hold(self, holds: bool) -> None:
        """Let no generation end from now on, or go on."""
        if holds:
            self._engine.gate.clear()
        else:
            self._engine.gate.set()

    async def inside(self) -> Inside:
        return Inside(os.getpid(), self._engine.released, self._engine.cancelled, self._engine.running)

    async def __del__(self) -> None:
        await self._server.leave(self._drain_timeout_s)
        await self._server.close()


class BusyDeployment:
    """Reports groups in flight in a dispatcher's place, as many as a file says, and notes where it is removed."""

    def __init__(self, folder: str) -> None:
        start_process()
        self._folder = Path(folder)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {ONGOING: float((self._folder / "groups").read_text())}

    async def __del__(self) -> None:
        await asyncio.sleep(1.0)
        (self._folder / f"drained-{os.getpid()}").touch()


class CallerDeployment:
    """Calls engines from inside a replica, as agents do."""

    def __init__(self, engine: Any) -> None:
        start_process()
        self._handle = engine
        self._opening = asyncio.Lock()
        self._pool: EnginePool | None = None

    async def engines(self) -> EnginePool:
        async with self._opening:
            if self._pool is None:
                self._pool, _ = await open_pool(self._handle, releases=True)
        return self._pool

    async def connect(self, replicas: int) -> None:
        engines = await self.engines()
        await wait_until_async(lambda: engines.counts.engine_links >= replicas)

    async def many(self, names: list[str], tokens: int) -> list[int]:
        engines = await self.engines()
        requests = [GenerationRequest([1, 2], tokens, 0.5, 0.9, 7, 11, ("</x>",), 2, name) for name in names]
        return [done.token_ids[0] for done in await asyncio.gather(*map(engines.generate, requests))]

    async def chat(self, names: list[str]) -> list[int]:
        forward = self._handle.options(stream=True).forward_openai
        return [await anext(aiter(forward.remote("GET", "/", [], b"", chat=name))) for name in names]

    async def repeated(self) -> int:
        return (await self.engines()).counts.generations_repeated

    async def give_up(self, name: str, after_s: float) -> bool:
        try:
            await asyncio.wait_for(self.many([name], 1000), after_s)
        except TimeoutError:
            return True
        return False

    async def render(self) -> str:
        try:
            await (await self.engines()).render_chat([{"role": "?", "content": ""}])
        except ValueError as error:
            return str(error)
        return "rendered"

    async def release(self, name: str) -> None:
        await (await self.engines()).release(name)

    async def everywhere(self, method: str, *arguments: Any) -> list[Any]:
        return await broadcast(self._handle, method, *arguments)


def build_application(settings: Settings, engines: ReplicaSettings, scripted: bool = True, gpus: int = 0) -> Any:
    """Build an application of engines with a caller in the dispatcher's place."""
    deployment, arguments = (ScriptedDeployment, []) if scripted else (EngineDeployment, [settings.model_dump_json()])
    engine = build_engine_deployment(deployment, settings, engines, gpus).bind(*arguments)
    return serve.deployment(name="Dispatcher", ray_actor_options={"num_cpus": 0.1})(CallerDeployment).bind(engine)
