"""The services of a run: where they are, and whether they are still this run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from upath import UPath

from forage_console.security.addresses import is_loopback
from forage_queue.streams.client import StreamClient
from forage_queue.streams.users import Role, find_password_file, name_user
from forage_runtime.clients.calls import RefusedError
from forage_runtime.clients.health import ANSWER_S
from forage_runtime.errors import ForageError
from forage_runtime.settings import RedisSettings, Settings, TlsSettings, check_settings

_MOST_BYTES = 1024 * 1024
_CONNECT_S = ANSWER_S / 2
"""Longest time of an attempt at Redis; a call has two, and ends at once if it is refused."""
_USED: dict[str, tuple[str, ...]] = {
    "run": ("id", "dir"),
    "redis": tuple(RedisSettings.model_fields),
    "reward": ("grpc_address", "health_address", "auth_token_file", "routes"),
    "tls": tuple(TlsSettings.model_fields),
    "retriever": ("http_address", "grpc_address", "auth_token_file"),
    "rollout": (
        *("grpc_address", "health_address", "http_address", "auth_token_file"),
        *("trajectory_timeout_s", "score_timeout_s"),
    ),
    "trainer": ("health_address",),
    "console": ("http_address",),
}
"""What the console needs of a run's settings; the rest may be of another version of Forage."""
_ADDRESSES = (
    ("reward", "grpc_address"),
    ("reward", "health_address"),
    ("retriever", "http_address"),
    ("rollout", "grpc_address"),
    ("rollout", "health_address"),
    ("trainer", "health_address"),
)


def load_run_settings(folder: UPath, own: Settings) -> Settings:
    """Load the settings of a run, with the addresses at which its services are asked.

    A folder of runs may come from anywhere. So only this machine is asked, or what the console's own settings name; and
    files of secrets are those of the console's own settings, where it has any.

    Raises:
        RefusedError: they cannot be read, or name other machines.
    """
    if own.run.id == folder.name:
        return own.model_copy(update={"redis": own.redis.model_copy(update={"timeout_s": _CONNECT_S})})
    try:
        with (folder / "settings.yaml").open("rb") as file:
            tree = yaml.safe_load(file.read(_MOST_BYTES))
        settings = check_settings(_select(tree))
    except (OSError, yaml.YAMLError, ValueError, ForageError) as error:
        # An error of YAML quotes the line, which may hold a password.
        reason = "it is not valid YAML" if isinstance(error, yaml.YAMLError) else " ".join(str(error).split())[:300]
        raise RefusedError(f"the settings of {folder.name} cannot be read: {reason}") from None
    for section, name in _ADDRESSES:
        address, known = (getattr(getattr(one, section), name) for one in (settings, own))
        if address != known and not is_loopback(address):
            raise _make_error(folder, f"{section}.{name}", address)
    if settings.redis.url != own.redis.url and not is_local_url(settings.redis.url):
        raise _make_error(folder, "redis.url", urlsplit(settings.redis.url).hostname or "another machine")
    redis: dict[str, Any] = {n: value for n, value in own.redis if n.endswith("_file") and value is not None}
    if redis.get("password_file") and settings.redis.url == own.redis.url:
        redis["username"] = own.redis.username
    elif isinstance(folder, Path) and (file := find_password_file(folder.absolute(), Role.CONSOLE)).is_file():
        redis |= {"username": name_user(Role.CONSOLE), "password_file": file}  # of the server that is the run's alone
    services = {
        name: section.model_copy(update={"auth_token_file": mine.auth_token_file or section.auth_token_file})
        for name in ("retriever", "reward", "rollout")
        if (section := getattr(settings, name)) and (mine := getattr(own, name))
    }
    return settings.model_copy(
        update={
            "redis": settings.redis.model_copy(update=redis | {"timeout_s": _CONNECT_S}),
            "tls": own.tls if own.tls.is_on and settings.tls.is_on else settings.tls,
            **services,
        }
    )


def _select(tree: object) -> dict[str, dict[str, Any]]:
    sections = tree if isinstance(tree, dict) else {}
    found = {name: section for name in _USED if isinstance(section := sections.get(name), dict)}
    return {name: {key: section[key] for key in _USED[name] if key in section} for name, section in found.items()}


def is_local_url(url: str) -> bool:
    """Whether a server of Redis is on this machine."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return True
    hosts = parts.netloc.rpartition("@")[2].split(",")
    return all(is_loopback(host if ":" in host else f"{host}:0") for host in hosts)


def _make_error(folder: UPath, name: str, value: str) -> RefusedError:
    return RefusedError(
        f"the services of {folder.name} are elsewhere ({name} is {value}): start the console with the settings of the "
        f"run, forage console --config {folder}/settings.yaml"
    )


def open_streams(settings: Settings) -> StreamClient:
    """Open the streams of a run for a quick look."""
    return StreamClient(settings.redis, settings.run.id, patience_s=1)


def describe_end(folder: UPath) -> str:
    """Say that the services of a run have ended, with the remedy."""
    return (
        f"the services of {folder.name} have ended, or serve another run: 'forage demo --resume' continues the latest "
        "run, and 'forage up' serves a policy"
    )
