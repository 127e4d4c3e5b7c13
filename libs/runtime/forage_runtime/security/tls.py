"""TLS of servers and clients, from the one section `tls` of the settings. Files that change are read again."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterable
from functools import cache
from typing import Any

import grpc
from prometheus_client import Counter

from forage_runtime.errors import SettingsError
from forage_runtime.security.file_stamp import Stamp, read_stamp
from forage_runtime.settings import TlsSettings
from forage_runtime.telemetry.log_sampling import LogSampler
from forage_runtime.telemetry.logs import get_logger

HANDSHAKES = Counter("forage_common_grpc_handshakes_total", "TLS handshakes that gRPC callers began", ["wire"])
"""gRPC does not say how they ended; the caller's metrics do (forage_common_handshake_failures_total)."""

_sampler = LogSampler(per_minute=1)


class _PassphraseError(ValueError):
    """A key is encrypted."""


def _refuse_passphrase() -> str:
    raise _PassphraseError


class Certificates:
    """The files of the settings. A change that cannot be read, or does not fit together, keeps the last good ones.

    Raises:
        SettingsError: a file cannot be read, or certificate and key do not belong together, at the start.
    """

    def __init__(self, tls: TlsSettings) -> None:
        self._files = {name: path for name in ("cert", "key", "ca") if (path := getattr(tls, name)) is not None}
        self._stamps, self._contents = self._read()
        self._check()

    @property
    def cert(self) -> bytes | None:
        return self._contents.get("cert")

    @property
    def key(self) -> bytes | None:
        return self._contents.get("key")

    @property
    def ca(self) -> bytes | None:
        return self._contents.get("ca")

    def refresh(self) -> bool:
        """Read the files again where one has changed; returns whether there is something new."""
        try:
            if {name: read_stamp(file) for name, file in self._files.items()} == self._stamps:
                return False
            before = self._contents
            self._stamps, self._contents = self._read()
            try:
                self._check()
            except SettingsError:
                self._contents = before
                raise
        except (OSError, SettingsError) as error:
            if _sampler.admit(str(error)):  # who is asked at each handshake would say it at each
                get_logger().warning("certificates_kept", detail=str(error))
            return False
        get_logger().info("certificates_reloaded")
        return True

    def load_into(self, context: ssl.SSLContext) -> None:
        """Let new connections of a context use these certificates."""
        if "cert" in self._files:
            # Without a passphrase of ours OpenSSL would ask for one on the terminal, and wait.
            context.load_cert_chain(self._files["cert"], self._files["key"], _refuse_passphrase)
        if self.ca is not None:
            context.load_verify_locations(cadata=self.ca.decode("ascii"))

    def _read(self) -> tuple[dict[str, Stamp], dict[str, bytes]]:
        stamps, contents = {}, {}
        for name, file in self._files.items():
            try:
                stamps[name], contents[name] = read_stamp(file), file.read_bytes()
            except OSError as error:
                raise SettingsError(f"tls.{name} {file} cannot be read ({error.strerror}): give a PEM file") from None
        return stamps, contents

    def _check(self) -> None:
        try:
            self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except _PassphraseError:
            raise SettingsError(
                f"tls.key {self._files['key']} has a passphrase, which nobody could give when the service starts: give "
                "a key without one (openssl pkey -in KEY -out NEW), and protect the file"
            ) from None
        except (ssl.SSLError, ValueError) as error:
            files = ", ".join(f"tls.{name} {file}" for name, file in self._files.items())
            raise SettingsError(f"{files}: not PEM files that belong together ({error})") from None


def check_server(tls: TlsSettings, service: str) -> None:
    """Check that a service has what it shows to its callers.

    Raises:
        SettingsError: TLS is on and the service has no certificate.
    """
    if tls.is_on and tls.cert is None:
        raise SettingsError(
            f"tls.ca is set, so every wire speaks TLS, and the {service} has no certificate: set tls.cert and tls.key"
        )


class _ReloadingContext(ssl.SSLContext):
    """A context whose new connections use the files as they are now; a connection that is open keeps what it has.

    Each change makes a context of its own, because one context never forgets an authority, nor sessions that it may
    resume. Without a good one nothing is trusted: this object itself holds no certificate.
    """

    def __new__(cls, protocol: ssl._SSLMethod, *_: Any) -> _ReloadingContext:
        return super().__new__(cls, protocol)

    def __init__(self, protocol: ssl._SSLMethod, files: Certificates, verify_mode: ssl.VerifyMode) -> None:
        super().__init__()
        self._of_files = files
        self._mode = verify_mode
        self._alpn: list[str] = []
        self._lock = threading.Lock()
        self._current = self._build()

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self._refresh().wrap_bio(*args, **options)

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        return self._refresh().wrap_socket(*args, **options)

    def set_alpn_protocols(self, alpn_protocols: Iterable[str]) -> None:
        self._alpn = list(alpn_protocols)
        self._current.set_alpn_protocols(self._alpn)

    def _refresh(self) -> ssl.SSLContext:
        with self._lock:
            if self._of_files.refresh():
                try:
                    self._current = self._build()
                except (OSError, ValueError) as error:  # the files changed again meanwhile: the next connection looks
                    get_logger().warning("certificates_kept", detail=str(error))
            return self._current

    def _build(self) -> ssl.SSLContext:
        context = ssl.SSLContext(self.protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = self._mode
        self._of_files.load_into(context)
        if self._alpn:
            context.set_alpn_protocols(self._alpn)
        return context


def make_server_context(tls: TlsSettings) -> ssl.SSLContext | None:
    """The context of an HTTP server, which looks at the files at each handshake; None where no wire speaks TLS.

    With require_client_cert it asks for certificates and checks them, and lets callers without one in: which routes
    they may use is `forage_runtime.security.http.guard`'s to say, because Kubernetes' probes have none.

    Raises:
        SettingsError: a file is wrong.
    """
    if not tls.is_on:
        return None
    mode = ssl.CERT_OPTIONAL if tls.require_client_cert else ssl.CERT_NONE
    return _ReloadingContext(ssl.PROTOCOL_TLS_SERVER, Certificates(tls), mode)


@cache
def make_client_context(tls: TlsSettings) -> ssl.SSLContext:
    """What httpx takes as `verify`: a context with the authority and this client's certificate.

    It looks at the files at each new connection. Without TLS it trusts nobody: for plain text no more is needed, and a
    context of httpx's own reads every authority of the machine, which takes 80 ms of CPU.

    Raises:
        SettingsError: a file is wrong.
    """
    if not tls.is_on:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return _ReloadingContext(ssl.PROTOCOL_TLS_CLIENT, Certificates(tls), ssl.CERT_REQUIRED)


def http_scheme(tls: TlsSettings) -> str:
    """The scheme of every HTTP address of the services."""
    return "https" if tls.is_on else "http"


def make_grpc_server_credentials(tls: TlsSettings, service: str) -> grpc.ServerCredentials | None:
    """Credentials that look at the files at each handshake, and count it; None where no wire speaks TLS.

    Raises:
        SettingsError: a file is wrong, or the service has no certificate.
    """
    check_server(tls, service)
    if not tls.is_on:
        return None
    handshakes = HANDSHAKES.labels(f"{service}/grpc")
    files = Certificates(tls)

    def configure() -> Any:
        return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], root_certificates=files.ca)

    def fetch() -> Any:
        handshakes.inc()
        return configure() if files.refresh() else None

    return grpc.dynamic_ssl_server_credentials(configure(), fetch, tls.require_client_cert)
