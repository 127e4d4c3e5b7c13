"""The profile `hardened`: a service starts with everything, and names everything that it lacks."""

from __future__ import annotations

import re

import pytest

from forage_runtime.errors import SettingsError
from forage_runtime.security.profile import check_profile
from forage_runtime.settings import load_settings

EVERYTHING = {
    "tls.ca": "ca.pem",
    "tls.cert": "a.pem",
    "tls.key": "a.key",
    "tls.require_client_cert": "true",
    "retriever.auth_token_file": "token",
    "reward.auth_token_file": "token",
    "rollout.auth_token_file": "token",
    "console.auth_token_file": "token",
    "redis.url": "rediss://redis:6379/0",
    "redis.username": "trainer",
    "security.signing_key_file": "sign.pem",
    "security.verify_key_file": "verify.pem",
    "security.require_signed": "true",
    "security.user_code": "require",
}
NEEDED = {
    "reward": {"tls.require_client_cert", "reward.auth_token_file", "security.user_code"},
    "retriever": {"tls.require_client_cert", "retriever.auth_token_file"},
    "console": {"tls.require_client_cert", "console.auth_token_file"},
    "rollout": {
        "tls.require_client_cert",
        "rollout.auth_token_file",
        "redis.url",
        "redis.username",
        "security.require_signed",
        "security.user_code",
    },
    "trainer": {
        "tls.require_client_cert",
        "redis.url",
        "redis.username",
        "security.signing_key_file",
        "security.require_signed",
    },
}


def _check(service: str, without: str = "", profile: str = "hardened") -> None:
    given = {name: value for name, value in EVERYTHING.items() if name != without}
    given.setdefault("redis.url", "redis://redis:6379/0")
    overrides = [f"{name}={value}" for name, value in given.items()]
    check_profile(load_settings(None, [f"security.profile={profile}", *overrides], {}), service)


@pytest.mark.parametrize("service", NEEDED)
def test_a_service_that_has_everything_starts(service: str) -> None:
    _check(service)


@pytest.mark.parametrize("service", NEEDED)
@pytest.mark.parametrize(
    "without", sorted(set(EVERYTHING) - {"tls.ca", "tls.cert", "tls.key", "security.verify_key_file"})
)
def test_a_service_refuses_to_start_without_what_it_needs_and_only_that(service: str, without: str) -> None:
    if without in NEEDED[service]:
        with pytest.raises(SettingsError, match=re.escape(without)):
            _check(service, without)
    else:
        _check(service, without)


@pytest.mark.parametrize("service", NEEDED)
def test_all_that_is_missing_is_named_at_once(service: str) -> None:
    with pytest.raises(SettingsError, match=f"the {service} lacks") as error:
        check_profile(load_settings(None, ["security.profile=hardened", "redis.url=redis://redis:6379/0"], {}), service)
    for name in NEEDED[service] - {"tls.require_client_cert"}:
        assert name in str(error.value)
    assert "tls.cert" in str(error.value)


@pytest.mark.parametrize("service", NEEDED)
def test_the_default_profile_asks_for_nothing(service: str) -> None:
    check_profile(load_settings(None, [], {}), service)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:6379/0", "redis://localhost:6379/0", "unix:///run/redis.sock"])
def test_redis_on_the_same_machine_needs_no_tls(url: str) -> None:
    overrides = [f"{name}={value}" for name, value in (EVERYTHING | {"redis.url": url}).items()]
    check_profile(load_settings(None, ["security.profile=hardened", *overrides], {}), "trainer")


def test_the_direct_transport_speaks_no_tls() -> None:
    overrides = [f"{name}={value}" for name, value in EVERYTHING.items()]
    hardened = ["security.profile=hardened", "rollout.weights.transport=direct"]
    settings = load_settings(None, [*hardened, *overrides], {})
    with pytest.raises(SettingsError, match=re.escape("rollout.weights.transport=filesystem")):
        check_profile(settings, "trainer")


@pytest.mark.parametrize(
    ("setting", "lacking"),
    [
        ("redis.username=default", "a user of Redis"),
        ("redis.url=redis://default:p@127.0.0.1/0", "a user of Redis"),
        ("redis.url=redis+sentinel://127.0.0.1:26379,elsewhere:26379/primary", "TLS to Redis"),
        ("redis.url=redis+cluster://127.0.0.1:7000,elsewhere:7000", "TLS to Redis"),
        ("redis.url=rediss://redis:6379/0?ssl_cert_reqs=none", "certificate of Redis (take ssl_cert_reqs out"),
        ("redis.url=rediss://redis:6379/0?ssl_check_hostname=False", "certificate of Redis (take ssl_check_hostname"),
    ],
)
def test_what_looks_like_protection_and_is_none_is_missing(setting: str, lacking: str) -> None:
    given = {**EVERYTHING, "security.profile": "hardened"}
    given |= [setting.split("=", 1)]
    settings = load_settings(None, [f"{name}={value}" for name, value in given.items()], {})
    with pytest.raises(SettingsError, match=re.escape(lacking)):
        check_profile(settings, "trainer")
