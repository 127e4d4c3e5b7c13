"""`make bench-tls`: calls of reward and retriever in plain text, with TLS, and with mutual TLS and a token.

Services and callers are those of a run, all on this machine: `RewardClient`, `RetrieverClient` (HTTP), and the channel
of a front to its shards (gRPC). Connections stay open, as in a run. Rounds are interleaved; ratios are medians of the
ratios of each round, in which all three had the same load on the machine. Processor time is that of service and callers
together. Questions are all different, so that none is answered from a cache.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from services import MUTUAL, PLAIN, TLS, WAYS, Stack, run_stacks

from forage_proto.v1.retriever_pb2 import RetrieveRequest
from forage_proto.v1.retriever_pb2_grpc import RetrieverStub
from forage_proto.v1.reward_pb2 import ScoreItem
from forage_proto.v1.trajectory_pb2 import ROLE_ENV, ROLE_MODEL, ROLE_PROMPT, GroundTruth, Span
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.clients.reward import RewardClient
from forage_runtime.security.channels import open_channel
from forage_runtime.security.tokens import open_token_file

CALLERS = 16
GROUP = 8
"""Trajectories of a call of reward: one group of samples."""

Call = Callable[[int], Awaitable[object]]
_numbers = itertools.count()


@dataclass(frozen=True)
class Measurement:
    """One wire in one way, in one round."""

    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    """Processor time of a call, of both sides."""


def build_items(number: int) -> list[ScoreItem]:
    """A group of trajectories of 3 to 4 kB."""
    text = f"word{number} " * 100
    spans = [
        Span(role=ROLE_PROMPT, text=f"Question {number}: {text[:300]}"),
        Span(role=ROLE_MODEL, text="<think>It is written somewhere.</think><search>where</search>"),
        Span(role=ROLE_ENV, text=f"<information>{text * 3}</information>"),
        Span(role=ROLE_MODEL, text="<think>So it is.</think><answer>Oslo</answer><|im_end|>"),
    ]
    truth = GroundTruth(targets=["oslo"])
    return [
        ScoreItem(
            trajectory_id=f"bench/{number}/{sample}",
            data_source="world_facts",
            spans=spans,
            ground_truth=truth,
            end_of_turn="<|im_end|>",
        )
        for sample in range(GROUP)
    ]


@asynccontextmanager
async def call_reward(stack: Stack) -> AsyncIterator[Call]:
    client = RewardClient(stack.settings)
    yield lambda number: client.score(build_items(number))
    await client.close()


@asynccontextmanager
async def search_http(stack: Stack) -> AsyncIterator[Call]:
    async with RetrieverClient.from_settings(stack.settings) as client:
        yield lambda number: client.search([build_question(number)], topk=3)


@asynccontextmanager
async def search_grpc(stack: Stack) -> AsyncIterator[Call]:
    own = stack.settings.retriever
    tokens = open_token_file(own.auth_token_file, "retriever.auth_token_file")
    async with open_channel(own.grpc_address, stack.settings.tls, tokens=tokens) as channel:
        stub = RetrieverStub(channel)
        yield lambda number: stub.Retrieve(RetrieveRequest(queries=[build_question(number)], topk=3), timeout=60)


WIRES = {
    "reward gRPC": (call_reward, "reward"),
    "retriever gRPC": (search_grpc, "retriever"),
    "retriever HTTP": (search_http, "retriever"),
}


def build_question(number: int) -> str:
    return f"which passage has word{number % 2000} and word{number * 31 % 1999} of {number}"


async def measure(wire: str, stack: Stack, seconds: float) -> Measurement:
    """Measure callers that have one call each in flight."""
    open_calls, service = WIRES[wire]
    process: psutil.Process = getattr(stack, service)
    times: list[float] = []
    async with open_calls(stack) as call:

        async def run(until: float, into: list[float]) -> None:
            while (began := time.perf_counter()) < until:
                await call(next(_numbers))
                into.append(1000 * (time.perf_counter() - began))

        warm = time.perf_counter() + min(0.5, seconds / 4)
        await asyncio.gather(*(run(warm, []) for _ in range(CALLERS)))  # connect, warm up
        cpu, began = _measure_cpu_s(process), time.perf_counter()
        await asyncio.gather(*(run(began + seconds, times) for _ in range(CALLERS)))
        took, cpu = time.perf_counter() - began, _measure_cpu_s(process) - cpu
    times.sort()
    p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
    return Measurement(len(times) / took, statistics.median(times), p99, 1000 * cpu / len(times))


def _measure_cpu_s(service: psutil.Process) -> float:
    times = [process.cpu_times() for process in (service, *service.children(recursive=True), psutil.Process())]
    return float(sum(one.user + one.system for one in times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="per wire, way and round")
    arguments = parser.parse_args()
    results: dict[tuple[str, str], list[Measurement]] = {(wire, way): [] for wire in WIRES for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, run_stacks(Path(folder)) as stacks:
        for number in range(arguments.rounds):
            ways = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]  # none is always first
            for wire in WIRES:
                for way in ways:
                    results[wire, way].append(asyncio.run(measure(wire, stacks[way], arguments.seconds)))
    print_report(results)


def print_report(results: dict[tuple[str, str], list[Measurement]]) -> None:
    def compute_ratio(wire: str, way: str, metric: str) -> float:
        pairs = zip(results[wire, way], results[wire, PLAIN], strict=True)
        return statistics.median(getattr(one, metric) / getattr(plain, metric) for one, plain in pairs)

    table = Table(title=f"{CALLERS} callers on one machine; ratios to plain text")
    for column in ("wire", "way", "calls/s", "ratio", "p50 ms", "p99 ms", "ratio", "CPU ms a call", "ratio"):
        table.add_column(column, justify="left" if column in ("wire", "way") else "right", no_wrap=True)
    summary: dict[str, float] = {}
    for (wire, way), measured in results.items():
        medians = {
            name: statistics.median(getattr(one, name) for one in measured)
            for name in ("per_s", "p50_ms", "p99_ms", "cpu_ms")
        }
        ratios = {name: compute_ratio(wire, way, name) for name in ("per_s", "p99_ms", "cpu_ms")}
        table.add_row(
            *(wire, way, f"{medians['per_s']:.0f}", f"{ratios['per_s']:.2f}", f"{medians['p50_ms']:.1f}"),
            *(f"{medians['p99_ms']:.1f}", f"{ratios['p99_ms']:.2f}", f"{medians['cpu_ms']:.2f}"),
            f"{ratios['cpu_ms']:.2f}",
        )
        name = wire.lower().replace(" ", "_")
        if way == PLAIN:
            summary |= {f"{name}_per_s": medians["per_s"], f"{name}_p99_ms": medians["p99_ms"]}
        else:
            suffix = {TLS: "tls", MUTUAL: "mutual"}[way]
            summary |= {f"{name}_{suffix}_{metric}_ratio": ratio for metric, ratio in ratios.items()}
    Console(width=120).print(table)
    print(json.dumps({key: round(value, 3) for key, value in summary.items()}))


if __name__ == "__main__":
    main()
