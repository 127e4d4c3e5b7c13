"""Connections to Redis, and what its errors mean: those that pass by themselves are told from all others."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from forage_common.clients.auth import read_token
from forage_common.errors import ForageError, SettingsError, UnavailableError
from forage_common.settings import RedisSettings

_MEBI = 2**20
# The answers that mean "not now": what they say about the server, and what ends them.
_REASONS = {
    "OOM": "is full{limit}: raise its maxmemory, or wait until the trainer has consumed groups",
    "MISCONF": "cannot write its data to disk: free space on its volume, or mend the volume; its log says more",
    "READONLY": "is a replica, which takes no writes: give the address of the primary, or wait for the failover to end",
    "LOADING": "is still reading its data from disk: wait",
    "CLUSTERDOWN": "has lost a part of its cluster: start the missing nodes",
    "TRYAGAIN": "is moving keys between nodes of its cluster: wait",
    "MASTERDOWN": "is a replica that has lost its primary: start the primary, or wait for the failover to end",
    "NOREPLICAS": "has fewer replicas than min-replicas-to-write: start the missing ones",
    "BUSY": "is busy with a script that does not end: wait, or stop it with SCRIPT KILL",
}
_REFUSALS = (redis.AuthenticationError, redis.exceptions.AuthorizationError, redis.exceptions.NoPermissionError)
# Servers before version 7 wrap the errors of a script's commands in a sentence: "… @user_script: 2: -OOM command …".
_CODE = re.compile(rf"(?:^|[ -]-?)({'|'.join(_REASONS)}) ")


def connect(settings: RedisSettings, patience_s: float) -> redis.Redis:
    """Open connections to the server of the settings, whose commands are retried for about `patience_s`.

    Raises:
        SettingsError: the file with the password cannot be read, or is empty.
    """
    file = settings.password_file
    return redis.Redis.from_url(
        settings.url,
        password=read_token(file, "redis.password_file") if file else None,
        socket_timeout=settings.timeout_s,
        socket_connect_timeout=settings.timeout_s,
        retry=Retry(ExponentialWithJitterBackoff(cap=2.0, base=0.05), max(1, int(patience_s / 2))),
        retry_on_error=[redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
    )


def name_server(settings: RedisSettings) -> str:
    """Name the server for a sentence, without credentials: "Redis at 127.0.0.1:6379"."""
    url = urlsplit(settings.url)
    return f"Redis at {url.netloc.rpartition('@')[2] or url.path}"


def translate_error(error: Exception, where: str, read_limit: Callable[[], int] | None = None) -> ForageError | None:
    """Translate an error of the server into one that names cause and remedy; None if it is a defect of ours.

    An `UnavailableError` passes by itself or by the operator's care: wait. A `SettingsError` does not.

    Args:
        where: the server, see `name_server`.
        read_limit: reads the server's maxmemory in bytes, for the sentence of a full server.
    """
    match = _CODE.search(str(error)) if isinstance(error, redis.ResponseError) else None
    # redis-py cuts the code off the errors that it has classes for.
    code = match.group(1) if match else getattr(error, "status_code", None)
    if code in _REASONS:
        limit = f" (maxmemory {read_limit() // _MEBI}mb)" if code == "OOM" and read_limit else ""
        return UnavailableError(f"{where} {_REASONS[code].format(limit=limit)}")
    if isinstance(error, _REFUSALS):
        return SettingsError(f"{where} refuses this client ({error}): check user, password and rights in redis.*")
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        return UnavailableError(f"no answer from {where} ({error}): is it running?")
    return None
