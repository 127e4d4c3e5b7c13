"""Fixtures of reward services as processes: one that most tests share, one of two workers, those of single tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reward_process import Service

StartReward = Callable[..., Service]
CODE = Path(__file__).resolve().parents[1] / "data/reward/user_reward.py"


@pytest.fixture(scope="session")
def start_shared(free_address: Callable[[], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartReward]:
    """Start a service and wait until it is ready. With `user_timeout_s` it has the test's user reward `mine`."""
    services: list[Service] = []

    def start(*overrides: str, user_timeout_s: float = 0) -> Service:
        folder = tmp_path_factory.mktemp("reward")
        address, health_address = free_address(), free_address()
        arguments = [
            f"reward.grpc_address={address}",
            f"reward.health_address={health_address}",
            "reward.routes.world_facts={name: search_r1_format}",
            "reward.routes.nq={name: em}",
            *overrides,
        ]
        if user_timeout_s:
            arguments.append(
                f"reward.user.mine={{function: {CODE}:score, timeout_s: {user_timeout_s}, memory_mib: 256}}"
            )
            arguments.append("reward.routes.user={name: mine}")
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "forage_reward", *arguments],
                cwd=folder,
                env={k: v for k, v in os.environ.items() if not k.startswith("FORAGE__")} | {"OMP_NUM_THREADS": "1"},
                stderr=log,
            )
        (ca,) = [Path(one.removeprefix("tls.ca=")) for one in overrides if one.startswith("tls.ca=")] or [None]
        services.append(Service(process, address, health_address, folder / "log", ca))
        services[-1].wait_until_ready()
        return services[-1]

    yield start
    for service in services:
        service.process.kill()
        service.process.wait()


@pytest.fixture(scope="session")
def service(start_shared: StartReward) -> Service:
    """A service of one process, with a composed route, two shadows and two rewards of users, of which one is hurried.

    Tests compare its metrics before and after.
    """
    return start_shared(
        "reward.routes.composed=[{name: em, weight: 2.0, params: {score: 0.5}}, {name: f1}]",
        "reward.routes.second={name: subem}",
        "reward.shadow.composed=second",
        "reward.routes.shadowed={name: em}",
        "reward.routes.fivefold={name: em, params: {score: 5.0}}",
        "reward.shadow.shadowed=fivefold",
        f"reward.user.hurried={{function: {CODE}:score, timeout_s: 5, memory_mib: 256}}",
        "reward.routes.hurried={name: hurried}",
        user_timeout_s=300,
    )


@pytest.fixture(scope="session")
def workers(start_shared: StartReward) -> Service:
    """A service of two workers."""
    return start_shared("reward.workers=2")


@pytest.fixture
def start(start_shared: StartReward) -> Iterator[StartReward]:
    """Start a service that ends with the test."""
    services: list[Service] = []

    def start_own(*overrides: str, user_timeout_s: float = 0) -> Service:
        services.append(start_shared(*overrides, user_timeout_s=user_timeout_s))
        return services[-1]

    yield start_own
    for service in services:
        service.process.kill()
        service.process.wait()
