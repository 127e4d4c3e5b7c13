"""`make bench-trainer`: updates, publishing and the whole loop, each against what it could be at best or plainly.

- updates (`updates.py`): `PolicyWorker.update` of 128 trajectories with the turns and lengths of
  `lab/benchmarks/rollout/plan.py`, against plain PyTorch and transformers (`plain.py`) with the same micro-batches, the
  same objective and optimizer, and against the same plain code over 16 rows at a time, padded to the longest of the
  step. Plain PyTorch measures the entropy, as the trainer does for its metrics; a line of its own is without. The first
  update of all must agree in loss and gradient norm.
- publishing (`publishing.py`): the weights written, checksummed, flushed and announced, over `shutil.copyfile` and
  fsync of the same files. `publish_over_copy` is that of 130M parameters (0.5 GB).
- end to end (`end_to_end.py`): `forage demo` for a few steps with `trainer.max_staleness` 1 and 0. On separate GPUs a
  step would take generation + training with 0 and the longer of both with 1; the run with 0, in which one waits for
  the other, measures both.

Rounds are interleaved; ratios are medians of rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import end_to_end
from end_to_end import EndToEnd
from rich.console import Console
from rich.status import Status
from rich.table import Table
from service import free_base_port

from forage_cli.local.home import find_home, find_interpreter
from forage_cli.local.stack import Program, Stack, shift_ports
from forage_queue.streams.users import Role
from forage_runtime.settings import load_settings

HERE = Path(__file__).resolve().parent
GROUPS = 16
THREADS = 2
ASYNC, SYNC = 1, 0
"""trainer.max_staleness"""


def in_trainer(script: str, *arguments: str, log: Path) -> Iterator[dict[str, Any]]:
    """Run a script in the trainer's environment, started as the trainer is; yields its lines as they are printed."""
    command = [str(find_interpreter(Program.TRAINER)), str(HERE / script), *arguments]
    threads = {"OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE"}
    environment = os.environ | threads | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, env=environment, text=True, encoding="utf-8"
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # verl says other things
                yield json.loads(line)
    if process.returncode:
        sys.exit(f"{script} failed: see {log}")


def measure_updates(rounds: int, folder: Path, spinner: Status, console: Console) -> dict[str, float]:
    spinner.update("updates: the first of each way, which must be the same")
    overrides = [f"run.dir={folder}", f"model.path={find_home()}/models/tiny-policy", f"trainer.threads={THREADS}"]
    result = []
    for line in in_trainer("updates.py", str(GROUPS), str(rounds), *overrides, log=folder / "updates.log"):
        result.append(line)
        spinner.update(f"updates: {len(result)} of {rounds} rounds are done")
    rounds_s = [line["seconds"] for line in result]

    def ratio(other: str, clock: int = 0) -> float:
        """Ratio of the other way's time to ours; clock 1 is the processor's."""
        return statistics.median(seconds[other][clock] / seconds["trainer"][clock] for seconds in rounds_s)

    rows, tokens, longest = (result[0][name] for name in ("rows", "tokens", "longest"))
    console.print(
        f"{rows} trajectories of {tokens / rows:.0f} tokens on average and {longest} at most: "
        f"padded batches are {tokens / (rows * longest):.0%} full"
    )
    table = table_of("update", "way", "tokens/s", "trainer over it", "CPU s", "trainer over it, per CPU s")
    for name in ("trainer", "plain", "plain, no entropy", "padded"):
        wall, cpu = (statistics.median(seconds[name][clock] for seconds in rounds_s) for clock in (0, 1))
        table.add_row(name, f"{tokens / wall:.0f}", f"{ratio(name):.2f}", f"{cpu:.2f}", f"{ratio(name, 1):.2f}")
    console.print(table)
    return {
        "vs_plain": ratio("plain"),
        "vs_plain_cpu": ratio("plain", 1),
        "vs_plain_no_entropy": ratio("plain, no entropy"),
        "vs_padded": ratio("padded"),
        "vs_padded_cpu": ratio("padded", 1),
    }


def measure_publishing(rounds: int, folder: Path, spinner: Status, console: Console) -> dict[str, float]:
    spinner.update("publishing")
    overrides = [*shift_ports(free_base_port()), f"run.dir={folder}", "run.id=publishing"]
    overrides.append(f"model.path={find_home()}/models/tiny-policy")
    stack = Stack(load_settings(overrides=overrides, environ={}), [Program.REDIS])
    stack.start()
    result = []
    try:
        login = stack.log_in(Role.TRAINER).redis
        overrides += [f"redis.username={login.username}", f"redis.password_file={login.password_file}"]
        for line in in_trainer("publishing.py", str(rounds), *overrides, log=folder / "publishing.log"):
            result.append(line)
            spinner.update(f"publishing: {len(result)} of {rounds} rounds are done")
    finally:
        stack.stop()

    def median(name: str, column: Callable[[float, float], float]) -> float:
        return statistics.median(column(*line[name]) for line in result)

    table = table_of("publish", "policy", "publish s", "copy s", "over copy")
    ratios = {name: median(name, lambda published, copied: published / copied) for name in result[0]}
    for name, ratio in ratios.items():
        seconds = median(name, lambda published, _: published), median(name, lambda _, copied: copied)
        table.add_row(name, *(f"{one:.3f}" for one in seconds), f"{ratio:.2f}")
    console.print(table)
    return {
        "publish_over_copy": ratios["130M parameters"],
        "publish_over_copy_tiny": ratios["tiny policy"],
    }


def measure_end_to_end(runs: int, steps: int, folder: Path, spinner: Status, console: Console) -> dict[str, float]:
    result: dict[int, list[EndToEnd]] = {SYNC: [], ASYNC: []}
    for number in range(1, runs + 1):
        for staleness in result:
            spinner.update(f"end to end: max_staleness {staleness}, {steps} steps, run {number} of {runs}")
            place = folder / f"staleness-{staleness}"
            result[staleness].append(
                end_to_end.run(place, free_base_port(), steps, f"trainer.max_staleness={staleness}")
            )

    def median(staleness: int, column: Callable[[EndToEnd], float]) -> float:
        return statistics.median(map(column, result[staleness]))

    table = table_of("end to end", "max_staleness", "samples/s", "waiting for trajectories s", "the rest of a step s")
    metrics = [lambda one: one.samples_per_s, lambda one: one.generation_s, lambda one: one.training_s]
    for staleness in result:
        table.add_row(str(staleness), *(f"{median(staleness, column):.1f}" for column in metrics))
    console.print(table)
    generation, training = (median(SYNC, column) for column in metrics[1:])
    apart = (generation + training) / max(generation, training)
    console.print(
        f"on separate GPUs of these speeds: {generation:.1f} + {training:.1f} s a step with 0, "
        f"{max(generation, training):.1f} s with 1: {apart:.2f} times as fast"
    )
    together = zip(result[ASYNC], result[SYNC], strict=True)
    return {
        "async_over_sync": statistics.median(a.samples_per_s / s.samples_per_s for a, s in together),
        "async_over_sync_separate": apart,
        "generation_s": generation,
        "training_s": training,
    }


def table_of(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="of updates and of publishing")
    parser.add_argument("--runs", type=int, default=1, help="of the whole stack, with each max_staleness")
    parser.add_argument("--steps", type=int, default=8, help=f"of a run; the first {end_to_end.LEAD} do not count")
    parser.add_argument("--quick", action="store_true", help="two rounds and runs of four steps: to see that it works")
    arguments = parser.parse_args()
    rounds, runs, steps = (2, 1, 4) if arguments.quick else (arguments.rounds, arguments.runs, arguments.steps)
    if steps <= end_to_end.LEAD:
        parser.error(f"--steps {steps}: the first {end_to_end.LEAD} do not count, so give more")
    folder = find_home() / "runs" / "bench-trainer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    console = Console()
    console.width = max(console.width, 100)
    with console.status("starting") as spinner:
        summary = measure_updates(rounds, folder, spinner, console)
        summary |= measure_publishing(rounds, folder, spinner, console)
        summary |= measure_end_to_end(runs, steps, folder, spinner, console)
    summary |= {"rounds": rounds, "runs": runs, "steps": steps, "load": os.getloadavg()[0]}
    print(json.dumps({key: round(value, 3) for key, value in summary.items()}))


if __name__ == "__main__":
    main()
