"""`make bench-rollout`: the rollout service against lock-step batches, Hugging Face generate and the ideal.

Every method samples the same trajectories on the tiny policy: prompts, turns, lengths and observations of `plan.py`.

- service: Redis, reward and rollout as `forage up` runs them. Prompts go in by the stream, groups come out by the
  stream; the rate excludes the first and the last groups in flight, as in a long training run.
- lock-step (`lockstep.py`): vLLM with the same settings, without the service; batches of as many rows as the engine
  runs at once, and of four times as many, which is what the service has in flight.
- ideal (`in_process.py`): the same generations as independent requests, never fewer than the engine runs at once.
- Hugging Face generate (`hf_generate.py`): the lock-step loop on one padded batch a turn.

- orders (`batch_order.py`): a batch whose searches take 0.2 to 2 s, by priority and first come first served.

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
from processor_time import ProcessorTime
from rich.console import Console
from rich.status import Status
from rich.table import Table
from service import Service, free_base_port, start_rollout_service
from slow_retriever import SlowRetriever, serve_slow_retriever

from forage_cli.local.home import find_home, find_interpreter
from forage_cli.local.stack import Program, shift_ports
from forage_runtime.settings import load_settings

HERE = Path(__file__).resolve().parent
DELAYS_MS = (5, 50, 200)
SAMPLES = 8
SLOTS = 64
"""Requests that the engine runs at once."""
IN_FLIGHT = 4 * SLOTS
"""Trajectories that the service runs at once at most, by its defaults."""
LEAD = IN_FLIGHT // SAMPLES
"""Groups that are not counted, first and last."""
BATCHES = (SLOTS, IN_FLIGHT)
"""Rows of a lock-step batch."""
UPDATES = 5
BUSY_IN_FLIGHT = 64


def list_overrides(folder: Path, base: int) -> list[str]:
    """List the settings that the service and the in-process methods share."""
    root = find_home()
    return [
        *shift_ports(base),
        f"run.dir={folder}",
        "run.id=bench-rollout",
        f"model.path={root}/models/tiny-policy",
        f"reward.routes.{plan.DATA_SOURCE}={{name: search_r1_format}}",
        f"rollout.environments.{plan.DATA_SOURCE}={{name: {HERE}/spread_environment.py:Spread}}",
        f"rollout.engine.max_num_seqs={SLOTS}",
        "rollout.engine.max_model_len=768",
        f"rollout.max_turns={plan.MAX_TURNS - 1}",
        "rollout.max_prompt_length=704",
        f"rollout.max_response_length={plan.MAX_TOKENS}",
        "rollout.max_groups_in_flight=64",  # the bound on trajectories is the one that holds
        "data.train_batch_size=64",
    ]


class InProcess:
    """`in_process.py`, driven through its pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def measure(self, way: str, prompts: int, number: int, batch: int) -> float:
        """Measure tokens a second."""
        return float(self._order(way, prompts, number, batch)["tokens_per_s"])

    def measure_order(self, way: str, prompts: int, number: int, batch: int) -> dict[str, float]:
        """Measure `batch_s` and `group_s`, see `batch_order.BatchTimes`."""
        return self._order(way, prompts, number, batch)

    def _order(self, way: str, prompts: int, number: int, batch: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        order = {"way": way, "prompts": prompts, "samples": SAMPLES, "number": number, "batch": batch}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self.read_reply()

    def read_reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the in-process engine ended: see its log in runs/bench-rollout/logs")
        reply: dict[str, Any] = json.loads(line)
        return reply


def build_environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FORAGE__")}
    return inherited | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def start_in_process(common: list[str], log: Path) -> Iterator[InProcess]:
    """The second engine, until the block ends."""
    command = [str(find_interpreter(Program.ROLLOUT)), str(HERE / "in_process.py"), *common]
    pipe = subprocess.PIPE
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=file, env=build_environment(), text=True, encoding="utf-8"
        ) as process,
    ):
        engine = InProcess(process)
        engine.read_reply()
        yield engine  # it ends when its stdin closes


def measure_hf_generate(common: list[str], prompts: int, log: Path) -> float:
    """Measure tokens a second of Hugging Face generate."""
    numbers = [str(number) for number in (prompts, SAMPLES, SLOTS)]
    command = [str(find_interpreter(Program.ROLLOUT)), str(HERE / "hf_generate.py"), *numbers, *common]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=file, env=build_environment(), text=True, encoding="utf-8"
        )
    if process.returncode:
        sys.exit(f"hf_generate.py failed: see {log}")
    return float(json.loads(process.stdout)["tokens_per_s"])


def measure_service(service: Service, prompts: int, number: int) -> float:
    """Measure tokens a second at the limit of trajectories in flight, without the first and the last groups."""
    done = service.run(plan.list_uids(prompts + 2 * LEAD, number), SAMPLES)
    return done.compute_rate(LEAD - 1, prompts + LEAD - 1)


def measure_busy_share(service: Service, prompts: int, number: int) -> float:
    """Measure the share of time with a request in the engine, with at most `BUSY_IN_FLIGHT` trajectories in flight."""
    groups = BUSY_IN_FLIGHT // SAMPLES
    with ThreadPoolExecutor(1) as background:
        work = background.submit(service.run, plan.list_uids(prompts, number), SAMPLES, groups)
        samples: list[tuple[float, float]] = []  # the page is renewed about once a second
        while not work.done():
            busy = service.read_metrics().get("forage_rollout_busy_seconds_total", 0.0)
            if not samples or busy != samples[-1][1]:
                samples.append((time.perf_counter(), busy))
            time.sleep(0.1)
        done = work.result()
    steady = [point for point in samples if done.finished[groups - 1] <= point[0] <= done.finished[-groups]]
    if len(steady) < 3:
        sys.exit("engine_busy_64: the pass was too short to see: take more --prompts")
    return (steady[-1][1] - steady[0][1]) / (steady[-1][0] - steady[0][0])


def measure_pauses(service: Service, prompts: int, number: int) -> list[float]:
    """Measure the seconds that generation paused for each of `UPDATES` policies published under load."""
    with ThreadPoolExecutor(1) as background:
        work = background.submit(service.run, plan.list_uids(prompts, number), SAMPLES)
        time.sleep(2.0)
        pauses = []
        for version in range(1, UPDATES + 1):
            if work.done():
                sys.exit("update_pause_s: the load ended before the updates did: take more --prompts")
            pauses.append(service.update(version))
        work.result()
    return pauses


def measure_orders(engine: InProcess, prompts: int, next_pass: Callable[[], int]) -> dict[str, dict[str, float]]:
    """Measure the time of a batch by the engine's order, each order twice, in turns: medians."""
    found: dict[str, list[dict[str, float]]] = {"fcfs": [], "priority": []}
    for way in ("fcfs", "priority", "priority", "fcfs"):
        found[way].append(engine.measure_order(way, prompts, next_pass(), IN_FLIGHT))
    return {
        way: {name: statistics.median(times[name] for times in measured) for name in measured[0]}
        for way, measured in found.items()
    }


class Bench:
    """The running parts and the measurements so far: method → tokens a second of each round."""

    def __init__(self, service: Service, engine: InProcess, retriever: SlowRetriever, prompts: int) -> None:
        self.service, self.engine, self.retriever = service, engine, retriever
        self.prompts = prompts
        self.rates: dict[str, list[float]] = {}
        self.times = ProcessorTime()
        self._numbers = itertools.count(1)

    def round(self, spinner: Status, title: str) -> None:
        """Measure every method once."""
        ways: list[tuple[str, int, Callable[[], float]]] = [("ideal", 5, self._measure_ideal)]
        for delay in DELAYS_MS:
            ways += [(f"service, {delay} ms", delay, self._measure_service)]
            ways += [
                (f"lock-step of {rows}, {delay} ms", delay, partial(self._measure_lockstep, rows)) for rows in BATCHES
            ]
        for name, delay, way in ways:
            spinner.update(f"{title}: {name}")
            self.retriever.delay_s = delay / 1000
            with self.times.measure(name, SAMPLES * self._count_prompts(name)):
                rate = way()
            self.rates.setdefault(name, []).append(rate)

    def _count_prompts(self, way: str) -> int:
        return self.prompts + 2 * LEAD * way.startswith("service")

    def next_pass(self) -> int:
        """Return the number of another pass over the plan."""
        return next(self._numbers)

    def _measure_ideal(self) -> float:
        return self.engine.measure("ideal", self.prompts, self.next_pass(), SLOTS)

    def _measure_lockstep(self, rows: int) -> float:
        return self.engine.measure("lockstep", self.prompts, self.next_pass(), rows)

    def _measure_service(self) -> float:
        return measure_service(self.service, self.prompts, self.next_pass())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=64, help=f"of a pass; {SAMPLES} samples each")
    parser.add_argument("--quick", action="store_true", help="one round of 32 prompts: to see that it works")
    arguments = parser.parse_args()
    rounds, prompts = (1, 32) if arguments.quick else (arguments.rounds, arguments.prompts)
    folder = find_home() / "runs"
    folder.mkdir(exist_ok=True)
    common = list_overrides(folder, free_base_port())
    settings = load_settings(overrides=common, environ={})
    logs = settings.run.folder / "logs"
    console = Console()
    console.width = max(console.width, 100)
    with ExitStack() as stack:
        spinner = stack.enter_context(console.status("starting"))
        retriever = stack.enter_context(serve_slow_retriever(settings.retriever.http_address))
        service = stack.enter_context(start_rollout_service(settings, spinner))
        spinner.update("starting the in-process engine")
        # Requests of one priority are taken as they came, so that this engine has both orders.
        by_priority = [*common, "rollout.engine.args.scheduling_policy=priority"]
        engine = stack.enter_context(start_in_process(by_priority, logs / "in_process.log"))
        bench = Bench(service, engine, retriever, prompts)
        spinner.update("warming up")
        engine.measure("ideal", 2 * SLOTS // SAMPLES, bench.next_pass(), SLOTS)
        service.run(plan.list_uids(IN_FLIGHT // SAMPLES, bench.next_pass()), SAMPLES)
        for number in range(1, rounds + 1):
            bench.round(spinner, f"round {number} of {rounds}")
        retriever.delay_s = DELAYS_MS[0] / 1000
        spinner.update("Hugging Face generate")
        bench.rates["Hugging Face generate, 5 ms"] = [measure_hf_generate(common, 16, logs / "hf_generate.log")]
        spinner.update("orders of a batch")
        orders = measure_orders(engine, 2 * prompts, bench.next_pass)
        spinner.update(f"engine busy at {BUSY_IN_FLIGHT} in flight")
        busy = measure_busy_share(service, prompts, bench.next_pass())
        spinner.update("updates under load")
        pauses = measure_pauses(service, 2 * prompts, bench.next_pass())
        spinner.update("stopping")
        stack.close()
    report(console, bench, prompts, busy, pauses, orders)


def report_orders(console: Console, orders: dict[str, dict[str, float]]) -> None:
    """Print how long a batch takes by the order in which the engine takes waiting generations."""
    table = Table(title="a batch whose searches take 0.2 to 2 s: seconds")
    for column in ("order in the engine", "batch done", "group done, mean"):
        table.add_column(column, justify="left" if column == "order in the engine" else "right", no_wrap=True)
    for way, times in orders.items():
        table.add_row(way, f"{times['batch_s']:.2f}", f"{times['group_s']:.2f}")
    console.print(table)


def report_processor_time(console: Console, spent: dict[str, dict[str, float]]) -> None:
    """Print what each part takes at the shortest delay, by way."""
    ways = [way for way in spent if not way.endswith(tuple(f", {delay} ms" for delay in DELAYS_MS[1:]))]
    table = Table(title="processor time: milliseconds a trajectory")
    for column in ("part", *ways):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part in dict.fromkeys(part for way in ways for part in spent[way]):
        table.add_row(part, *(f"{spent[way].get(part, 0.0):.1f}" for way in ways))
    console.print(table)


def report(
    console: Console,
    bench: Bench,
    prompts: int,
    busy: float,
    pauses: list[float],
    orders: dict[str, dict[str, float]],
) -> None:
    rates, trajectories = bench.rates, plan.list_rows(plan.list_uids(prompts, 0), SAMPLES)
    each = statistics.mean(sum(row.lengths) for row in trajectories)
    turns = statistics.mean(len(row.lengths) for row in trajectories)
    table = Table(title=f"rollout: trajectories of {turns:.1f} turns and {each:.0f} sampled tokens")

    def compute_ratio(one: str, other: str) -> float:
        """Compute the median of the ratios of each round, in which both met the same other load of the machine."""
        if len(rates[one]) != len(rates[other]):  # Hugging Face is measured once
            return statistics.median(rates[one]) / statistics.median(rates[other])
        return statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))

    for column in ("way", "trajectories/s", "tokens/s", "over ideal"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for name, per_round in rates.items():
        rate = statistics.median(per_round)
        table.add_row(name, f"{rate / each:.1f}", f"{rate:.0f}", f"{compute_ratio(name, 'ideal'):.2f}")
    console.print(table)
    report_processor_time(console, bench.times.summarize())
    report_orders(console, orders)
    summary = {
        f"vs_lockstep_{delay}ms{'' if rows == SLOTS else f'_{rows}_rows'}": compute_ratio(
            f"service, {delay} ms", f"lock-step of {rows}, {delay} ms"
        )
        for rows in BATCHES
        for delay in DELAYS_MS
    }
    summary |= {
        "share_of_ideal": compute_ratio("service, 5 ms", "ideal"),
        "vs_hf": compute_ratio("service, 5 ms", "Hugging Face generate, 5 ms"),
        "engine_busy_64": busy,
        "update_pause_s": max(pauses),
        "batch_s_priority_over_fcfs": orders["priority"]["batch_s"] / orders["fcfs"]["batch_s"],
        "rounds": len(rates["ideal"]),
    }
    print(json.dumps({key: round(value, 3) for key, value in summary.items()}))


if __name__ == "__main__":
    main()
