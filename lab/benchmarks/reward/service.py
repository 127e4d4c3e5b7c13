"""The reward service as a process, for benchmarks: starts it, waits until it is ready, measures its CPU time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil


@dataclass(frozen=True)
class RunningService:
    """A service that is ready."""

    address: str
    process: psutil.Process

    def list_processes(self) -> list[psutil.Process]:
        """List the service and all processes that it started."""
        return [self.process, *self.process.children(recursive=True)]

    def measure_cpu_s(self) -> float:
        """Sum the CPU time of all its processes so far."""
        total = 0.0
        for process in self.list_processes():
            times = process.cpu_times()
            total += times.user + times.system
        return total


def find_free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def run_reward_service(log: Path, *overrides: str) -> Iterator[RunningService]:
    """Run the service with the given settings until the block ends."""
    address, health = find_free_address(), find_free_address()
    arguments = [f"reward.grpc_address={address}", f"reward.health_address={health}", *overrides]
    with log.open("w", encoding="utf-8") as file, _start_process(arguments, file) as process:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://{health}/readyz", timeout=5):
                    break
            except (urllib.error.URLError, ConnectionError):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the service did not start: see {log}")
                time.sleep(0.05)
        yield RunningService(address, psutil.Process(process.pid))


@contextmanager
def _start_process(arguments: list[str], log: IO[str]) -> Iterator[subprocess.Popen[bytes]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORAGE__")}
    process = subprocess.Popen([sys.executable, "-m", "forage_reward", *arguments], env=environment, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
