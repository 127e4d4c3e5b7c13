"""The record of acts that change what is served: who published, swapped, paused, updated, and when."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from forage_runtime.security.http.guard import CLIENT_CERTIFICATE
from forage_runtime.security.token_file import HEADER
from forage_runtime.telemetry.logs import get_logger

_LONGEST = 500
_HOST = socket.gethostname()


def record_act(act: str, actor: str, file: Path | None = None, **details: Any) -> None:
    """Log an act as `audit`, and append it to security.audit_file.

    A line is one write at the end of the file, so those of several processes do not mix. A file that cannot be written
    is logged as an error and stops nothing.

    Args:
        act: verb and object: publish_policy, swap_index, pause_engines, …
        actor: service or caller: its certificate's name, its token's fingerprint, or its address.
        details: plain values; of texts the first 500 characters are kept.
    """
    bounded = {
        name: value if isinstance(value, int | float) else str(value)[:_LONGEST] for name, value in details.items()
    }
    get_logger().info("audit", act=act, actor=actor[:_LONGEST], **bounded)
    if file is None:
        return
    where = {"service": structlog.contextvars.get_contextvars().get("service", ""), "host": _HOST, "pid": os.getpid()}
    record = {"time": datetime.now(UTC).isoformat(), "act": act, "actor": actor[:_LONGEST], **where, **bounded}
    line = (json.dumps(record) + "\n").encode()
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        try:
            if os.write(handle, line) != len(line):
                raise OSError(28, "the disk is full")
        finally:
            os.close(handle)
    except OSError as error:
        get_logger().error("audit_file_failed", file=str(file), detail=str(error))


def name_grpc_caller(context: Any, has_token: bool) -> dict[str, str]:
    """Name the caller of a gRPC method, for `record_act`: `actor` and `peer`.

    Args:
        has_token: whether the service checks tokens; else what a caller sends as one says nothing.
    """
    names = context.auth_context().get("x509_common_name", ())
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    certificate = names[0].decode(errors="replace") if names else ""
    return name_caller(context.peer(), metadata.get(HEADER, "") if has_token else "", certificate)


def name_http_caller(request: Any, has_token: bool) -> dict[str, str]:
    """Name the caller of an HTTP request (Starlette's), which `RequestGuard` has let pass; as `name_grpc_caller`."""
    certificate = str(request.scope.get("state", {}).get(CLIENT_CERTIFICATE) or "")
    peer = request.client.host if request.client else "unknown"
    return name_caller(peer, request.headers.get(HEADER, "") if has_token else "", certificate)


def name_caller(peer: str, authorization: str = "", certificate: str = "") -> dict[str, str]:
    """Name a caller, for `record_act`: `actor` is the best that is known, `peer` the address.

    Args:
        authorization: value of a header that was checked.
        certificate: common name of a certificate that was checked.
    """
    token = authorization.partition(" ")[2].strip()
    if certificate:
        actor = f"certificate {certificate}"
    elif token:
        actor = f"token {hashlib.sha256(token.encode()).hexdigest()[:12]}"
    else:
        actor = peer
    return {"actor": actor, "peer": peer}
