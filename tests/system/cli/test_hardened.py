"""`forage demo security.profile=hardened`: it trains with everything on, and every port turns strangers away."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import psutil
from demo import FORAGE, Demo

from forage_proto.v1.reward_pb2 import DescribeRequest
from forage_proto.v1.reward_pb2_grpc import RewardStub
from forage_runtime.addresses import split_address
from forage_runtime.security.tls import make_client_context
from forage_runtime.security.token_file import HEADER
from forage_runtime.settings import Settings, load_settings

STEPS = 6


def test_a_hardened_demo_trains_answers_and_turns_strangers_away(small_demo: Callable[..., Demo]) -> None:
    demo = small_demo(STEPS, "security.profile=hardened")
    demo.start("--seed", "4", "--base-port", str(demo.base_port))
    demo.wait_for(lambda: demo.steps >= 1)
    file = demo.run / "settings.yaml"
    settings = load_settings(file, (), {})
    with demo.pause("trainer"):
        command = [*FORAGE, "ask", "What is the capital of Mongolia?", "-c", str(file)]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert asked.returncode == 0, asked.stderr
        assert "no services are running" not in asked.stdout
        assert "<think>" in asked.stdout
        _check_http(settings)
        _check_grpc(settings)
        assert list(_list_open_ports(demo)) == []
    assert demo.finish() == 0, demo.output[-3000:]

    summary = demo.summary
    assert summary["steps"] == STEPS
    assert summary["groups_issued"] == summary["groups_trained"] == STEPS * 4
    assert (summary["groups_lost"], summary["groups_duplicated"], summary["restarts"]) == (0, 0, 0)
    acts = [json.loads(line) for line in (demo.run / "audit.jsonl").read_text().splitlines()]
    published = [act for act in acts if act["act"] == "publish_policy"]
    assert [act["version"] for act in published] == list(range(STEPS + 1))
    assert len({act["signed_by"] for act in published}) == 1
    _check_no_secret_is_written(demo)


def _check_http(settings: Settings) -> None:
    """A certificate is needed for all but health, and a token for what serves."""
    context = make_client_context(settings.tls)
    stranger = make_client_context(settings.tls.model_copy(update={"cert": None, "key": None}))
    retriever = f"https://{settings.retriever.http_address}"
    allowed = {HEADER: f"Bearer {_read(settings.retriever.auth_token_file).decode().strip()}"}
    body = {"queries": ["Mongolia"]}
    with (
        httpx.Client(verify=context, trust_env=False) as known,
        httpx.Client(verify=stranger, trust_env=False) as other,
    ):
        assert known.post(f"{retriever}/retrieve", json=body, headers=allowed).status_code == 200
        assert known.post(f"{retriever}/retrieve", json=body).status_code == 401
        assert other.post(f"{retriever}/retrieve", json=body, headers=allowed).status_code == 403
        assert other.get(f"{retriever}/healthz").status_code == 200
        metrics = f"https://{settings.reward.health_address}/metrics"
        assert (known.get(metrics).status_code, other.get(metrics).status_code) == (200, 403)


def _check_grpc(settings: Settings) -> None:
    tls = settings.tls
    known = grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.cert))
    stranger = grpc.ssl_channel_credentials(_read(tls.ca))
    allowed = ((HEADER, f"Bearer {_read(settings.reward.auth_token_file).decode().strip()}"),)

    def describe(credentials: grpc.ChannelCredentials, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
        with grpc.secure_channel(settings.reward.grpc_address, credentials) as channel:
            try:
                RewardStub(channel).Describe(DescribeRequest(), metadata=metadata, timeout=120)
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    assert describe(known, allowed) is grpc.StatusCode.OK
    assert describe(known, ()) is grpc.StatusCode.UNAUTHENTICATED
    assert describe(stranger, allowed) is grpc.StatusCode.UNAVAILABLE


def _read(file: Path | None) -> bytes:
    assert file is not None
    return file.read_bytes()


def _list_open_ports(demo: Demo) -> Iterator[str]:
    """Ports of the run's own services that answer in plain text, or that other machines reach. Redis has its users."""
    own = range(demo.base_port, demo.base_port + 100)
    for process in psutil.Process(demo.process.pid).children(recursive=True):
        for connection in process.net_connections("inet"):
            if connection.status != psutil.CONN_LISTEN:
                continue
            host, port = connection.laddr
            if host.removeprefix("::ffff:") not in ("127.0.0.1", "::1"):
                yield f"{process.name()} listens on {host}:{port}"
            elif port in own and port != demo.base_port and _answers_in_plain_text(f"{host}:{port}"):
                yield f"{process.name()} answers on {host}:{port} in plain text"


def _answers_in_plain_text(address: str) -> bool:
    with socket.create_connection(split_address(address), timeout=3) as plain:
        plain.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        try:
            return plain.recv(12).startswith(b"HTTP/1.1 200")
        except (ConnectionResetError, TimeoutError):  # it waits for a handshake
            return False


def _check_no_secret_is_written(demo: Demo) -> None:
    """No token, password or key of the run is in a log, a report or the settings."""
    places = [demo.run / "secrets", demo.run / "redis" / "passwords"]
    files = [file for place in places for file in place.rglob("*") if file.is_file()]
    secrets = [file.read_text().strip() for file in files if "PUBLIC" not in file.read_text()]
    secrets = [secret for secret in secrets if "CERTIFICATE" not in secret]
    assert len(secrets) >= 7
    for file in (
        file
        for file in demo.run.rglob("*")
        if file.is_file() and file.suffix in (".log", ".yaml", ".jsonl", ".html", ".json")
    ):
        text = file.read_text(errors="replace")
        assert not [secret for secret in secrets if secret in text], f"a secret is in {file}"
    assert not [secret for secret in secrets if secret in demo.output]
