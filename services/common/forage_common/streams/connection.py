"""Connections to Redis, and what its errors mean: those that pass by themselves are distinguished from all others."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.cluster import ClusterNode
from redis.connection import parse_url
from redis.retry import Retry

from forage_common.addresses import split_address
from forage_common.errors import ForageError, SettingsError, UnavailableError
from forage_common.security.tokens import read_token
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
    "ASK": "is moving keys between nodes of its cluster: wait",
    "MASTERDOWN": "is a replica that has lost its primary: start the primary, or wait for the failover to end",
    "NOREPLICAS": "has fewer replicas than a write must reach: start the missing ones",
    "BUSY": "is busy with a script that does not end: wait, or stop it with SCRIPT KILL",
}
_REFUSALS = (redis.AuthenticationError, redis.exceptions.AuthorizationError, redis.exceptions.NoPermissionError)
# Servers before version 7 wrap the errors of a script's commands in a sentence: "… @user_script: 2: -OOM command …".
_CODE = re.compile(rf"(?:^|[ -]-?)({'|'.join(_REASONS)}) ")

_READS = {"PING", "INFO", "CONFIG GET", "MEMORY USAGE", "HGET", "HGETALL", "XLEN", "XREAD", "XREADGROUP", "XAUTOCLAIM"}
_TOUCH = "#!lua flags=allow-oom\nreturn redis.call('INCR', KEYS[1])"
_Find = Callable[[], tuple[str, int]]
_lost = threading.local()


def count_lost_replies() -> int:
    """Count the commands of this thread without a reply: each may have been carried out."""
    return getattr(_lost, "replies", 0)


@contextmanager
def notice_lost_reply() -> Iterator[None]:
    """Count a command that the body sends, if its reply does not come."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError):
        _lost.replies = count_lost_replies() + 1
        raise


def connect(settings: RedisSettings, patience_s: float, key: str = "") -> redis.Redis:
    """Open connections to the server of the settings, whose commands are retried for about `patience_s`.

    Args:
        key: any key of the run. In a cluster all keys of a run are on one node, which the connections follow.

    Raises:
        SettingsError: a file of the settings cannot be read, or holds no password.
    """
    url = urlsplit(settings.url)
    scheme, _, topology = url.scheme.partition("+")
    files = {"ssl_ca_certs": settings.ca_file, "ssl_certfile": settings.cert_file, "ssl_keyfile": settings.key_file}
    tls = {name: str(file) for name, file in files.items() if file} if scheme == "rediss" else {}
    for file in tls.values():
        if not os.access(file, os.R_OK):
            raise SettingsError(f"{file} of redis.ca_file, cert_file or key_file cannot be read: give PEM files")
    options: dict[str, Any] = {
        "password": _read_password(settings.password_file, "redis.password_file"),
        "socket_timeout": settings.timeout_s,
        "socket_connect_timeout": settings.timeout_s,
        "retry": Retry(ExponentialWithJitterBackoff(cap=2.0, base=0.05), max(1, int(patience_s / 2))),
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
        **tls,
    }
    address = settings.url
    if topology:
        address, options["find"] = _follow(settings, options["password"], key, {**tls, "ssl": scheme == "rediss"})
        options["connection_class"] = _TlsFollower if scheme == "rediss" else _Follower
    client = cast(_ConfirmedRedis, _ConfirmedRedis.from_url(address, **options))
    client.replicas, client.key = settings.wait_replicas, key
    return client


def _follow(settings: RedisSettings, password: str | None, key: str, tls: dict[str, Any]) -> tuple[str, _Find]:
    """Return the URL of one server, for its credentials and database, and how to find the primary."""
    url = urlsplit(settings.url)
    login, at, hosts = url.netloc.rpartition("@")
    name, _, database = url.path.strip("/").partition("/")
    first = f"{url.scheme.partition('+')[0]}://{login}{at}{hosts.partition(',')[0]}/{database}"
    nodes = [split_address(host) for host in hosts.split(",")]
    options = {"socket_timeout": min(2.0, settings.timeout_s), "retry": Retry(NoBackoff(), 0), **tls}
    if url.scheme.endswith("+sentinel"):
        options["password"] = _read_password(settings.sentinel_password_file, "redis.sentinel_password_file")
        return first, functools.partial(redis.Sentinel(nodes, sentinel_kwargs=options).discover_master, name)
    login_of_url = {name: value for name, value in parse_url(first).items() if name in ("username", "password")}
    return first, functools.partial(_find_owner, nodes, key, {"password": password, **login_of_url, **options})


def _find_owner(nodes: list[tuple[str, int]], key: str, options: dict[str, Any]) -> tuple[str, int]:
    try:
        starts = [ClusterNode(*node) for node in nodes]
        with redis.RedisCluster(startup_nodes=starts, require_full_coverage=False, **options) as cluster:
            node = cluster.get_node_from_key(key)
            return node.host, node.port
    except redis.exceptions.RedisClusterException as error:
        raise redis.ConnectionError(str(error)) from error


class _ConfirmedRedis(redis.Redis):
    """A client whose writes wait until `replicas` have them. Pipelines do not wait."""

    replicas, key = 0, ""
    _failures, _settled = 1, 0  # a process before this one may have left writes that no replica has

    def _send_command_parse_response(self, conn: Any, command_name: str, *args: Any, **options: Any) -> Any:
        with notice_lost_reply():
            reply = super()._send_command_parse_response(conn, command_name, *args, **options)  # type: ignore[no-untyped-call]
        if not self.replicas or command_name in _READS:
            return reply
        failures = self._failures
        if failures != self._settled:
            # WAIT is for the last write of this connection, and a command that is repeated may write nothing.
            conn.send_command("EVAL", _TOUCH, 1, f"{self.key}writes")
            conn.read_response()
        conn.send_command("WAIT", self.replicas, int(conn.socket_timeout * 500))
        if (confirmed := conn.read_response()) < self.replicas:
            self._failures += 1
            raise redis.ResponseError(f"NOREPLICAS {confirmed} of {self.replicas} confirmed")
        self._settled = failures
        return reply


class _Follower(redis.Connection):
    """A connection that finds out at each connect which server is the primary now."""

    def __init__(self, find: _Find, **options: Any) -> None:
        self._find = find
        super().__init__(**options)  # type: ignore[no-untyped-call]

    def _connect(self) -> Any:
        self.host, self.port = self._find()
        return super()._connect()  # type: ignore[no-untyped-call]

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except (redis.exceptions.ReadOnlyError, redis.exceptions.MovedError) as error:
            self.disconnect()  # type: ignore[no-untyped-call]
            raise redis.ConnectionError(f"the primary has changed: {error}") from error


class _TlsFollower(_Follower, redis.SSLConnection):
    """The same with TLS."""


def _read_password(file: Path | None, setting: str) -> str | None:
    return read_token(file, setting) if file else None


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
