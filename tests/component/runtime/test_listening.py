"""Sockets of services: where they can be reached."""

from __future__ import annotations

import socket

import pytest

from forage_runtime.addresses import bind_socket


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(
    ("address", "reached", "refused"),
    [
        ("[::]:0", ("127.0.0.1", "::1"), ()),
        ("[::1]:0", ("::1",), ("127.0.0.1",)),
        ("127.0.0.1:0", ("127.0.0.1",), ("::1",)),
    ],
)
def test_a_socket_is_reached_at_its_address_and_at_no_other(
    address: str, reached: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    with bind_socket(address) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        for host in reached:
            socket.create_connection((host, port), timeout=60).close()
        for host in refused:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, port), timeout=60)
