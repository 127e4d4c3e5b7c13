"""What all TLS servers and clients of HTTP share: limits, names of certificates, and sentences for failures."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from typing import Any

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

_SENTENCES = (
    ("certificate has expired", "the service's certificate has expired: renew the file of its tls.cert"),
    ("certificate is not yet valid", "the service's certificate is not valid yet: check its dates and the clocks"),
    ("self-signed certificate", "the service's certificate is of an authority that tls.ca does not hold"),
    ("self signed certificate", "the service's certificate is of an authority that tls.ca does not hold"),
    ("unable to get", "the service's certificate is of an authority that tls.ca does not hold"),
    ("certificate signature failure", "the service's certificate is of an authority that tls.ca does not hold"),
    ("mismatch", "the service's certificate is not for this address: issue tls.cert for this name"),
    ("is not valid for", "the service's certificate is not for this address: issue tls.cert for this name"),
    ("alert unknown ca", "the service does not know the authority of this client's tls.cert"),
    ("alert certificate required", "the service asks for a client certificate: set tls.cert and tls.key"),
    ("alert certificate expired", "this client's certificate has expired: renew the file of tls.cert"),
    ("alert bad certificate", "the service refuses this client's certificate: check the file of tls.cert"),
    ("alert decrypt error", "the service does not know the authority of this client's tls.cert"),
    ("wrong version number", "the service answers in plain text: set tls.ca, tls.cert and tls.key there, too"),
    ("record layer failure", "the service answers in plain text: set tls.ca, tls.cert and tls.key there, too"),
    ("http request", "the service answers in plain text: set tls.ca, tls.cert and tls.key there, too"),
)


def explain_tls(error: BaseException | None) -> str:
    """Say why TLS failed and which setting to change; empty if it is not what failed."""
    while error is not None:
        text = str(error).replace("_", " ").lower()
        if isinstance(error, ssl.SSLError) or "[ssl" in text:
            return next((sentence for sign, sentence in _SENTENCES if sign in text), f"TLS failed: {error}")
        error = error.__cause__ or error.__context__
    return ""


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
