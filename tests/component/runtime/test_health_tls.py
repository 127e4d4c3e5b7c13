"""The health server and its clients within TLS: who is let in, what failures are called, certificates that change."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from certificates import Issuer
from prometheus_client import REGISTRY
from waiting import WAIT_S, wait_until

from forage_runtime.clients import health as health_client
from forage_runtime.clients.health import ask_service, open_client
from forage_runtime.errors import SettingsError
from forage_runtime.security import handshakes, health_gate
from forage_runtime.security.health_gate import HealthGate
from forage_runtime.security.refusals import LOG_PERIOD_S, Refusal, _LogLimit
from forage_runtime.security.tls import check_server, make_client_context
from forage_runtime.settings import TlsSettings
from forage_runtime.telemetry import health as health_server
from forage_runtime.telemetry.health import Health, serve_health

LONG_S = 300.0
"""Limit of what must not end by its limit."""


@pytest.fixture(autouse=True)
def own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    structlog.reset_defaults()  # another test may have left its log in a stream that is closed
    monkeypatch.setattr(health_client, "ANSWER_S", LONG_S)
    monkeypatch.setattr(health_gate, "HANDSHAKE_S", LONG_S)


def make_tls(issuer: Issuer, name: str = "reward", **options: Any) -> TlsSettings:
    return TlsSettings(**issuer.make_settings(issuer.issue(name), **options))


@contextmanager
def serving(address: str, tls: TlsSettings) -> Iterator[str]:
    health = Health()
    server = serve_health(address, health, gate=HealthGate(tls, "reward"))
    health.mark_started()
    try:
        yield f"https://{address}/readyz"
    finally:
        server.shutdown()
        server.server_close()


def count(reason: Refusal) -> float:
    labels = {"wire": "reward/health", "reason": reason}
    return REGISTRY.get_sample_value("forage_common_refused_callers_total", labels) or 0.0


def test_services_and_clients_of_one_authority_understand_each_other(
    issuer: Issuer, free_address: Callable[[], str]
) -> None:
    with serving(free_address(), make_tls(issuer)) as url:
        assert ask_service(url, make_tls(issuer, "cli")).is_ready
        assert ask_service(url, TlsSettings(ca=issuer.ca)).is_ready


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/waitz", "/nothing"])
def test_only_probes_need_no_client_certificate(issuer: Issuer, free_address: Callable[[], str], path: str) -> None:
    is_probe = path in ("/healthz", "/readyz")
    before = count(Refusal.NO_CERTIFICATE)
    with serving(free_address(), make_tls(issuer, require_client_cert=True)) as url:
        url = url.replace("/readyz", path)
        with open_client(TlsSettings(ca=issuer.ca)) as client:
            reply = client.get(url)
            assert reply.status_code == (200 if is_probe else 403)
        with open_client(make_tls(issuer, "prometheus")) as client:
            assert client.get(url).status_code == (404 if path == "/nothing" else 200)
    assert count(Refusal.NO_CERTIFICATE) - before == (0 if is_probe else 1)
    assert is_probe or "client certificate" in reply.json()["detail"]


def test_failures_name_the_cause_and_the_setting(
    issuer: Issuer, other: Issuer, free_address: Callable[[], str]
) -> None:
    client = TlsSettings(ca=issuer.ca)
    expired = issuer.issue_expired("reward")
    foreign = other.issue("reward")
    elsewhere = issuer.issue("elsewhere", hosts=["reward.example"])
    for issued, sentence in (
        (expired, "has expired: renew the file of its tls.cert"),
        (elsewhere, "is not for this address"),
        (foreign, "an authority that tls.ca does not hold"),
    ):
        tls = TlsSettings(ca=issuer.ca, cert=issued.cert, key=issued.key)
        before = count(Refusal.TLS_FAILED)
        with serving(free_address(), tls) as url:
            found = ask_service(url, client)
            wait_until(lambda before=before: count(Refusal.TLS_FAILED) > before)
        assert found.state == "silent"
        assert sentence in found.notes["tls"]


@pytest.mark.parametrize("kind", ["foreign", "expired"])
def test_a_wrong_client_certificate_is_refused_and_counted(
    issuer: Issuer, other: Issuer, free_address: Callable[[], str], kind: str
) -> None:
    issued = other.issue("client") if kind == "foreign" else issuer.issue_expired("client")
    before = count(Refusal.TLS_FAILED)
    with serving(free_address(), make_tls(issuer, require_client_cert=True)) as url:
        found = ask_service(url, TlsSettings(ca=issuer.ca, cert=issued.cert, key=issued.key))
    assert (found.state, count(Refusal.TLS_FAILED) - before) == ("silent", 1)
    assert "tls.cert" in found.notes["tls"]


def test_plain_text_is_answered_with_the_remedy_and_counted(issuer: Issuer, free_address: Callable[[], str]) -> None:
    before = count(Refusal.TLS_FAILED)
    with serving(free_address(), make_tls(issuer)) as url:
        reply = httpx.get(url.replace("https", "http"), timeout=WAIT_S)
        found = ask_service(url.replace("https", "http"), TlsSettings())
    assert (reply.status_code, count(Refusal.TLS_FAILED) - before) == (400, 2)
    assert "this port speaks TLS" in reply.json()["detail"]
    assert "this port speaks TLS" in found.notes["http"]


def test_tls_to_a_plain_port_is_explained(issuer: Issuer, free_address: Callable[[], str]) -> None:
    with serving(free_address(), TlsSettings()) as url:
        found = ask_service(url, TlsSettings(ca=issuer.ca))
    assert "answers in plain text" in found.notes["tls"]


def test_silent_and_slow_clients_delay_nobody_and_are_let_go(
    issuer: Issuer, free_address: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_server, "_ANSWER_S", LONG_S)
    before = count(Refusal.TLS_FAILED)
    with serving(free_address(), make_tls(issuer)) as url:
        host, port = url.split("/")[2].split(":")

        def connect() -> socket.socket:
            return socket.create_connection((host, int(port)), LONG_S)

        silent = [connect() for _ in range(20)]
        slow = make_client_context(TlsSettings(ca=issuer.ca))
        assert isinstance(slow, ssl.SSLContext)
        with slow.wrap_socket(connect(), server_hostname=host) as dripping:
            dripping.sendall(b"GET /")
            assert ask_service(url, TlsSettings(ca=issuer.ca)).is_ready
            monkeypatch.setattr(health_gate, "HANDSHAKE_S", 0.1)
            for connection in [connect() for _ in range(5)]:
                with connection:
                    assert connection.recv(1) == b""
            wait_until(lambda: count(Refusal.TLS_FAILED) - before >= 5)
            monkeypatch.setattr(health_server, "_ANSWER_S", 0.1)
            assert dripping.recv(1) == b""
        for connection in silent:
            with connection:
                assert connection.recv(1) == b""
        wait_until(lambda: not any("process_request" in thread.name for thread in threading.enumerate()))


def test_renewed_certificates_are_used_and_a_removed_authority_is_no_longer_trusted(
    issuer: Issuer, other: Issuer, free_address: Callable[[], str], tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(issuer.ca.read_bytes())
    issued = issuer.issue("reward")
    server = TlsSettings(ca=ca, cert=issued.cert, key=issued.key, require_client_cert=True)
    old, new = (
        TlsSettings(ca=ca, cert=one.cert, key=one.key) for one in (issuer.issue("client"), other.issue("client"))
    )
    with serving(free_address(), server) as url:
        assert ask_service(url, old).is_ready
        assert ask_service(url, new).state == "silent"
        replace(ca, issuer.ca.read_bytes() + other.ca.read_bytes())  # both while everything is renewed
        assert ask_service(url, old).is_ready
        assert ask_service(url, new).is_ready
        replace(ca, b"no certificate")  # a mistake: the last good ones stay
        assert ask_service(url, new).is_ready
        fresh = other.issue("reward")
        replace(issued.key, fresh.key.read_bytes())
        replace(issued.cert, fresh.cert.read_bytes())
        replace(ca, other.ca.read_bytes())
        assert ask_service(url, new).is_ready
        assert ask_service(url, old).state == "silent"


def test_a_service_without_a_certificate_does_not_start(issuer: Issuer) -> None:
    with pytest.raises(SettingsError, match="the retriever has no certificate"):
        check_server(TlsSettings(ca=issuer.ca), "retriever")
    with pytest.raises(SettingsError, match=r"tls.ca /nowhere.pem cannot be read"):
        HealthGate(TlsSettings(ca="/nowhere.pem"), "reward")


def test_a_flood_of_refusals_is_a_line_a_second() -> None:
    now = [0.0]
    limit = _LogLimit(lambda: now[0])
    lines = [limit.count_unlogged("reward/grpc", Refusal.NO_TOKEN) for _ in range(1000)]
    assert (lines[0], set(lines[1:])) == (0, {None})
    assert limit.count_unlogged("reward/grpc", Refusal.WRONG_TOKEN) == 0
    now[0] += LOG_PERIOD_S
    assert limit.count_unlogged("reward/grpc", Refusal.NO_TOKEN) == 999


@pytest.mark.parametrize("is_on", [False, True])
def test_the_health_check_of_the_images_needs_no_certificate(
    issuer: Issuer, free_address: Callable[[], str], repository: Path, is_on: bool
) -> None:
    address = free_address()
    command = [sys.executable, str(repository / "services/healthcheck.py"), "FORAGE__REWARD__HEALTH_ADDRESS"]
    environment = {"FORAGE__REWARD__HEALTH_ADDRESS": f"0.0.0.0:{address.rpartition(':')[2]}"}
    environment |= {"FORAGE__TLS__CA": str(issuer.ca)} if is_on else {}
    tls = make_tls(issuer, require_client_cert=True) if is_on else TlsSettings()

    def run(path: str) -> int:
        return subprocess.run([*command, path], env=environment, capture_output=True, timeout=WAIT_S).returncode

    with serving(address, tls):
        assert run("/readyz") == 0
        assert run("/nothing") != 0
    assert run("/readyz") != 0
    own = address.replace("127.0.0.1", "127.0.0.2")  # the address alone on which the service listens
    environment["FORAGE__REWARD__HEALTH_ADDRESS"] = own
    with serving(own, tls):
        assert run("/readyz") == 0


def test_plain_text_reads_no_authorities() -> None:
    """Whoever asks for health does so every two seconds, with a client of its own."""
    context = make_client_context(TlsSettings())
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.cert_store_stats()["x509_ca"] == 0


def test_other_failures_are_not_explained_as_tls() -> None:
    assert handshakes.explain_tls(ConnectionRefusedError("refused")) == ""
    assert handshakes.explain_tls(None) == ""


def replace(file: Path, content: bytes) -> None:
    fresh = file.with_suffix(".fresh")
    fresh.write_bytes(content)
    fresh.replace(file)
