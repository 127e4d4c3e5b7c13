"""`make bench-retriever`: the service against a plain FastAPI + torch + IndexFlatIP server, in the same run.

Three servers answer the same questions over the same corpus, each in its own process: the plain one, the service in
dense mode over a Flat index in float32, and the service in int8. Rounds are interleaved, ratios are medians of the
ratios of each round, and only the processor time of the server's own processes is counted. No question comes twice
(`load.py` says how), so results are never cached. The floor is the service's encoder and index alone in one thread.

Set FORAGE_BENCH_DATA to a folder with corpus.jsonl.gz and queries.jsonl.gz; the bundled world facts otherwise. The
first run encodes the corpus once for each server, which takes many minutes; what is built is kept in .cache/bench.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from load import TOPK, Load
from progress import Steps
from questions import CACHE, Data
from questions import load as load_data
from rich.console import Console
from rich.table import Table
from service import HERE, Running, build_environment, start_plain_server, start_retriever

from forage_retriever.command.evaluate import ALL

PLAIN, FP32, INT8 = "plain", "fp32", "int8"
PRECISIONS = (FP32, INT8)
SERVERS = (PLAIN, *PRECISIONS)
SHAPES = ((64, 1), (64, 16))
STARTS = 1 + 2 * len(PRECISIONS)
LOADS = len(SHAPES) * len(SERVERS) + 1
"""Measurements of a round, the floor included."""

CHUNK = 64
COLUMNS = 130


@dataclass
class Measurements:
    """Results of the rounds in order: loads by server and shape, and the floor of the last shape."""

    loads: dict[tuple[str, tuple[int, int]], list[Load]] = field(default_factory=dict)
    floors: list[dict[str, float]] = field(default_factory=list)

    def compute_median(self, server: str, shape: tuple[int, int], metric: str) -> float:
        return statistics.median(getattr(load, metric) for load in self.loads[server, shape])

    def compute_ratio(self, server: str, shape: tuple[int, int], metric: str) -> float:
        """Median over rounds of a server's metric over the plain server's in the same round."""
        pairs = zip(self.loads[server, shape], self.loads[PLAIN, shape], strict=True)
        return statistics.median(getattr(one, metric) / getattr(other, metric) for one, other in pairs)

    def compute_floor_share(self, cpu: bool) -> float:
        """Median over rounds of the service's throughput over the floor's, per second or per second of a processor."""
        shares = []
        for load, floor in zip(self.loads[FP32, SHAPES[-1]], self.floors, strict=True):
            bare = floor["queries"] / floor["cpu_s" if cpu else "seconds"]
            shares.append((load.per_cpu_s if cpu else load.per_s) / bare)
        return statistics.median(shares)


class Bench:
    """The running servers and the requests to them."""

    def __init__(self, data: Data, seconds: float, steps: Steps) -> None:
        self._data = data
        self._seconds = seconds
        self._steps = steps
        self._texts = [question.text for question in data.questions]
        self._asked = json.dumps(self._texts).encode()
        self._passes = 0
        self._plain_index = CACHE / f"plain-{_hash_corpus(data)}.faiss"
        self._indexes: dict[str, str] = {}
        self.servers: dict[str, Running] = {}

    def build(self) -> None:
        """Build the indexes that are missing."""
        console = Console(stderr=True)
        console.print(f"index of {PLAIN}")
        _run_script("plain_server.py", self._data.corpus, self._plain_index, 0)
        for precision in PRECISIONS:
            console.print(f"index of {precision}")
            output = _run_script("build_index.py", self._data.corpus, *_list_encoder_settings(precision))
            self._indexes[precision] = output.decode().splitlines()[-1]

    def list_overrides(self, precision: str) -> list[str]:
        """Dense search with the service's defaults, on CPUs, by one thread: seconds of CPU are what is compared."""
        return [
            "retriever.mode=dense",
            "retriever.device=cpu",
            "retriever.threads=1",
            f"retriever.index={self._indexes[precision]}",
            *_list_encoder_settings(precision),
        ]

    def start(self, stack: ExitStack) -> None:
        """Start all servers; they end with the stack.

        The service is started twice: the second start finds the encoder exported and all files in the page cache.
        """
        show = self._steps.show
        self._steps.begin(f"start of {PLAIN}")
        plain = start_plain_server(self._data.corpus, self._plain_index, CACHE / f"{PLAIN}.log", show=show)
        self.servers[PLAIN] = stack.enter_context(plain)
        for precision in PRECISIONS:
            log, settings = CACHE / f"{precision}.log", self.list_overrides(precision)
            self._steps.begin(f"first start of {precision}")
            with start_retriever(log, *settings, show=show):
                pass
            self._steps.begin(f"second start of {precision}")
            self.servers[precision] = stack.enter_context(start_retriever(log, *settings, show=show))

    def measure_quality(self, precision: str) -> tuple[str, dict[str, dict[str, Any]]]:
        """Measure the metrics of each mode over all questions, by `forage index eval`, and return its table, too."""
        self._steps.begin(f"quality of {precision}")
        command = [sys.executable, "-m", "forage_retriever.command", "eval", self._indexes[precision]]
        out = CACHE / f"{precision}-quality"
        command += [str(self._data.file), "--out", str(out), *_list_encoder_settings(precision)]
        wide = build_environment() | {"COLUMNS": str(COLUMNS)}
        table = subprocess.check_output(command, env=wide, text=True, encoding="utf-8").strip()
        quality = json.loads((out / "eval.json").read_text(encoding="utf-8"))["quality"]
        return table, {mode: by_source[ALL] for mode, by_source in quality.items()}

    def round(self, into: Measurements) -> None:
        """Measure every server under every load, and the floor."""
        for shape in SHAPES:
            for name in self.servers:
                before = self._count_searches()
                self._steps.begin(f"{name}: {shape[0]} clients, {shape[1]} queries a request")
                into.loads.setdefault((name, shape), []).append(self._measure_load(name, *shape))
                if (name, shape) == (FP32, SHAPES[-1]):
                    batches, queries = (now - then for then, now in zip(before, self._count_searches(), strict=True))
                    into.floors.append(self._measure_floor(round(queries / batches)))

    def check_cache(self) -> None:
        """End when results came from the cache: they cost no search."""
        for name in PRECISIONS:
            if hits := self.servers[name].read_metrics().get("forage_retriever_queries_total{hit}", 0.0):
                sys.exit(f"{hits:.0f} queries were answered by the cache of {name}: the metrics are void")

    def collect_answers(self, name: str) -> list[list[str]]:
        """The ids of the best passages for each question."""
        self._steps.begin(f"{name}: answers to all questions")
        ids: list[list[str]] = []
        for begin in range(0, len(self._texts), CHUNK):
            results = self.servers[name].retrieve(self._texts[begin : begin + CHUNK], TOPK)
            ids += [[str(document["id"]) for document in documents] for documents in results]
        return ids

    def _count_searches(self) -> tuple[float, float]:
        """Batches and queries that the service has searched so far."""
        metrics = self.servers[FP32].read_metrics()
        histogram = "forage_retriever_batch_queries"
        return metrics[f"{histogram}_count"], metrics[f"{histogram}_sum"]

    def _measure_floor(self, batch: int) -> dict[str, float]:
        """The encoder and the index alone, in batches of the size that the service has just searched."""
        self._steps.begin(f"floor: batches of {batch}")
        floor = self._run("floor.py", batch, self._seconds, self._passes, *self.list_overrides(FP32))
        return floor | {"batch": batch}

    def _measure_load(self, name: str, clients: int, batch: int) -> Load:
        server = self.servers[name]
        return Load(
            **self._run("load.py", server.address, server.process.pid, clients, batch, self._seconds, self._passes)
        )

    def _run(self, script: str, *arguments: object) -> dict[str, Any]:
        output = _run_script(script, *arguments, stdin=self._asked)
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        self._passes = result["next_pass"]
        return result


def _hash_corpus(data: Data) -> str:
    with data.corpus.open("rb") as corpus:
        return hashlib.file_digest(corpus, "sha256").hexdigest()[:16]


def _list_encoder_settings(precision: str) -> list[str]:
    return [f"retriever.cache_dir={CACHE / 'retriever'}", f"retriever.encoder.precision={precision}"]


def _run_script(script: str, *arguments: object, stdin: bytes = b"") -> bytes:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, input=stdin, env=build_environment(), stdout=subprocess.PIPE, check=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of every load in every round")
    arguments = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    data = load_data()
    steps = Steps(STARTS + arguments.rounds * LOADS + len(SERVERS) + len(PRECISIONS))
    bench, measurements = Bench(data, arguments.seconds, steps), Measurements()
    bench.build()
    with steps, ExitStack() as stack:
        bench.start(stack)
        for _ in range(arguments.rounds):
            bench.round(measurements)
        bench.check_cache()
        answers = {name: bench.collect_answers(name) for name in bench.servers}
        peaks = {name: server.measure_peak_rss() for name, server in bench.servers.items()}
        starts = {name: server.ready_s for name, server in bench.servers.items()}
        stack.close()  # the quality is measured with the machine to itself
        (fp32_table, fp32), (int8_table, int8) = bench.measure_quality(FP32), bench.measure_quality(INT8)
    report(data, measurements, peaks, starts)
    print(fp32_table, int8_table, sep="\n")
    summary = {
        "same_ids": _compute_same_share(answers[PLAIN], answers[FP32]),
        **{
            f"cpu_{clients}x{batch}_{name}": measurements.compute_ratio(name, (clients, batch), "per_cpu_s")
            for name in PRECISIONS
            for clients, batch in SHAPES
        },
        "hit3_loss_int8": fp32["dense"]["hit@3"] - int8["dense"]["hit@3"],
        "p99_64x1": measurements.compute_ratio(FP32, SHAPES[0], "p99_ms"),
        "rss": peaks[FP32] / peaks[PLAIN],
        "rss_int8": peaks[INT8] / peaks[PLAIN],
        "floor_share": measurements.compute_floor_share(cpu=False),
        "floor_share_cpu": measurements.compute_floor_share(cpu=True),
        "hybrid_gain": _compute_gain(fp32["hybrid"]["all@10"], fp32["dense"]["all@10"]),
        "start_s": max(starts[FP32], starts[INT8]),
        "questions": fp32["dense"]["questions"],
        "rounds": arguments.rounds,
    }
    print(json.dumps({name: value if value is None else round(value, 4) for name, value in summary.items()}))


def _compute_same_share(one: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> float:
    """Share of questions with the same ids in the same order."""
    return statistics.mean(a == b for a, b in zip(one, other, strict=True))


def _compute_gain(one: float | None, other: float | None) -> float | None:
    """Null where no question has several gold passages."""
    return None if one is None or other is None else one - other


def report(data: Data, measurements: Measurements, peaks: dict[str, int], starts: dict[str, float]) -> None:
    console = Console(width=COLUMNS)
    table = Table(title=f"{data.name}: top 3 by inner product, clients x queries a request")
    columns = ("load", "server", "queries/s", "per CPU s", "x plain", "p50 ms", "p99 ms", "x plain", "load's own CPU")
    for column in columns:
        table.add_column(column, justify="left" if column in ("load", "server") else "right")
    for shape in SHAPES:
        for name in peaks:
            medians = {
                f: measurements.compute_median(name, shape, f) for f in ("per_s", "per_cpu_s", "p50_ms", "p99_ms")
            }
            own = statistics.median(load.client_cpu_s / load.seconds for load in measurements.loads[name, shape])
            table.add_row(
                f"{shape[0]} x {shape[1]}",
                name,
                f"{medians['per_s']:.0f}",
                f"{medians['per_cpu_s']:.0f}",
                f"{measurements.compute_ratio(name, shape, 'per_cpu_s'):.2f}",
                f"{medians['p50_ms']:.0f}",
                f"{medians['p99_ms']:.0f}",
                f"{measurements.compute_ratio(name, shape, 'p99_ms'):.2f}",
                f"{own:.0%}",
            )
    console.print(table)
    for name in peaks:
        console.print(
            f"{name}: ready after {starts[name]:.1f} s, peak RSS {peaks[name] / 2**20:.0f} MiB", highlight=False
        )
    per_s = statistics.median(floor["queries"] / floor["seconds"] for floor in measurements.floors)
    batch = statistics.median(floor["batch"] for floor in measurements.floors)
    console.print(
        f"floor: {per_s:.0f} queries/s by the encoder and the index alone in batches of {batch:.0f}", highlight=False
    )


if __name__ == "__main__":
    main()
