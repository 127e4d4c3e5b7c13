"""`make bench-reward`: the service against (a) its own functions in-process and (b) a plain loop per row.

Rounds are interleaved and results are medians over rounds. Every round measures each variant for some seconds with the
same trajectories. (a) builds the view from plain texts and calls the training and the validation reward; the service
adds protobuf on both ends, gRPC, metrics and canaries. The clients run in this process and share the machine with the
service; single trajectories are sent by lightweight clients, which cost an eighth of the service's CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
from light_client import run_clients
from plain_loop import compute_score as compute_plain_score
from rich.console import Console
from rich.table import Table
from service import RunningService, run_reward_service
from trajectories import Example, build_item, make_examples

from forage_proto.v1 import reward_pb2, reward_pb2_grpc, trajectory_pb2
from forage_reward import registry
from forage_reward.trajectory import GroundTruth, Role, Span, TrajectoryView

CORPUS = 1024
SHAPES = ((1, 1), (1, 32), (256, 1), (256, 32))
WORKERS = (1, 2)


@dataclass(frozen=True)
class Measurement:
    """One variant in one round; latencies are per call."""

    per_s: float
    p50_ms: float
    p99_ms: float
    per_cpu_s: float


def measure_in_process(rows: list[Example], seconds: float) -> Measurement:
    """Measure (a), with one thread."""
    train, validate = registry.bind_reward("search_r1_format", {}, "bench"), registry.bind_reward("em", {}, "bench")

    def score(row: Example) -> None:
        spans = tuple(Span(Role(role), text) for role, text in row.spans)
        view, truth = TrajectoryView(spans, "<|im_end|>"), GroundTruth(row.targets)
        train(view, truth)
        validate(view, truth)

    return measure_loop(score, rows, seconds)


def measure_loop(score: Callable[[Example], object], rows: list[Example], seconds: float) -> Measurement:
    count, times = 0, []
    cpu, began = time.process_time(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        for row in rows[:256]:
            score(row)
        rows = rows[256:] + rows[:256]
        times.append(1000 * (time.perf_counter() - start))
        count += 256
    return summarize(count, times, time.perf_counter() - began, time.process_time() - cpu)


async def measure_single(service: RunningService, requests: list[bytes], clients: int, s: float) -> Measurement:
    """Measure clients that have one connection and one call of one trajectory in flight."""

    def check(reply: bytes) -> None:
        (scored,) = reward_pb2.ScoreResponse.FromString(reply).items
        assert scored.score.status == trajectory_pb2.STATUS_OK

    path = "/forage.v1.Reward/Score"
    await run_clients(service.address, path, requests, clients, time.perf_counter() + min(0.3, s / 4), check)
    cpu, began = service.measure_cpu_s(), time.perf_counter()
    times = await run_clients(service.address, path, requests, clients, began + s, check)
    took = time.perf_counter() - began
    return summarize(len(times), [1000 * seconds for seconds in times], took, service.measure_cpu_s() - cpu)


async def measure_batches(
    service: RunningService, items: list[reward_pb2.ScoreItem], batch: int, clients: int, s: float
) -> Measurement:
    """Measure clients that have one connection and one call of a batch in flight."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 2**28)]
    channels = [grpc.aio.insecure_channel(service.address, options=options) for _ in range(clients)]
    times: list[float] = []

    async def client(number: int, until: float, into: list[float]) -> None:
        stub = reward_pb2_grpc.RewardStub(channels[number])
        position = number * 31 % len(items)
        while time.perf_counter() < until:
            chosen = [items[(position + offset) % len(items)] for offset in range(batch)]
            start = time.perf_counter()
            reply = await stub.Score(reward_pb2.ScoreRequest(items=chosen), timeout=60)
            into.append(1000 * (time.perf_counter() - start))
            assert len(reply.items) == batch
            assert reply.items[-1].score.status == trajectory_pb2.STATUS_OK
            position += batch

    until = time.perf_counter() + min(0.3, s / 4)
    await asyncio.gather(*(client(number, until, []) for number in range(clients)))  # connect, warm up
    cpu, began = service.measure_cpu_s(), time.perf_counter()
    await asyncio.gather(*(client(number, began + s, times) for number in range(clients)))
    took = time.perf_counter() - began
    measurement = summarize(len(times) * batch, times, took, service.measure_cpu_s() - cpu)
    for channel in channels:
        await channel.close()
    return measurement


def summarize(count: int, times: list[float], took_s: float, cpu_s: float) -> Measurement:
    times = sorted(times)
    p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
    return Measurement(count / took_s, statistics.median(times), p99, count / max(cpu_s, 1e-9))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="per variant and round")
    arguments = parser.parse_args()
    runs = Path(__file__).resolve().parents[3] / "runs"
    runs.mkdir(exist_ok=True)
    rows = make_examples(CORPUS)
    items = [build_item(number, row) for number, row in enumerate(rows)]
    requests = [reward_pb2.ScoreRequest(items=[item]).SerializeToString() for item in items]
    results: dict[str, list[Measurement]] = {}
    with contextlib.ExitStack() as stack:
        services = {
            workers: stack.enter_context(
                run_reward_service(
                    runs / f"bench-reward-{workers}.log",
                    "reward.routes.nq={name: search_r1_format}",
                    f"reward.workers={workers}",
                )
            )
            for workers in WORKERS
        }
        for _ in range(arguments.rounds):
            results.setdefault("in-process", []).append(measure_in_process(rows, arguments.seconds))
            results.setdefault("plain loop", []).append(measure_loop(compute_plain_score, rows, arguments.seconds))
            for workers, service in services.items():
                for batch, clients in SHAPES:
                    if batch == 1:
                        measurement = asyncio.run(measure_single(service, requests, clients, arguments.seconds))
                    else:
                        measurement = asyncio.run(measure_batches(service, items, batch, clients, arguments.seconds))
                    results.setdefault(name_variant(batch, clients, workers), []).append(measurement)
    print_report(results, rows)


def name_variant(batch: int, clients: int, workers: int) -> str:
    return f"{batch} x {clients}, {workers} worker{'s' if workers > 1 else ''}"


def print_report(results: dict[str, list[Measurement]], rows: list[Example]) -> None:
    kilobytes = statistics.mean(sum(len(text) for _, text in row.spans) for row in rows) / 1000
    table = Table(title=f"reward: trajectories of {kilobytes:.1f} kB (batch x clients; ratio to in-process)")
    for column in ("variant", "scores/s", "ratio", "p50 ms", "p99 ms", "per CPU s"):
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)

    def compute_median(name: str, metric: str) -> float:
        return statistics.median(getattr(measurement, metric) for measurement in results[name])

    def compute_ratio(name: str, other: str) -> float:
        """Compute the median of the ratios of each round, in which both had the same load on the machine."""
        pairs = zip(results[name], results[other], strict=True)
        return statistics.median(one.per_s / two.per_s for one, two in pairs)

    for name in results:
        medians = [compute_median(name, metric) for metric in ("per_s", "p50_ms", "p99_ms", "per_cpu_s")]
        share = compute_ratio(name, "in-process")
        cells = [f"{medians[0]:.0f}", f"{share:.2f}", *(f"{value:.1f}" for value in medians[1:3]), f"{medians[3]:.0f}"]
        table.add_row(name, *cells)
    Console().print(table)
    summary: dict[str, float] = {
        # One call at a time: workers share its batch.
        "service_over_inprocess_256": compute_ratio(name_variant(256, 1, 2), "in-process"),
        "service_over_inprocess_256x32": compute_ratio(name_variant(256, 32, 2), "in-process"),
        "service_over_inprocess_256_1_worker": compute_ratio(name_variant(256, 1, 1), "in-process"),
        "service_over_plain_loop_256": compute_ratio(name_variant(256, 1, 2), "plain loop"),
        # One core for the service and one for its clients.
        "p99_ms_1x32": compute_median(name_variant(1, 32, 1), "p99_ms"),
        "p99_ms_1x32_2_workers": compute_median(name_variant(1, 32, 2), "p99_ms"),
        "scores_per_cpu_s": compute_median(name_variant(256, 32, 2), "per_cpu_s"),
        "rounds": len(results["in-process"]),
    }
    print(json.dumps({key: round(value, 3) for key, value in summary.items()}))


if __name__ == "__main__":
    main()
