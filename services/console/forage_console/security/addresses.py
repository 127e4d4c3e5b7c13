"""Which addresses are this machine's."""

from __future__ import annotations

import ipaddress

from forage_runtime.addresses import split_address


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address, "host:port"."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
