"""What the profile `hardened` asks of a service before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qsl, unquote, urlsplit

from forage_runtime.errors import SettingsError
from forage_runtime.settings import Settings

_WITH_TOKEN = ("retriever", "reward", "rollout", "console")
_WITH_REDIS = ("rollout", "trainer")
_WITH_USER_CODE = ("reward", "rollout")
_ANYBODY = "default"
"""The user of Redis that may do everything, of whom Redis asks for no name."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_profile(settings: Settings, service: str) -> None:
    """Check that a service has what `security.profile` asks for.

    Raises:
        SettingsError: something is missing; the message lists all of it, each with its remedy.
    """
    if settings.security.profile == "hardened" and (missing := list(list_missing(settings, service))):
        raise SettingsError(f"security.profile is hardened, and the {service} lacks: {'; '.join(missing)}")


def list_missing(settings: Settings, service: str) -> Iterator[str]:
    """What a service lacks of the profile `hardened`, each with its remedy."""
    tls, security = settings.tls, settings.security
    if tls.cert is None:
        yield "TLS (set tls.cert, tls.key and tls.ca)"
    elif not tls.require_client_cert:
        yield "mutual TLS (set tls.require_client_cert=true)"
    if service in _WITH_TOKEN and getattr(settings, service).auth_token_file is None:
        yield f"a token of its callers (set {service}.auth_token_file)"
    if service in _WITH_REDIS:
        yield from _list_missing_of_redis(settings)
        if settings.rollout.weights.transport == "direct":
            yield "a transport of policies that speaks TLS (set rollout.weights.transport=filesystem)"
    if service == "trainer" and security.signing_key_file is None:
        yield "a key that signs policies (set security.signing_key_file)"
    if service in ("trainer", "rollout") and not security.require_signed:
        yield "signatures (set security.require_signed=true and security.verify_key_file)"
    if service in _WITH_USER_CODE and security.user_code != "require":
        yield "a sandbox of rewards and environments of your own (set security.user_code=require)"


def _list_missing_of_redis(settings: Settings) -> Iterator[str]:
    url = urlsplit(settings.redis.url)
    if (unquote(url.username or "") or settings.redis.username or _ANYBODY) == _ANYBODY:
        yield "a user of Redis with few rights (set redis.username and password_file; see `forage redis acl`)"
    # Sentinels and nodes of a cluster name other machines, wherever they are themselves.
    is_here = url.scheme in ("redis", "rediss") and url.hostname in _LOOPBACK
    if not (url.scheme.startswith("rediss") or url.scheme == "unix" or is_here):
        yield "TLS to Redis (write rediss:// in redis.url; on this machine alone it needs none)"
    weak = {name for name, value in parse_qsl(url.query) if _is_weak(name, value)}
    if weak:
        yield f"the check of the certificate of Redis (take {', '.join(sorted(weak))} out of redis.url)"


def _is_weak(name: str, value: str) -> bool:
    """Whether a parameter of an address turns a check of certificates off."""
    return (name == "ssl_cert_reqs" and value != "required") or (
        name == "ssl_check_hostname" and value.lower() not in ("true", "1", "yes", "y")
    )
