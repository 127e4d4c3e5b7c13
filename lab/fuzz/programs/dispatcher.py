"""The dispatcher of the rollout service on a stream of prompts; behind it the real agent and a scripted engine.

python -m fuzz.programs.dispatcher REDIS_URL MODEL CONFIG
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import redis.asyncio
from rollout_backend import AgentBackend, LineEngine

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import Policy, Prompt, Replica
from forage_queue.rollout.dispatcher import Dispatcher
from forage_queue.streams.client import StreamClient
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.settings import load_settings
from forage_runtime.telemetry.logs import configure_logs
from forage_trajectory.codec import pack_group
from fuzz.programs.forgetful import Forgetful

_SERVED = Policy(version=1, epoch=1)


async def main(url: str, config: str) -> None:
    configure_logs("rollout", "ERROR")
    settings = load_settings(Path(config), [f"redis.url={url}", "run.id=fuzz", "redis.reclaim_idle_s=60"], {})
    streams = StreamClient(settings.redis, settings.run.id, 10.0)
    streams.publish(_SERVED)
    streams.create_groups()
    engine = LineEngine(FileTokenizer(settings.model.path))
    engine.gate.set()
    engine.asked = Forgetful()
    agent = AgentBackend(settings, engine)

    async def run_group(prompt: Prompt) -> PackedGroup:
        return pack_group(await agent.run_group(prompt))

    async def ask_engines() -> dict[str, Replica]:
        return {"engine": Replica(serving=_SERVED)}

    async def wait_for_services() -> None:
        pass

    streams.acknowledge_policy("engine", Replica(serving=_SERVED))
    dispatcher = Dispatcher(settings, streams, "fuzzed", run_group, ask_engines, wait_for_services)
    server = redis.asyncio.Redis.from_url(url)
    await server.set("fuzz:ready", 1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(dispatcher.run())
        while True:  # wait: the life of the program
            await asyncio.sleep(0.1)
            await server.xtrim(streams.trajectories, 0)  # a trainer that takes every group
            if dispatcher.counts.restarts:
                sys.exit("the dispatcher began again after an unforeseen error")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
