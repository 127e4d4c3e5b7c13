"""A process that has no descriptor left serves on, and says so in a line a second; also on addresses of IPv6."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import reserve_ports
from waiting import WAIT_S, wait_until

from forage_runtime.addresses import NO_PROXY, join_address, reach_address, split_address

SERVER = Path(__file__).parents[2] / "support/few_descriptors.py"
CHECK = Path(__file__).parents[3] / "services/healthcheck.py"
IDLE = 150
"""Connections to each of the three servers, which may open 64 files."""


@contextmanager
def open_server(host: str, log: Path) -> Iterator[tuple[str, str, str]]:
    """Addresses of HTTP, of health and of gRPC, as clients on this machine reach them."""
    first = reserve_ports(3)
    addresses = [reach_address(join_address(host, first + place)) for place in range(3)]
    with log.open("wb") as out, subprocess.Popen([sys.executable, SERVER, host, str(first)], stderr=out) as process:
        try:
            wait_until(lambda: all(map(_listens, addresses)), log.read_text)
            yield addresses[0], addresses[1], addresses[2]
        finally:
            process.kill()


def _listens(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if address.startswith("[") else socket.AF_INET) as probe:
        return probe.connect_ex(split_address(address)) == 0


def ask_http(address: str) -> None:
    assert httpx.get(f"http://{address}/readyz", timeout=WAIT_S, trust_env=False).status_code == 200


def ask_grpc(address: str) -> None:
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S, wait_for_ready=True)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


ASK: tuple[Callable[[str], None], ...] = (ask_http, ask_http, ask_grpc)


def test_idle_connections_that_take_all_descriptors_stop_nobody(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open_server("127.0.0.1", log) as addresses, ExitStack() as idle:
        begun = time.monotonic()
        for address in addresses:
            for _ in range(IDLE):
                connection = idle.enter_context(socket.socket())
                connection.settimeout(WAIT_S)
                connection.connect(split_address(address))
        for ask, address in zip(ASK, addresses, strict=True):
            ask(address)
        passed_s = time.monotonic() - begun
    said = log.read_text()
    assert "Traceback" not in said
    assert said.count("\n") <= 3 * (passed_s + 2), "each server has a line a second"


@pytest.mark.parametrize("host", ["::1", "::"])
def test_addresses_of_ipv6_are_listened_on(tmp_path: Path, host: str) -> None:
    with open_server(host, tmp_path / "log") as addresses:
        for ask, address in zip(ASK, addresses, strict=True):
            assert address.startswith("[::1]:")
            ask(address)
            port = split_address(address)[1]
            if host == "::":
                ask(join_address("127.0.0.1", port))
            if ask is ask_http:  # as the images' health check does
                environment = {"LISTENS": join_address(host, port)}
                subprocess.run([sys.executable, CHECK, "LISTENS", "/readyz"], env=environment, check=True)
