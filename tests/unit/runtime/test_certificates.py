"""Certificates of a machine's own: what TLS of Python and OpenSSL says of them."""

from __future__ import annotations

import socket  # lint: socket because both ends of its pair are here
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from certificates import Issuer

from forage_runtime.security.certificates import IssuedCertificate


def shake_hands(issuer: Issuer, server: IssuedCertificate, client: IssuedCertificate, name: str) -> bytes:
    """Connect a client to a server, each verifying the other by all rules of RFC 5280; returns what was said."""
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    connecting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context, own in ((accepting, server), (connecting, client)):
        context.load_cert_chain(own.cert, own.key)
        context.load_verify_locations(issuer.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def answer() -> None:
        try:
            with accepting.wrap_socket(theirs, server_side=True) as connection:
                connection.sendall(b"hello")
        except ssl.SSLError:
            theirs.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with connecting.wrap_socket(ours, server_hostname=name) as connection:
            return connection.recv(5)
    finally:
        ours.close()
        thread.join()


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "reward.forage.svc"])
def test_services_verify_each_other_under_every_name_of_a_certificate(tmp_path: Path, name: str) -> None:
    issuer = Issuer(tmp_path)
    server = issuer.issue("reward", hosts=("localhost", "127.0.0.1", "reward.forage.svc"))
    assert shake_hands(issuer, server, issuer.issue("rollout"), name) == b"hello"


@pytest.mark.parametrize(
    ("make_server", "reason"),
    [
        (lambda issuer, other: issuer.issue("reward", hosts=("elsewhere",)), "not valid for 'localhost'"),
        (lambda issuer, other: issuer.issue_expired("reward"), "has expired"),
        (lambda issuer, other: issuer.issue_early("reward"), "not yet valid"),
        (lambda issuer, other: issuer.issue("reward", server=False), "unsuitable certificate purpose"),
        (lambda issuer, other: other.issue("reward"), "unable to get local issuer|signature failure"),
    ],
    ids=["other name", "expired", "early", "for clients", "other authority"],
)
def test_certificate_that_does_not_fit_is_refused(
    tmp_path: Path, make_server: Callable[[Issuer, Issuer], IssuedCertificate], reason: str
) -> None:
    issuer = Issuer(tmp_path / "own")
    server = make_server(issuer, Issuer(tmp_path / "other"))
    with pytest.raises(ssl.SSLCertVerificationError, match=reason):
        shake_hands(issuer, server, issuer.issue("rollout"), "localhost")


def test_keys_are_their_owners_alone_and_nothing_partial_stays(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path)
    issuer.issue("reward")
    first = (tmp_path / "reward.key").read_bytes()
    issuer.issue("reward")
    assert (tmp_path / "reward.key").read_bytes() != first
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {
        "ca.pem": 0o644,
        "ca.key": 0o600,
        "reward.pem": 0o644,
        "reward.key": 0o600,
    }
