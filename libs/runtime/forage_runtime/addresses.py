"""Addresses ("host:port") that services listen on; one of IPv6 has brackets: "[::1]:18610"."""

from __future__ import annotations

import errno
import os
import resource
import socket
import time
from contextlib import suppress
from typing import Any, NoReturn

import structlog

from forage_runtime.errors import UserError

NO_PROXY = (("grpc.enable_http_proxy", 0),)
"""Options of gRPC channels: not through a proxy of the environment, which gRPC would use for loopback, too."""
EVERY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that stand for all addresses of a machine, to listen on → that of loopback."""
_BACKLOG = 1024
_LOG_PERIOD_S = 1.0
_GRACE_S = 2.0
"""How long connections wait in the queue for a descriptor: servers end quiet ones of their own meanwhile."""


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" into host, without brackets, and port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reach_address(address: str) -> str:
    """The address at which this machine reaches what listens on one: loopback instead of all addresses."""
    host, port = split_address(address)
    return join_address(EVERY_HOST.get(host, host), port)


def port_in_use_error(address: str, error: OSError) -> UserError:
    """Return the error for an address on which a service cannot listen."""
    reason = error.strerror or str(error)
    return UserError(f"cannot listen on {address} ({reason}): stop what uses it, or give this service another address")


def bound_by_descriptors(most: int, share: int) -> int:
    """At most `most`, and at most one in `share` of the files that this process may open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(most, files // share) if files > 0 else most


class Listener(socket.socket):
    """A socket that listens. Without a descriptor for a while it ends the connection that waits longest, and says so.

    An event loop would write a traceback a thousand times a second instead, and a server of threads would spin.
    """

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._logged_at, self._ended = -_LOG_PERIOD_S, 0
        self._short_since: float | None = None

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            BlockingIOError: there is none, or no descriptor for it: it waits, or was ended.
        """
        try:
            accepted = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        else:
            self._short_since = None
            return accepted
        self._short_since = self._short_since or time.monotonic()
        if time.monotonic() - self._short_since < _GRACE_S:
            time.sleep(0.001)  # wait: the next attempt comes at once, and others have the processor meanwhile
            raise BlockingIOError(errno.EAGAIN, "no descriptor is left for a connection yet")
        self._end_one()

    def detach(self) -> int:
        self._drop_spare()
        return super().detach()

    def close(self) -> None:
        self._drop_spare()
        super().close()

    def _end_one(self) -> NoReturn:
        self._drop_spare()
        with suppress(OSError):
            super().accept()[0].close()
        with suppress(OSError):  # another thread was faster: the next one fails, too, and is not ended
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._ended += 1
        if (now := time.monotonic()) - self._logged_at >= _LOG_PERIOD_S:
            structlog.get_logger().warning("descriptors_exhausted", connections_ended=self._ended)
            self._logged_at, self._ended = now, 0
        raise BlockingIOError(errno.EAGAIN, "no descriptor was left for a connection")

    def _drop_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


def bind_socket(address: str, reuse: int = socket.SO_REUSEADDR) -> Listener:
    """Open a socket that is bound to an address; one of [::] takes IPv4, too.

    Args:
        reuse: SO_REUSEADDR, or SO_REUSEPORT where several processes are to share the port.

    Raises:
        UserError: the port is in use, or the host is none of this machine's.
    """
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, target = min(found, key=lambda one: one[0] != socket.AF_INET)  # of localhost, say
        bound = Listener(family)
    except OSError as error:
        raise port_in_use_error(address, error) from None
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setsockopt(socket.SOL_SOCKET, reuse, 1)
        bound.bind(target)
    except OSError as error:
        bound.close()
        raise port_in_use_error(address, error) from None
    return bound


def listen(address: str) -> Listener:
    """Open a socket that listens on an address; raises as `bind_socket`."""
    listener = bind_socket(address)
    try:
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
