"""`make bench-probe`: a probe as it is against the naive one, on the rollout's engine and the real reward service.

Both probe the same trajectories (`thoughts.py`) at the same points with the same seeds. The naive one sends a request a
sample, all of a point at once, each with a salt of its own, so that the engine's prefix cache serves none of them:
the same engine with the same settings computes every context whole.

- token_saving: tokens computed by the naive one over those by the probe, contexts and generated tokens, as the
  engine's scheduler counts them.
- seconds_ratio: seconds of the naive one over those of the probe, verdicts included; the median of the rounds.
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
from forage_common.clients.completions import CompletionsClient, Continuations
from forage_common.probe.prober import ProbePlan, Prober
from forage_common.settings import Settings, load_settings
from forage_common.v1.probe_pb2 import Probed
from forage_common.v1.trajectory_pb2 import Status, Trajectory

HERE = Path(__file__).resolve().parent
PLAN = ProbePlan(points=10, samples=50, seed=1)
Counts = dict[str, int]


class OneByOne(CompletionsClient):
    """A request a sample; nothing is shared."""

    async def sample(
        self, token_ids: Sequence[int], samples: int, seed: int, max_tokens: int, stop: str
    ) -> Continuations:
        async def one(number: int) -> Continuations:
            return await super(OneByOne, self).sample(token_ids, 1, seed + number, max_tokens, stop)

        found = await asyncio.gather(*map(one, range(samples)))
        texts = [text for one in found for text in one.texts]
        return Continuations(texts, sum(one.generated_tokens for one in found), 0)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        salted = body and {**body, "cache_salt": uuid.uuid4().hex}
        return await super()._call(method, path, salted)


class Engine:
    """`engine.py`, asked through its pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def line(self) -> Counts:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the engine ended: see runs/bench-probe/engine.log")
        found: Counts = json.loads(line)
        return found

    def counts(self) -> Counts:
        """Tokens since it started."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self.line()


@contextmanager
def engine(overrides: list[str], log: Path) -> Iterator[Engine]:
    """It, until the block ends."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FORAGE__")}
    environment = kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(find_interpreter(Program.ROLLOUT)), str(HERE / "engine.py"), *overrides]
    pipe = subprocess.PIPE
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=file, env=environment, text=True) as process,
    ):
        started = Engine(process)
        started.line()
        yield started  # it ends when its stdin closes


async def probed(settings: Settings, naive: bool, chosen: Sequence[Trajectory]) -> tuple[list[Probed], float]:
    """Probes of the trajectories, one after the other, and the seconds that they took."""
    prober = Prober(settings, PLAN)
    if naive:
        await prober._completions.close()
        prober._completions = OneByOne(settings)
    async with prober:
        began = time.perf_counter()
        found = [await prober.probe(trajectory) for trajectory in chosen]
        seconds = time.perf_counter() - began
    failed = [one.status_detail for one in found if one.status != Status.STATUS_OK]
    if failed:
        sys.exit(f"a probe failed: {failed[0]}")
    return found, seconds


async def made(settings: Settings, count: int, seed: int, documents: int) -> list[Trajectory]:
    async with CompletionsClient(settings) as completions:
        return await thoughts.trajectories(count, seed, documents, completions)


def same_answers(ours: Sequence[Probed], others: Sequence[Probed]) -> float:
    """Share of the points at which both ways have counted the same answers."""
    pairs = [
        (list(one.answers), list(other.answers))
        for a, b in zip(ours, others, strict=True)
        for one, other in zip(a.points, b.points, strict=True)
    ]
    return sum(one == other for one, other in pairs) / len(pairs)


@dataclass
class Way:
    """What one way has taken: tokens by kind, and the seconds of each round."""

    label: str
    tokens: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    @property
    def computed(self) -> int:
        """Tokens."""
        return self.tokens["context"] + self.tokens["generated"]


def measure(
    settings: Settings, started: Engine, rounds: int, trajectories: int, documents: int
) -> tuple[Way, Way, float]:
    """Both ways, and the share of the points at which they agree; rounds are interleaved."""
    ways = Way("forage probe"), Way("one request a sample")
    same = []
    asyncio.run(probed(settings, False, asyncio.run(made(settings, 1, 0, documents))))  # the first requests take longer
    for number in range(1, rounds + 1):
        chosen = asyncio.run(made(settings, trajectories, number, documents))
        found = []
        for naive, way in enumerate(ways):
            before = Counter(started.counts())
            probes, seconds = asyncio.run(probed(settings, bool(naive), chosen))
            way.tokens += Counter(started.counts()) - before
            way.seconds.append(seconds)
            found.append(probes)
        same.append(same_answers(*found))
    return *ways, statistics.mean(same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trajectories", type=int, default=3, help="a round")
    parser.add_argument("--passages", type=int, default=3, help="before the thought; 0: it follows the question")
    given = parser.parse_args()
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
        console.status("probing, both ways …"),
        engine(overrides, folder / "engine.log") as started,
    ):
        ours, naive, same = measure(settings, started, given.rounds, given.trajectories, given.passages)
    probes = given.rounds * given.trajectories
    table = Table(title=f"{probes} probes of {PLAN.points + 1} points × {PLAN.samples} samples; figures are for each")
    for column in ("", "context computed", "from the cache", "generated", "computed in all", "seconds"):
        table.add_column(column, justify="right" if column else "left")
    for way in (ours, naive):
        figures = (way.tokens["context"], way.tokens["cached"], way.tokens["generated"], way.computed)
        table.add_row(way.label, *(f"{count / probes:,.0f}" for count in figures), f"{sum(way.seconds) / probes:.2f}")
    console.print(table)
    console.print(f"both ways counted the same answers at {same:.1%} of the points")
    ratios = [slow / fast for fast, slow in zip(ours.seconds, naive.seconds, strict=True)]
    result = {"token_saving": naive.computed / ours.computed, "seconds_ratio": statistics.median(ratios)}
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))


if __name__ == "__main__":
    main()
