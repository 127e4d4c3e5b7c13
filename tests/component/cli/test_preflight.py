"""Ports in use."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from forage_cli.local import preflight
from forage_common.errors import UserError


def test_a_port_in_use_is_named_with_its_setting(free_address: Callable[[], str]) -> None:
    address = free_address()
    sentence = rf"redis\.url: cannot listen on {address} .*in use.*--base-port"
    with (
        socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))),
        pytest.raises(UserError, match=sentence),
    ):
        preflight.check_port("redis.url", address)
    preflight.check_port("redis.url", address)
