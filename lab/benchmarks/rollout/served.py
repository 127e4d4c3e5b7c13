"""What a publish costs Redis and the engines' replicas, with simulated replicas and a real server.

    .venvs/rollout/bin/python lab/benchmarks/rollout/served.py REDIS_URL [--engines 64] [--groups 625]

Followers of engines that load at once, and the view that a dispatcher's groups share. It prints the calls of one
publish, from the announcement until every group may run, and the time from an announcement to the begin of a load, as
it is and as it would be with a look every 0.1 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import redis

from forage_proto.v1.trajectory_pb2 import Policy, Replica
from forage_queue.rollout.policy_progress import PolicyProgress
from forage_queue.streams.client import StreamClient
from forage_runtime.settings import RedisSettings
from forage_weights.rollout.follower import Follower

_LOOK_S = 0.1
_ROUNDS = 20


class _Engine:
    """An engine that loads at once. begun: when it began to load the last policy."""

    dtype, out_of_service = "float32", ""

    def __init__(self) -> None:
        self.serving: Policy | None = None
        self.begun = 0.0

    async def load_policy(self, policy: Policy, allow_older: bool = False) -> float:
        self.begun = time.monotonic()
        self.serving = policy
        return 0.0


async def measure(settings: RedisSettings, engines: int, groups: int) -> dict[str, Any]:
    """Publish `_ROUNDS` policies; returns the means of one."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * engines + 16))
    server = redis.Redis.from_url(settings.url)
    run = f"bench-{time.time_ns()}"
    trainer = StreamClient(settings, run)
    served_by = {f"engine-{number}": _Engine() for number in range(engines)}
    followers = {
        name: Follower(StreamClient(settings, run), engine, name)  # type: ignore[arg-type]
        for name, engine in served_by.items()
    }
    asked = 0

    async def ask_engines() -> dict[str, Replica]:
        nonlocal asked
        asked += engines
        return {name: follower.describe() for name, follower in followers.items()}

    served = PolicyProgress(StreamClient(settings, run), asyncio.to_thread, ask_engines)
    trainer.publish(Policy(version=1, epoch=1))
    await asyncio.gather(*(follower.catch_up() for follower in followers.values()))
    tasks = [asyncio.create_task(follower.follow()) for follower in followers.values()]
    tasks.append(asyncio.create_task(served.watch()))
    await served.wait_until_served(1, 60.0)
    await asyncio.sleep(1.0)
    asked, begins, all_served = 0, [], []
    server.config_resetstat()
    began_all = time.monotonic()
    for version in range(2, 2 + _ROUNDS):
        began = time.monotonic()
        await asyncio.to_thread(trainer.publish, Policy(version=version, epoch=1))
        published = time.monotonic()
        assert all(await asyncio.gather(*(served.wait_until_served(version, 60.0) for _ in range(groups))))
        all_served.append(time.monotonic() - began)
        begins += [engine.begun - published for engine in served_by.values()]
    lasted = time.monotonic() - began_all
    stats: Any = server.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): row["calls"] / _ROUNDS for name, row in stats.items()}
    polled = await _measure_polled(settings, f"{run}-polled")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return {
        "engines": engines,
        "groups": groups,
        "calls_of_engines": asked / _ROUNDS,
        "calls_of_redis": sum(calls.get(name, 0) for name in ("xread", "fcall", "fcall_ro")),
        "calls_of_engines_before": engines * groups,
        "looks_per_s_before": engines / _LOOK_S,
        "published_to_begun_ms": round(1e3 * statistics.mean(begins), 1),
        "published_to_begun_ms_polled": round(1e3 * polled, 1),
        "published_to_all_served_ms": round(1e3 * statistics.mean(all_served), 1),
        "rounds_s": round(lasted, 1),
    }


async def _measure_polled(settings: RedisSettings, run: str) -> float:
    """Mean seconds from an announcement until a look every `_LOOK_S` has found it."""
    trainer, reader, found = StreamClient(settings, run), StreamClient(settings, run), []
    for version in range(1, 1 + _ROUNDS):
        policy = Policy(version=version, epoch=1)

        async def look(wanted: Policy = policy) -> float:
            while await asyncio.to_thread(reader.read_policy) != wanted:
                await asyncio.sleep(_LOOK_S)
            return time.monotonic()

        looking = asyncio.create_task(look())
        await asyncio.sleep(_LOOK_S * (1 + version / _ROUNDS))
        await asyncio.to_thread(trainer.publish, policy)
        began = time.monotonic()
        found.append(await looking - began)
    return statistics.mean(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a publish costs.")
    parser.add_argument("url", help="of a Redis server that may be used up")
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--groups", type=int, default=625)
    options = parser.parse_args()
    found = asyncio.run(measure(RedisSettings(url=options.url), options.engines, options.groups))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
