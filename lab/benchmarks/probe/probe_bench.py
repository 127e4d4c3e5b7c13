"""`make bench-probe`: the probe against a naive one, on the engine of the rollout and the real reward service.

Both probe the same trajectories (`thoughts.py`) at the same points with the same seeds. The naive one sends one request
per sample, all of a point at the same time, each with its own cache salt, so that the engine computes every context
completely.

- token_saving: tokens computed for the naive probe over those for the probe (contexts and generated tokens), as counted
  by the engine's scheduler.
- seconds_ratio: seconds of the naive probe over those of the probe, including scoring; the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import thoughts
from rich.console import Console
from rich.table import Table

from forage_cli.local.serving import ensure_services
from forage_cli.local.stack import Program, find_interpreter, repository, shift_ports
from forage_probe.completions import CompletionsClient, Continuations
from forage_probe.prober import ProbePlan, Prober
from forage_proto.v1.probe_pb2 import Probed
from forage_proto.v1.trajectory_pb2 import Status, Trajectory
from forage_runtime.settings import Settings, load_settings

HERE = Path(__file__).resolve().parent
PLAN = ProbePlan(points=10, samples=50, seed=1)
Counts = dict[str, int]


class NaiveClient(CompletionsClient):
    """Sends one request per sample and bypasses the prefix cache."""

    async def sample(
        self, token_ids: Sequence[int], samples: int, seed: int, max_tokens: int, stop: str
    ) -> Continuations:
        async def sample_once(number: int) -> Continuations:
            return await super(NaiveClient, self).sample(token_ids, 1, seed + number, max_tokens, stop)

        continuations = await asyncio.gather(*map(sample_once, range(samples)))
        texts = [text for one in continuations for text in one.texts]
        return Continuations(texts, sum(one.generated_tokens for one in continuations), 0)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        salted = body and {**body, "cache_salt": uuid.uuid4().hex}
        return await super()._call(method, path, salted)


class Engine:
    """The process of `engine.py` and its pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read_line(self) -> Counts:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the engine ended: see runs/bench-probe/engine.log")
        counts: Counts = json.loads(line)
        return counts

    def read_counts(self) -> Counts:
        """Read the tokens since the start."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self.read_line()


@contextmanager
def run_engine(overrides: list[str], log: Path) -> Iterator[Engine]:
    """Run the engine until the block ends."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FORAGE__")}
    environment = kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(find_interpreter(Program.ROLLOUT)), str(HERE / "engine.py"), *overrides]
    pipe = subprocess.PIPE
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=file, env=environment, text=True, encoding="utf-8"
        ) as process,
    ):
        process_engine = Engine(process)
        process_engine.read_line()
        yield process_engine  # the process ends when its stdin closes


async def probe_all(settings: Settings, naive: bool, trajectories: Sequence[Trajectory]) -> tuple[list[Probed], float]:
    """Probe the trajectories one after the other; returns the probes and their total seconds."""
    prober = Prober(settings, PLAN)
    if naive:
        await prober._completions.close()
        prober._completions = NaiveClient(settings)
    async with prober:
        began = time.perf_counter()
        probes = [await prober.probe(trajectory) for trajectory in trajectories]
        seconds = time.perf_counter() - began
    failed = [one.status_detail for one in probes if one.status != Status.STATUS_OK]
    if failed:
        sys.exit(f"a probe failed: {failed[0]}")
    return probes, seconds


async def make_trajectories(settings: Settings, count: int, seed: int, documents: int) -> list[Trajectory]:
    async with CompletionsClient(settings) as completions:
        return await thoughts.make_trajectories(count, seed, documents, completions)


def compute_agreement(ours: Sequence[Probed], others: Sequence[Probed]) -> float:
    """Compute the share of the points at which both probes have counted the same answers."""
    pairs = [
        (list(one.answers), list(other.answers))
        for a, b in zip(ours, others, strict=True)
        for one, other in zip(a.points, b.points, strict=True)
    ]
    return sum(one == other for one, other in pairs) / len(pairs)


@dataclass
class ProbeCost:
    """The cost of one kind of probe: tokens by kind, and the seconds of each round."""

    label: str
    tokens: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    @property
    def computed_tokens(self) -> int:
        return self.tokens["context"] + self.tokens["generated"]


def measure(
    settings: Settings, engine: Engine, rounds: int, trajectories: int, documents: int
) -> tuple[ProbeCost, ProbeCost, float]:
    """Measure both probes in interleaved rounds; returns their costs and the share of points at which they agree."""
    costs = ProbeCost("forage probe"), ProbeCost("one request per sample")
    agreements = []
    first = asyncio.run(make_trajectories(settings, 1, 0, documents))
    asyncio.run(probe_all(settings, False, first))  # the first requests take longer
    for number in range(1, rounds + 1):
        chosen = asyncio.run(make_trajectories(settings, trajectories, number, documents))
        results = []
        for naive, cost in enumerate(costs):
            before = Counter(engine.read_counts())
            probes, seconds = asyncio.run(probe_all(settings, bool(naive), chosen))
            cost.tokens += Counter(engine.read_counts()) - before
            cost.seconds.append(seconds)
            results.append(probes)
        agreements.append(compute_agreement(*results))
    return *costs, statistics.mean(agreements)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trajectories", type=int, default=3, help="per round")
    parser.add_argument(
        "--passages", type=int, default=3, help="passages before the thought; 0 = the thought follows the question"
    )
    arguments = parser.parse_args()
    console = Console(highlight=False)
    runs = Path("runs").absolute()
    folder = runs / "bench-probe"
    folder.mkdir(parents=True, exist_ok=True)
    overrides = [
        *shift_ports(24600),
        f"run.dir={runs}",
        "run.id=bench-probe",
        f"model.path={repository()}/models/tiny-policy",
        "rollout.max_response_length=512",
        "rollout.max_prompt_length=512",
        "rollout.engine.max_model_len=1024",
    ]
    with (
        ensure_services(load_settings(None, overrides), Console(quiet=True), (Program.REWARD,)) as settings,
        console.status("measuring both probes …"),
        run_engine(overrides, folder / "engine.log") as engine,
    ):
        ours, naive, agreement = measure(settings, engine, arguments.rounds, arguments.trajectories, arguments.passages)
    probes = arguments.rounds * arguments.trajectories
    table = Table(title=f"{probes} probes of {PLAN.points + 1} points × {PLAN.samples} samples; values per probe")
    for column in ("", "context computed", "from the cache", "generated", "computed in total", "seconds"):
        table.add_column(column, justify="right" if column else "left")
    for cost in (ours, naive):
        counts = (cost.tokens["context"], cost.tokens["cached"], cost.tokens["generated"], cost.computed_tokens)
        table.add_row(cost.label, *(f"{count / probes:,.0f}" for count in counts), f"{sum(cost.seconds) / probes:.2f}")
    console.print(table)
    console.print(f"both probes counted the same answers at {agreement:.1%} of the points")
    ratios = [slow / fast for fast, slow in zip(ours.seconds, naive.seconds, strict=True)]
    result = {"token_saving": naive.computed_tokens / ours.computed_tokens, "seconds_ratio": statistics.median(ratios)}
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))


if __name__ == "__main__":
    main()
