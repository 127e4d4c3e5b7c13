"""Addresses ("host:port") that services listen on."""

from __future__ import annotations

import socket
from typing import Any

from forage_common.errors import UserError

_BACKLOG = 1024


def split_address(address: str) -> tuple[str, int]:
    """ "host:port" → (host, port)."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def port_in_use_error(address: str, error: OSError) -> UserError:
    """The error for an address that cannot be listened on."""
    reason = error.strerror or str(error)
    return UserError(f"cannot listen on {address} ({reason}): stop what uses it, or give this service another address")


def listen(address: str) -> socket.socket:
    """A socket that listens.

    Raises:
        UserError: the port is in use.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(split_address(address))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise port_in_use_error(address, error) from None
    return listening


def bind(server: Any, address: str) -> None:
    """Let a gRPC server, not started yet, listen.

    Raises:
        UserError: the port is in use.
    """
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise port_in_use_error(address, OSError(str(error))) from None
    if bound == 0:
        raise port_in_use_error(address, OSError("address in use"))
