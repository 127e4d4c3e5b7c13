"""`soak.py [minutes]`: full load, clients that disconnect mid-stream, user code that hangs.

Prints one JSON object. Exit code 0 means that every call was answered or refused with a status, that no worker was
restarted, and that the memory (RSS) of each server process grew by at most 5 % after warming up.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import grpc
import psutil
from service import RunningService, run_reward_service
from trajectories import build_item, make_examples

from forage_proto.v1 import reward_pb2, reward_pb2_grpc, trajectory_pb2

MAX_GROWTH = 0.05
WARM_UP = 0.3
"""Share of the time before memory is measured: arenas, thread stacks and caches fill once."""

SERVERS = ("forage_reward", "forage_reward.serve.worker")


class Load:
    """Clients of three kinds until a given time; every call ends in exactly one of the counts."""

    def __init__(self, service: RunningService, until: float) -> None:
        self.service = service
        self.until = until
        self.calls: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        rows = make_examples(512)
        self.items = [build_item(number, row) for number, row in enumerate(rows)]
        self.user_items = [build_item(number, row) for number, row in enumerate(rows)]
        for item in self.user_items:
            item.data_source = "user"

    async def run_unary(self, batch: int, seed: int) -> None:
        rng = random.Random(seed)
        async with self.open_channel() as channel:
            stub = reward_pb2_grpc.RewardStub(channel)
            while time.monotonic() < self.until:
                request = reward_pb2.ScoreRequest(items=rng.choices(self.items, k=batch))
                try:
                    reply = await stub.Score(request, timeout=30)
                except grpc.aio.AioRpcError as error:
                    self.calls[f"refused {error.code().name}"] += 1
                    continue
                self.calls["answered" if len(reply.items) == batch else "INCOMPLETE"] += 1
                self.count_statuses(item.score.status for item in reply.items)

    async def run_streams(self, seed: int, disconnects: bool) -> None:
        """Run streams of 50 items, some for the user reward; with `disconnects` each is abandoned half-way."""
        rng = random.Random(seed)
        while time.monotonic() < self.until:
            chosen = [rng.choice(self.user_items if rng.random() < 0.3 else self.items) for _ in range(50)]
            async with self.open_channel() as channel:
                requests = [reward_pb2.ScoreStreamRequest(id=n, item=item) for n, item in enumerate(chosen)]
                call = reward_pb2_grpc.RewardStub(channel).ScoreStream(iter(requests), timeout=30)
                seen = set()
                try:
                    async for reply in call:
                        seen.add(reply.id)
                        self.count_statuses([reply.item.score.status])
                        if disconnects and len(seen) == 20:
                            break
                except grpc.aio.AioRpcError as error:
                    self.calls[f"stream refused {error.code().name}"] += 1
                    continue
                if disconnects:
                    self.calls["stream abandoned by its client"] += 1  # the channel closes under the call
                else:
                    self.calls["stream answered" if len(seen) == len(chosen) else "stream INCOMPLETE"] += 1

    def open_channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.service.address, options=[("grpc.use_local_subchannel_pool", 1)])

    def count_statuses(self, statuses: Iterable[int]) -> None:
        for status in statuses:
            self.statuses[trajectory_pb2.Status.Name(status).removeprefix("STATUS_")] += 1


async def record_memory(service: RunningService, until: float, into: dict[str, list[tuple[float, int]]]) -> None:
    """Record the memory of every server process once a second."""
    while time.monotonic() < until:
        for process in service.list_processes():
            try:
                module = process.cmdline()[2]
                if module in SERVERS:
                    into.setdefault(f"{module} {process.pid}", []).append((time.monotonic(), process.memory_info().rss))
            except (psutil.NoSuchProcess, IndexError):
                continue
        await asyncio.sleep(1.0)


async def run_load(service: RunningService, seconds: float) -> tuple[Load, dict[str, list[tuple[float, int]]]]:
    until = time.monotonic() + seconds
    load, memory = Load(service, until), {}
    clients = [load.run_unary(1, seed) for seed in range(8)] + [load.run_unary(256, seed) for seed in range(2)]
    clients += [load.run_streams(seed, disconnects=False) for seed in range(4)] + [
        load.run_streams(seed, disconnects=True) for seed in range(4)
    ]
    await asyncio.gather(*clients, record_memory(service, until, memory))
    return load, memory


def compute_growth(samples: list[tuple[float, int]]) -> float:
    """Compute memory at the end over memory after warming up, each the median of a tenth of the samples."""
    rss = [value for _, value in samples][int(WARM_UP * len(samples)) :]
    tenth = max(3, len(rss) // 10)
    return statistics.median(rss[-tenth:]) / statistics.median(rss[:tenth])


def main() -> None:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    here = Path(__file__).resolve()
    runs = here.parents[3] / "runs"
    runs.mkdir(exist_ok=True)
    overrides = [
        "reward.workers=2",
        "reward.routes.nq={name: search_r1_format}",
        "reward.routes.user={name: hanging}",
        "reward.routes.f1={name: f1}",
        "reward.shadow.nq=f1",
        f"reward.user.hanging={{function: {here.parent / 'hanging_reward.py'}:score, timeout_s: 2, memory_mib: 512}}",
    ]
    with run_reward_service(runs / "soak-reward.log", *overrides) as service:
        load, memory = asyncio.run(run_load(service, 60 * minutes))
        # A process between fork and exec still has the command line of its parent, but it is not a server.
        memory = {name: samples for name, samples in memory.items() if len(samples) > 3}
        alive = [name for name, samples in memory.items() if samples[-1][0] > load.until - 5]
    growth = {name: compute_growth(memory[name]) for name in memory}
    for name, samples in memory.items():
        warm = samples[int(WARM_UP * len(samples))][1]
        print(
            f"{name}: RSS start {samples[0][1] >> 20} MiB, warm {warm >> 20} MiB, end {samples[-1][1] >> 20} MiB, "
            f"end over warm {growth[name]:.3f}; every tenth: "
            + " ".join(str(rss >> 20) for _, rss in samples[:: max(1, len(samples) // 10)])
        )
    for name, number in sorted((load.calls + load.statuses).items()):
        print(f"{name}: {number}")
    summary = {
        "minutes": minutes,
        "rss_growth_max": round(max(growth.values()), 4),
        "scores": load.statuses.total(),
        "timeouts": load.statuses["TIMEOUT"],
        "calls": dict(load.calls),
        "server_processes": len(memory),
    }
    print(json.dumps(summary))
    failures = [name for name in load.calls if "INCOMPLETE" in name]
    failures += [f"{name} grew" for name, ratio in growth.items() if ratio > 1 + MAX_GROWTH]
    failures += [f"{name} ended" for name in memory if name not in alive]
    if not load.statuses["TIMEOUT"]:
        failures.append("the user reward never hung: the soak was too short to test it")
    if failures:
        sys.exit("soak failed: " + "; ".join(failures))


if __name__ == "__main__":
    main()
