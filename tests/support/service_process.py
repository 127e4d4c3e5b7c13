"""Starts services as the processes they are in production."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

StartService = Callable[..., subprocess.Popen[str]]


@contextmanager
def run_services(repository: Path, folder: Path) -> Iterator[StartService]:
    """`start("reward", "reward.workers=1")`: a service, or a module of one, from its own environment and in a folder;
    killed at the end of the block."""
    started: list[subprocess.Popen[str]] = []

    def start(service: str, *overrides: str) -> subprocess.Popen[str]:
        python = repository / f".venvs/{service.split('.')[0]}/bin/python"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FORAGE__")}
        process = subprocess.Popen(
            [str(python if python.exists() else sys.executable), "-m", f"forage_{service}", *overrides],
            cwd=folder,
            env=environment | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def start_service(repository: Path, tmp_path: Path) -> Iterator[StartService]:
    """`run_services` of a test."""
    with run_services(repository, tmp_path) as start:
        yield start


@pytest.fixture(scope="session")
def wait_until_ready() -> Callable[[subprocess.Popen[str], str], None]:
    """Wait for a service's `/readyz`; fails at once with its log when the process ends."""

    def wait(process: subprocess.Popen[str], health_address: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                pytest.fail(f"the service ended with {process.returncode}: {process.communicate()[1]}")
            try:
                with urllib.request.urlopen(f"http://{health_address}/readyz", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        pytest.fail(f"not ready after {timeout_s} s")

    return wait
