"""`make bench-rollout`: the rollout service against lock-step batches, Hugging Face generate and the ideal.

Every way samples the same trajectories on the tiny policy: prompts, turns, lengths and observations of `plan.py`.

- service: Redis, reward and rollout as `forage up` runs them. Prompts go in by the stream, groups come out by the
  stream; the rate is that between the first and the last groups in flight, as in a training that goes on.
- lock-step (`lockstep.py`): vLLM with the same settings, without the service; batches of as many rows as the engine
  runs at once, and of four times as many, which is what the service has in flight.
- ideal (`in_process.py`): the same generations as independent requests, never fewer than the engine runs at once.
- Hugging Face generate (`hf_generate.py`): the lock-step loop on one padded batch a turn.

The retriever is a stand-in that takes exactly 5, 50 or 200 ms. Rounds are interleaved; ratios are medians of rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import plan
from rich.console import Console
from rich.status import Status
from rich.table import Table
from service import Service, free_base_port, rollout_service
from slow_retriever import SlowRetriever, slow_retriever

from forage_cli.local.stack import Program, find_interpreter, repository, shift_ports
from forage_common.settings import load_settings

HERE = Path(__file__).resolve().parent
DELAYS_MS = (5, 50, 200)
SAMPLES = 8
SLOTS = 64
"""Requests that the engine runs at once."""
IN_FLIGHT = 4 * SLOTS
"""Trajectories that the service runs at once by its defaults."""
BATCHES = (SLOTS, IN_FLIGHT)
"""Rows of a lock-step batch."""
UPDATES = 5
BUSY_IN_FLIGHT = 64


def settings_of(folder: Path, base: int) -> list[str]:
    """What the service and both in-process ways have in common."""
    root = repository()
    return [
        *shift_ports(base),
        f"run.dir={folder}",
        "run.id=bench-rollout",
        f"model.path={root}/models/tiny-policy",
        f"reward.routes.{plan.DATA_SOURCE}={{name: search_r1_format}}",
        f"rollout.environments.{plan.DATA_SOURCE}={{path: {HERE}/spread_environment.py}}",
        f"rollout.engine.max_num_seqs={SLOTS}",
        "rollout.engine.max_model_len=768",
        f"rollout.max_turns={plan.MAX_TURNS - 1}",
        "rollout.max_prompt_length=704",
        f"rollout.max_response_length={plan.MAX_TOKENS}",
        "rollout.max_groups_in_flight=64",  # the bound on trajectories is the one that holds
        "data.train_batch_size=64",
    ]


class InProcess:
    """`in_process.py`, asked through its pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, way: str, prompts: int, number: int, batch: int) -> float:
        """Tokens a second."""
        assert self._process.stdin is not None
        order = {"way": way, "prompts": prompts, "samples": SAMPLES, "number": number, "batch": batch}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return float(self.answer()["tokens_per_s"])

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the in-process engine ended: see its log in runs/bench-rollout/logs")
        found: dict[str, Any] = json.loads(line)
        return found


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FORAGE__")}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def in_process(common: list[str], log: Path) -> Iterator[InProcess]:
    """The second engine, until the block ends."""
    command = [str(find_interpreter(Program.ROLLOUT)), str(HERE / "in_process.py"), *common]
    pipe = subprocess.PIPE
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=file, env=environment(), text=True) as process,
    ):
        started = InProcess(process)
        started.answer()
        yield started  # it ends when its stdin closes


def hf_generate(common: list[str], prompts: int, log: Path) -> float:
    """Tokens a second."""
    numbers = [str(number) for number in (prompts, SAMPLES, SLOTS)]
    command = [str(find_interpreter(Program.ROLLOUT)), str(HERE / "hf_generate.py"), *numbers, *common]
    with log.open("w") as file:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, env=environment(), text=True)
    if ended.returncode:
        sys.exit(f"hf_generate.py failed: see {log}")
    return float(json.loads(ended.stdout)["tokens_per_s"])


def served(service: Service, prompts: int, number: int) -> float:
    """Tokens a second while as much is in flight as may be; the groups that fill it and empty it do not count."""
    lead = IN_FLIGHT // SAMPLES
    done = service.run(plan.uids(prompts + 2 * lead, number), SAMPLES)
    return done.rate(lead - 1, prompts + lead - 1)


def busy_share(service: Service, prompts: int, number: int) -> float:
    """Share of the time in which the engine had a request, with `BUSY_IN_FLIGHT` trajectories in flight at most."""
    groups = BUSY_IN_FLIGHT // SAMPLES
    with ThreadPoolExecutor(1) as background:
        work = background.submit(service.run, plan.uids(prompts, number), SAMPLES, groups)
        seen: list[tuple[float, float]] = []  # the page is renewed about once a second
        while not work.done():
            busy = service.metrics().get("forage_rollout_busy_seconds_total", 0.0)
            if not seen or busy != seen[-1][1]:
                seen.append((time.perf_counter(), busy))
            time.sleep(0.1)
        done = work.result()
    steady = [point for point in seen if done.finished[groups - 1] <= point[0] <= done.finished[-groups]]
    if len(steady) < 3:
        sys.exit("engine_busy_64: the pass was too short to see: take more --prompts")
    return (steady[-1][1] - steady[0][1]) / (steady[-1][0] - steady[0][0])


def update_pauses(service: Service, prompts: int, number: int) -> list[float]:
    """Seconds that generation stood still for each of `UPDATES` policies published under load."""
    with ThreadPoolExecutor(1) as background:
        work = background.submit(service.run, plan.uids(prompts, number), SAMPLES)
        time.sleep(2.0)
        pauses = []
        for version in range(1, UPDATES + 1):
            if work.done():
                sys.exit("update_pause_s: the load ended before the updates did: take more --prompts")
            pauses.append(service.update(version))
        work.result()
    return pauses


class Bench:
    """The parts that run, and what was measured so far: way → tokens a second of each round."""

    def __init__(self, service: Service, engine: InProcess, retriever: SlowRetriever, prompts: int) -> None:
        self.service, self.engine, self.retriever = service, engine, retriever
        self.prompts = prompts
        self.rates: dict[str, list[float]] = {}
        self._numbers = itertools.count(1)

    def round(self, spinner: Status, title: str) -> None:
        """Every way once."""
        ways: list[tuple[str, int, Callable[[], float]]] = [("ideal", 5, self._ideal)]
        for delay in DELAYS_MS:
            ways += [(f"service, {delay} ms", delay, self._service)]
            ways += [(f"lock-step of {rows}, {delay} ms", delay, partial(self._lockstep, rows)) for rows in BATCHES]
        for name, delay, way in ways:
            spinner.update(f"{title}: {name}")
            self.retriever.delay_s = delay / 1000
            self.rates.setdefault(name, []).append(way())

    def number(self) -> int:
        """Of another pass over the plan."""
        return next(self._numbers)

    def _ideal(self) -> float:
        return self.engine.ask("ideal", self.prompts, self.number(), SLOTS)

    def _lockstep(self, rows: int) -> float:
        return self.engine.ask("lockstep", self.prompts, self.number(), rows)

    def _service(self) -> float:
        return served(self.service, self.prompts, self.number())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=64, help=f"of a pass; {SAMPLES} samples each")
    parser.add_argument("--quick", action="store_true", help="one round of 32 prompts: to see that it works")
    arguments = parser.parse_args()
    rounds, prompts = (1, 32) if arguments.quick else (arguments.rounds, arguments.prompts)
    folder = repository() / "runs"
    folder.mkdir(exist_ok=True)
    common = settings_of(folder, free_base_port())
    settings = load_settings(overrides=common, environ={})
    logs = settings.run.folder / "logs"
    console = Console()
    console.width = max(console.width, 100)
    with ExitStack() as stack:
        spinner = stack.enter_context(console.status("starting"))
        retriever = stack.enter_context(slow_retriever(settings.retriever.http_address))
        service = stack.enter_context(rollout_service(settings, spinner))
        spinner.update("starting the in-process engine")
        engine = stack.enter_context(in_process(common, logs / "in_process.log"))
        bench = Bench(service, engine, retriever, prompts)
        spinner.update("warming up")
        engine.ask("ideal", 2 * SLOTS // SAMPLES, bench.number(), SLOTS)
        service.run(plan.uids(IN_FLIGHT // SAMPLES, bench.number()), SAMPLES)
        for number in range(1, rounds + 1):
            bench.round(spinner, f"round {number} of {rounds}")
        retriever.delay_s = DELAYS_MS[0] / 1000
        spinner.update("Hugging Face generate")
        bench.rates["Hugging Face generate, 5 ms"] = [hf_generate(common, 16, logs / "hf_generate.log")]
        spinner.update(f"engine busy at {BUSY_IN_FLIGHT} in flight")
        busy = busy_share(service, prompts, bench.number())
        spinner.update("updates under load")
        pauses = update_pauses(service, 2 * prompts, bench.number())
        spinner.update("stopping")
    report(console, bench.rates, prompts, busy, pauses)


def report(console: Console, rates: dict[str, list[float]], prompts: int, busy: float, pauses: list[float]) -> None:
    trajectories = plan.rows(plan.uids(prompts, 0), SAMPLES)
    each = statistics.mean(sum(row.lengths) for row in trajectories)
    turns = statistics.mean(len(row.lengths) for row in trajectories)
    table = Table(title=f"rollout: trajectories of {turns:.1f} turns and {each:.0f} sampled tokens")

    def ratio(one: str, other: str) -> float:
        """Median of the ratios of each round, in which both met the same neighbours on the machine."""
        if len(rates[one]) != len(rates[other]):  # Hugging Face is measured once
            return statistics.median(rates[one]) / statistics.median(rates[other])
        return statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))

    for column in ("way", "trajectories/s", "tokens/s", "over ideal"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for name, found in rates.items():
        rate = statistics.median(found)
        table.add_row(name, f"{rate / each:.1f}", f"{rate:.0f}", f"{ratio(name, 'ideal'):.2f}")
    console.print(table)
    summary = {
        f"vs_lockstep_{delay}ms{'' if rows == SLOTS else f'_{rows}_rows'}": ratio(
            f"service, {delay} ms", f"lock-step of {rows}, {delay} ms"
        )
        for rows in BATCHES
        for delay in DELAYS_MS
    }
    summary |= {
        "share_of_ideal": ratio("service, 5 ms", "ideal"),
        "vs_hf": ratio("service, 5 ms", "Hugging Face generate, 5 ms"),
        "engine_busy_64": busy,
        "update_pause_s": max(pauses),
        "rounds": len(rates["ideal"]),
    }
    print(json.dumps({key: round(value, 3) for key, value in summary.items()}))


if __name__ == "__main__":
    main()
