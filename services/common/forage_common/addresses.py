"""Addresses ("host:port") that services listen on."""

from __future__ import annotations

import socket
from typing import Any

from forage_common.errors import UserError

_BACKLOG = 1024


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" into host and port."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def port_in_use_error(address: str, error: OSError) -> UserError:
    """Return the error for an address on which a service cannot listen."""
    reason = error.strerror or str(error)
    return UserError(f"cannot listen on {address} ({reason}): stop what uses it, or give this service another address")


def listen(address: str) -> socket.socket:
    """Open a socket that listens on an address.

    Raises:
        UserError: the port is in use.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(split_address(address))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise port_in_use_error(address, error) from None
    return listener


def bind(server: Any, address: str, credentials: Any = None) -> None:
    """Let a gRPC server that is not started yet listen on an address.

    Args:
        credentials: its TLS; None: plain text.

    Raises:
        UserError: the port is in use.
    """
    try:
        bound = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise port_in_use_error(address, OSError(str(error))) from None
    if bound == 0:
        raise port_in_use_error(address, OSError("address in use"))
