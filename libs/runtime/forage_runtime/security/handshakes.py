"""What TLS servers and clients share: limits, names of certificates, and what failed handshakes mean."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc
from prometheus_client import Counter

from forage_runtime.telemetry.log_sampling import LogSampler
from forage_runtime.telemetry.logs import get_logger

HANDSHAKE_S = 10.0
"""A client that connects and says nothing is let go after this."""

LINGER_S = 1.0
"""How long a connection that is refused stays open for its client to read why."""

_PLAIN_TEXT = json.dumps({"detail": "this port speaks TLS: use https://, and set tls.ca to the services' authority"})
PLAIN_TEXT_REPLY = (
    "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
    f"Content-Length: {len(_PLAIN_TEXT)}\r\n\r\n{_PLAIN_TEXT}"
).encode()
"""The answer to a request in plain text."""

FAILURES = Counter(
    "forage_common_handshake_failures_total", "Attempts to connect to a service that TLS ended", ["service", "reason"]
)
LINES_PER_MINUTE = 2
"""Of the log, for a service and a reason: its callers try again and again."""


class Handshake(StrEnum):
    """What is wrong with it, as the client sees it."""

    EXPIRED = "expired"
    EARLY = "not_yet_valid"
    NAME = "other_name"
    AUTHORITY = "other_authority"
    OWN_CERTIFICATE = "own_certificate"
    PLAIN_TEXT = "plain_text"
    CLOSED = "closed"
    """By the service, without a word: gRPC's do so to plain text and to certificates that they refuse."""
    OTHER = "other"


_EXPIRED = "the service's certificate has expired: renew the file of its tls.cert"
_AUTHORITY = "the service's certificate is of an authority that tls.ca does not hold"
_NAME = "the service's certificate is not for this address: issue tls.cert for this name"
_UNKNOWN = "the service does not know the authority of this client's tls.cert"
_PLAIN = "the service answers in plain text: set tls.ca, tls.cert and tls.key there, too"
_CLOSED = (
    "the service closed the connection at once: it may speak TLS (set tls.ca here), or refuse this client's certificate"
    " (tls.cert, tls.key)"
)
_SIGNS = (
    ("certificate has expired", Handshake.EXPIRED, _EXPIRED),
    (
        "certificate is not yet valid",
        Handshake.EARLY,
        "the service's certificate is not valid yet: check its dates and the clocks",
    ),
    ("self-signed certificate", Handshake.AUTHORITY, _AUTHORITY),
    ("self signed certificate", Handshake.AUTHORITY, _AUTHORITY),
    ("unable to get", Handshake.AUTHORITY, _AUTHORITY),
    ("certificate signature failure", Handshake.AUTHORITY, _AUTHORITY),
    ("mismatch", Handshake.NAME, _NAME),
    ("is not valid for", Handshake.NAME, _NAME),
    ("hostname verification check failed", Handshake.NAME, _NAME),
    ("alert unknown ca", Handshake.OWN_CERTIFICATE, _UNKNOWN),
    (
        "alert certificate required",
        Handshake.OWN_CERTIFICATE,
        "the service asks for a client certificate: set tls.cert and tls.key",
    ),
    (
        "alert certificate expired",
        Handshake.OWN_CERTIFICATE,
        "this client's certificate has expired: renew the file of tls.cert",
    ),
    (
        "alert bad certificate",
        Handshake.OWN_CERTIFICATE,
        "the service refuses this client's certificate: check the file of tls.cert",
    ),
    ("alert decrypt error", Handshake.OWN_CERTIFICATE, _UNKNOWN),
    ("wrong version number", Handshake.PLAIN_TEXT, _PLAIN),
    ("record layer failure", Handshake.PLAIN_TEXT, _PLAIN),
    ("http request", Handshake.PLAIN_TEXT, _PLAIN),
    ("socket closed", Handshake.CLOSED, _CLOSED),
)
_GRPC_UNCONNECTED = ("failed to connect", "connections to all backends failing")
_sampler = LogSampler(LINES_PER_MINUTE)


@dataclass(frozen=True)
class HandshakeFailure:
    """The reason, and a sentence that names the setting to change."""

    reason: Handshake
    sentence: str


def find_failure(error: BaseException | None) -> HandshakeFailure | None:
    """Find what ended a handshake, in an error of ssl, httpx or gRPC or its causes; None for any other error."""
    while error is not None:
        if text := _read_text(error):
            found = (HandshakeFailure(reason, sentence) for sign, reason, sentence in _SIGNS if sign in text)
            failure = next(found, None)
            if failure is not None or not isinstance(error, grpc.RpcError):
                return failure or HandshakeFailure(Handshake.OTHER, f"TLS failed: {error}")
        error = error.__cause__ or error.__context__
    return None


def explain_tls(error: BaseException | None) -> str:
    """Say why TLS failed and which setting to change; empty if it is not what failed."""
    failure = find_failure(error)
    return failure.sentence if failure else ""


def record_failure(service: str, address: str, error: BaseException | None) -> str:
    """Count a failed handshake and log it, a few times a minute; returns its sentence, empty for any other error."""
    if (failure := find_failure(error)) is None:
        return ""
    FAILURES.labels(service, failure.reason).inc()
    if _sampler.admit(f"{service} {address} {failure.reason}"):
        said = {"called": service, "address": address, "reason": str(failure.reason), "detail": failure.sentence}
        get_logger().warning("handshake_failed", **said)
    return failure.sentence


def _read_text(error: BaseException) -> str:
    """What an error of a handshake says, in lower case; empty for other errors."""
    if isinstance(error, grpc.RpcError):
        details = error.details() or ""
        # An established connection may be closed for any reason.
        return details.replace("_", " ").lower() if any(sign in details for sign in _GRPC_UNCONNECTED) else ""
    text = str(error).replace("_", " ").lower()
    return text if isinstance(error, ssl.SSLError) or "[ssl" in text else ""


def is_plain_http(error: ssl.SSLError) -> bool:
    """Whether a handshake failed because the client sent a request in plain text."""
    return error.reason in ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST")


def name_certificate(certificate: Mapping[str, Any] | None) -> str:
    """The name in a verified certificate, as Python shows it: the common name, else the first other name."""
    if not certificate:
        return ""
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    names = [value for name, value in subject if name == "commonName"]
    names += [value for _, value in certificate.get("subjectAltName", ())]
    return names[0] if names else "unnamed"
