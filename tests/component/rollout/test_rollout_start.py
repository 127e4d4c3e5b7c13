"""The rollout service as a process that cannot start: one sentence and exit code 2."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rollout_parts import ADDRESSES, Services
from waiting import WAIT_S


@pytest.fixture
def services(repository: Path, tmp_path: Path) -> Iterator[Services]:
    services = Services(repository, tmp_path)
    yield services
    services.end()


@pytest.fixture
def addresses(free_address: Callable[[], str]) -> dict[str, str]:
    return {f"{name}_address": free_address() for name in ADDRESSES}


def test_a_port_in_use_ends_with_one_sentence(
    services: Services,
    addresses: dict[str, str],
    repository: Path,
    tmp_path: Path,
) -> None:
    port = "rollout.grpc_address"
    host, _, number = addresses[port].rpartition(":")
    with socket.create_server((host, int(number))):
        overrides = [f"{name}={address}" for name, address in addresses.items()]
        service = services.start("rollout", f"model.path={repository}/models/tiny-policy", *overrides)
        assert service.wait(WAIT_S) == 2
    lines = (tmp_path / "rollout.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("forage rollout: ")] == lines[-1:]
    assert f"cannot listen on {addresses[port]}" in lines[-1]


def test_a_missing_model_folder_ends_with_one_sentence(services: Services, tmp_path: Path) -> None:
    service = services.start("rollout", f"model.path={tmp_path}/missing")
    assert service.wait(WAIT_S) == 2
    assert (tmp_path / "rollout.log").read_text() == (
        f"forage rollout: model.path {tmp_path}/missing does not exist: "
        "set model.path to a complete Hugging Face folder\n"
    )
