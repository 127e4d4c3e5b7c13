"""Servers as processes for benchmarks: starts them, waits for them, measures their cost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

HERE = Path(__file__).resolve().parent
START_S = 120.0
Show = Callable[[str], None]


def show_nothing(waits_for: str) -> None:
    """Ignore the progress."""


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
        address: host:port of its HTTP side.
        ready_s: from the start of its process until `/readyz` said so.
    """

    address: str
    process: psutil.Process
    ready_s: float

    def measure_peak_rss(self) -> int:
        """Measure the peak resident bytes of the server and of all processes that it started."""
        return self._measure_memory("VmHWM")

    def measure_own_memory(self) -> int:
        """Measure the anonymous bytes in memory now; pages of mapped files come on top, and may be evicted."""
        return self._measure_memory("RssAnon")

    def read_bytes(self) -> int:
        """Count the bytes read from a disk so far; hits of the page cache do not count."""
        return sum(int(process.io_counters().read_bytes) for process in self._list_processes())

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[dict[str, Any]]]:
        """Retrieve the documents for each query."""
        body = {"queries": queries, "topk": topk, "return_scores": True}
        request = urllib.request.Request(
            f"http://{self.address}/retrieve", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return [[pair["document"] for pair in pairs] for pairs in json.load(reply)["result"]]

    def read_metrics(self) -> dict[str, float]:
        """Read the samples of its metrics page by name; labels, where there are any, follow the name in braces."""
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=20) as page:
            text = page.read().decode()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return {f"{s.name}{{{','.join(s.labels.values())}}}" if s.labels else s.name: s.value for s in samples}

    def _measure_memory(self, field: str) -> int:
        statuses = (
            Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8") for process in self._list_processes()
        )
        return sum(1024 * int(status.partition(f"{field}:")[2].split()[0]) for status in statuses)

    def _list_processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


@contextmanager
def start_plain_server(corpus: Path, index: Path, log: Path, show: Show = show_nothing) -> Iterator[Running]:
    """Start the baseline; its index must exist. `show` receives the reason that the server is not ready."""
    address = free_address()
    command = [sys.executable, str(HERE / "plain_server.py"), str(corpus), str(index), address.rpartition(":")[2]]
    with _start_server(command, address, log, show) as running:
        yield running


@contextmanager
def start_retriever(log: Path, *overrides: str, show: Show = show_nothing) -> Iterator[Running]:
    """Start the retriever; its index must exist. `show` receives the reason that the server is not ready."""
    address = free_address()
    addresses = [f"retriever.http_address={address}", f"retriever.grpc_address={free_address()}"]
    command = [sys.executable, "-m", "forage_retriever", *addresses, *overrides]
    with _start_server(command, address, log, show) as running:
        yield running


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def build_environment() -> dict[str, str]:
    """The environment without settings of Forage: a benchmark measures the defaults."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FORAGE__")}
    return inherited | {"HF_HUB_OFFLINE": "1"}


@contextmanager
def _start_server(command: list[str], address: str, log: Path, show: Show) -> Iterator[Running]:
    with log.open("w", encoding="utf-8") as file:
        begin = time.monotonic()
        process = subprocess.Popen(command, env=build_environment(), stdout=file, stderr=file)
        try:
            while waits_for := _read_waiting(address):
                show(waits_for)
                if process.poll() is not None or time.monotonic() - begin > START_S:
                    sys.exit(f"the server did not start: see {log}")
                time.sleep(0.02)
            yield Running(address, psutil.Process(process.pid), time.monotonic() - begin)
        finally:
            process.terminate()
            process.wait(60)


def _read_waiting(address: str) -> str:
    """The reason that the server is not ready; "" = it is ready."""
    try:
        with urllib.request.urlopen(f"http://{address}/readyz", timeout=5):
            return ""
    except urllib.error.HTTPError as refusal:
        return "; ".join(json.load(refusal)["waiting_for"].values()) or "starting"
    except (urllib.error.URLError, ConnectionError):
        return "starting"
