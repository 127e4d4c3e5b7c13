"""A TLS endpoint in front of a plain server, for servers that are built without TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path


def make_certificates(folder: Path) -> None:
    """Make ca.pem, and server.pem and client.pem signed by it with their keys in *.key; server.pem is for 127.0.0.1."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")
    for name, more in (("server", ("-addext", "subjectAltName=IP:127.0.0.1")), ("client", ())):
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-subj", f"/CN={name}", *more)
        openssl("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", *signed)


@contextlib.contextmanager
def serve_tls(folder: Path, target: tuple[str, int]) -> Iterator[str]:
    """Serve TLS with the certificates of `make_certificates`, for clients with one; yields "host:port"."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, context, target), daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, context: ssl.SSLContext, target: tuple[str, int]) -> None:
    while True:
        try:
            raw, _ = listener.accept()
        except OSError:  # the test is over
            return
        threading.Thread(target=_relay, args=(raw, context, target), daemon=True).start()


def _relay(raw: socket.socket, context: ssl.SSLContext, target: tuple[str, int]) -> None:
    with (
        contextlib.suppress(OSError),
        context.wrap_socket(raw, server_side=True) as client,
        socket.create_connection(target) as server,
    ):
        threading.Thread(target=_copy, args=(server, client), daemon=True).start()
        _copy(client, server)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(65536):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
