"""Addresses, of IPv4, IPv6 and by name, in every setting that has one."""

from __future__ import annotations

import pytest

from forage_runtime.addresses import join_address, reach_address, split_address
from forage_runtime.errors import SettingsError
from forage_runtime.settings import load_settings

LISTENING = [
    f"{section}.{name}_address"
    for section, names in {
        "retriever": ("http", "grpc"),
        "reward": ("grpc", "health"),
        "rollout": ("grpc", "http", "health"),
        "trainer": ("health",),
        "console": ("http",),
    }.items()
    for name in names
]


@pytest.mark.parametrize("setting", [*LISTENING, "trainer.publish.direct_address", "trainer.ray.address"])
def test_a_setting_takes_addresses_of_ipv6_in_brackets(setting: str) -> None:
    for address in ("[::1]:24640", "[::]:24640", "[2001:db8::7]:1", "127.0.0.1:1", "retriever.rl.svc:65535"):
        node = load_settings(overrides=[f"{setting}={address}"], environ={})
        for part in setting.split("."):
            node = getattr(node, part)
        assert node == address
    ipv6 = ("::1:24640", "[::1]", "[::g]:1", "[127.0.0.1]:1", "[::1:1", "[::1]]:1", "[::1%eth0]:1")
    for wrong in (*ipv6, "retriever", "a b:1", "x:", "a..b:1", f"{64 * 'x'}:1"):
        with pytest.raises(SettingsError, match=r"expected host:port, an address of IPv6 in brackets"):
            load_settings(overrides=[f"{setting}='{wrong}'"], environ={})
    with pytest.raises(SettingsError, match="there is no port 65536: give one up to 65535"):
        load_settings(overrides=[f"{setting}=[::1]:65536"], environ={})


def test_lists_of_addresses_and_redis_take_them_too() -> None:
    shards = load_settings(overrides=["retriever.shards=['[::1]:1', 'b:2']"], environ={}).retriever.shards
    assert shards == ("[::1]:1", "b:2")
    for url in ("redis://[::1]:6379/0", "redis+sentinel://[::1]:26379,b:1/main", "redis+cluster://[fd00::7]:7000"):
        assert load_settings(overrides=[f"redis.url={url}"], environ={}).redis.url == url


@pytest.mark.parametrize(
    ("address", "host", "port", "reached"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80, "127.0.0.1:80"),
        ("0.0.0.0:80", "0.0.0.0", 80, "127.0.0.1:80"),
        ("[::1]:80", "::1", 80, "[::1]:80"),
        ("[::]:80", "::", 80, "[::1]:80"),
        ("retriever:80", "retriever", 80, "retriever:80"),
    ],
)
def test_an_address_has_a_host_without_brackets(address: str, host: str, port: int, reached: str) -> None:
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address
    assert reach_address(address) == reached
