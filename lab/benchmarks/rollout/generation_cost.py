"""What a generation costs outside the engine: CPU time of agent and engine replica, by the way between them.

Two replicas of Ray Serve on this machine, as the service runs them: an agent's and an engine's. The engine samples
nothing, it waits for 50 to 150 ms and answers, so that what is left is the way there and back. Three ways, in turns:

- links: the connections of `forage_rollout.links`, which the service uses.
- grpc: one bidirectional stream of gRPC with the same bytes.
- serve: a call through Serve's handle for each generation, as tuples, pickled.

Prints a table, then one line of JSON: CPU-milliseconds a generation, agent and engine together.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import operator
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from forage_proto.v1.trajectory_pb2 import TemplateValues
from forage_rollout.deployments.cluster import LocalCluster, get_application_name
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_runtime.settings import ReplicaSettings, Settings
from forage_runtime.text.chat_template import Chat

CONCURRENT = 128
SAMPLED = 100
WAYS = ("links", "grpc", "serve")
_METHOD = "/forage.bench/Generate"
_get_fields = operator.attrgetter(*(field.name for field in dataclasses.fields(GenerationRequest)))


class WaitingEngine:
    """Answers with made-up tokens after a wait."""

    end_of_turn = ""

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        return RenderedPrompt([0])

    async def generate(self, request: GenerationRequest) -> Generation:
        await asyncio.sleep(random.uniform(0.05, 0.15))
        ids = request.token_ids[:SAMPLED]
        return Generation(ids, [-0.5] * len(ids), False, [(1, 1, 0, len(ids))])

    async def release(self, affinity: str) -> None:
        """It holds nothing."""


class GrpcServer:
    """The same engine behind one bidirectional stream."""

    def __init__(self, engine: WaitingEngine) -> None:
        self._engine = engine

    async def listen(self) -> str:
        import grpc

        self._server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(self._answer)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("forage.bench", {"Generate": handler}),)
        )
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def _answer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        from forage_rollout.links.frames import pack_generation, unpack_request

        async def generate(body: bytes) -> None:
            generation = await self._engine.generate(unpack_request(body[4:]))
            async with writing:
                await context.write(body[:4] + pack_generation(generation))

        writing = asyncio.Lock()
        async with asyncio.TaskGroup() as tasks:
            async for body in requests:
                tasks.create_task(generate(body))


class GrpcClient:
    """The agent's end of it."""

    def __init__(self, address: str) -> None:
        import grpc

        self._channel = grpc.aio.insecure_channel(address)
        self._call = self._channel.stream_stream(_METHOD)()
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._writing = asyncio.Lock()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            body = await self._call.read()
            self._waiting.pop(body[:4]).set_result(body[4:])

    async def generate(self, request: GenerationRequest) -> Generation:
        from forage_rollout.links.frames import pack_request, unpack_generation

        number = next(self._numbers).to_bytes(4, "little")
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        async with self._writing:
            await self._call.write(number + pack_request(request))
        return unpack_generation(await reply)


def build_deployments() -> tuple[type, type]:
    """The deployments; they import Ray, whose environment must be set before."""
    from forage_rollout.deployments.engine import EngineDeployment
    from forage_rollout.deployments.engine_links import open_pool, open_server
    from forage_rollout.deployments.replica import call_replica, start_process

    class BenchEngine(EngineDeployment):
        """The engine deployment around a waiting engine, with the other ways beside the links."""

        async def __init__(self) -> None:  # type: ignore[misc]
            start_process()
            self._engine: Any = WaitingEngine()
            self._drain_timeout_s = 1.0
            self._server, self._address = await open_server(self._engine)
            self._grpc = GrpcServer(self._engine)
            self._grpc_address = await self._grpc.listen()

        async def check_health(self) -> None:
            """Nothing can break."""

        async def record_routing_stats(self) -> dict[str, str]:
            return {}

        async def get_grpc_address(self) -> str:
            return self._grpc_address

        async def generate(self, fields: tuple[Any, ...]) -> tuple[Any, ...]:
            generation = await self._engine.generate(GenerationRequest(*fields))
            return generation.token_ids, generation.logprobs, generation.hit_length, generation.versions

        async def measure_cpu(self) -> float:
            return time.process_time()

        async def __del__(self) -> None:
            await self._server.close()

    class BenchAgent:
        """Asks for generations in one of the ways, and tells the CPU time of both replicas."""

        def __init__(self, engine: Any) -> None:
            start_process()
            self._handle = engine
            self._ways: dict[str, Callable[[GenerationRequest], Awaitable[Generation]]] = {}

        async def connect(self) -> None:
            pool, _ = await open_pool(self._handle, releases=False)
            unary = self._handle.options(_by_reference=False, method_name="generate")

            async def call(request: GenerationRequest) -> Generation:
                return Generation(*await call_replica(unary, _get_fields(request)))

            grpc_client = GrpcClient(await call_replica(self._handle.get_grpc_address))
            self._ways = {"links": pool.generate, "grpc": grpc_client.generate, "serve": call}

        async def measure(self, way: str, count: int, context: int) -> tuple[float, float, float]:
            """CPU-ms a generation of agent and engine, and generations a second."""
            generate, left = self._ways[way], iter(range(count))
            tokens = list(range(1000, 1000 + context))

            async def work() -> None:
                for number in left:
                    request = GenerationRequest(
                        tokens, SAMPLED, 1.0, 1.0, -1, number, ("</search>",), 0, f"group-{number % 16}"
                    )
                    generation = await generate(request)
                    assert generation.token_ids == tokens[:SAMPLED]

            before = time.process_time(), await call_replica(self._handle.measure_cpu), time.perf_counter()
            await asyncio.gather(*(work() for _ in range(CONCURRENT)))
            seconds = time.perf_counter() - before[2]
            agent, engine = time.process_time() - before[0], await call_replica(self._handle.measure_cpu) - before[1]
            return agent * 1000 / count, engine * 1000 / count, count / seconds

    return BenchEngine, BenchAgent


class BenchCluster(LocalCluster):
    """The service's own Ray with the two deployments."""

    def deploy(self) -> None:
        from ray import serve

        from forage_rollout.deployments.application import build_engine_deployment

        of_engine, of_agent = build_deployments()
        engine = build_engine_deployment(of_engine, self._settings, ReplicaSettings(), 0).bind()
        agent = serve.deployment(name="Agent", ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=8)(of_agent)
        serve.run(agent.bind(engine), name=get_application_name(self._settings), route_prefix=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--generations", type=int, default=2000, help="of each way in a round")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 16000], help="tokens of a context")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent), *sys.path])
    cluster, figures = BenchCluster(Settings()), {}
    try:
        cluster.start()
        agent = cluster.get_handle("Agent")
        agent.connect.remote().result(timeout_s=60)
        for context in arguments.contexts:
            for way in WAYS:
                agent.measure.remote(way, 2 * CONCURRENT, context).result(timeout_s=300)  # warm up
            for _ in range(arguments.rounds):
                for way in WAYS:
                    measured = agent.measure.remote(way, arguments.generations, context).result(timeout_s=600)
                    figures.setdefault((context, way), []).append(measured)
    finally:
        cluster.stop(5.0)
    report(figures)


def report(figures: dict[tuple[int, str], list[tuple[float, float, float]]]) -> None:
    table = Table(
        title=f"{CONCURRENT} generations at a time, {SAMPLED} tokens each: CPU-ms a generation outside the engine"
    )
    for column in ("context", "way", "agent", "engine", "both", "generations/s"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    summary = {}
    for (context, way), rounds in figures.items():
        agent, engine, rate = (statistics.median(one[part] for one in rounds) for part in range(3))
        table.add_row(str(context), way, f"{agent:.2f}", f"{engine:.2f}", f"{agent + engine:.2f}", f"{rate:.0f}")
        summary[f"{way}_{context}"] = round(agent + engine, 3)
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
