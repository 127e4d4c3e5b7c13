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

from forage_queue.streams.functions import build_facts, build_library, name_function
from forage_runtime.addresses import join_address, split_address
from forage_runtime.errors import ForageError, SettingsError, UnavailableError
from forage_runtime.security.token_file import TokenFile, read_token
from forage_runtime.settings import RedisSettings

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
_READS |= {"FCALL_RO"}
_LOGIN_OPTIONS = ("username", "password", "credential_provider")
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
    address, topology, options = _describe_server(settings, patience_s)
    if topology:
        options["find"] = _follow(settings, topology, options, key)
        options["connection_class"] = _TlsFollower if address.startswith("rediss") else _Follower
    client = cast(_ConfirmedRedis, _ConfirmedRedis.from_url(address, **options))
    client.replicas, client.key = settings.wait_replicas, key
    return client


def connect_all(settings: RedisSettings, patience_s: float) -> list[redis.Redis]:
    """Open connections to every server that takes writes: each primary of a cluster, else the one server.

    Raises:
        SettingsError: as `connect`.
        redis.RedisError: the nodes of the cluster cannot be listed.
    """
    address, topology, options = _describe_server(settings, patience_s)
    if topology != "cluster":
        return [connect(settings, patience_s)]
    with _open_cluster(_list_nodes(settings), _select_cluster_options(settings, options)) as cluster:
        found = [(node.host, node.port) for node in cluster.get_primaries()]
    made = "redis" if address.startswith("redis:") else "rediss"
    return [redis.Redis.from_url(f"{made}://{join_address(host, port)}", **options) for host, port in found]


def load_functions(client: redis.Redis, where: str) -> bool:
    """Load the functions of the streams into a server; False if it has them.

    Raises:
        UnavailableError: this user may not load any; names who can.
        redis.RedisError: the server refuses them.
    """
    library = build_library()
    try:
        client.function_load(library.code)
    except _REFUSALS as error:
        raise UnavailableError(
            f"{where} has no functions {library.name}, which this version of Forage calls, and this user may load none"
            " (its rights are those of `forage redis acl`): let its administrator run `forage redis load`"
        ) from error
    except redis.ResponseError as error:
        if "already exists" not in str(error):
            raise
        return False
    return True


def save_facts(client: redis.Redis) -> dict[str, str]:
    """Leave in a server what its users may not ask (CONFIG GET), as functions that return it; see `functions.FACTS`.

    Raises:
        redis.RedisError: this user may not.
    """
    facts = {name: str(client.config_get(name)[name]) for name in ("appendfsync",)}
    client.function_load(build_facts(facts).code, replace=True)
    return facts


def _describe_server(settings: RedisSettings, patience_s: float) -> tuple[str, str, dict[str, Any]]:
    """The URL of one server without its topology and login, the topology, and options of each connection."""
    url = urlsplit(settings.url)
    scheme, _, topology = url.scheme.partition("+")
    files = {"ssl_ca_certs": settings.ca_file, "ssl_certfile": settings.cert_file, "ssl_keyfile": settings.key_file}
    tls = {name: str(file) for name, file in files.items() if file} if scheme == "rediss" else {}
    for file in tls.values():
        if not os.access(file, os.R_OK):
            raise SettingsError(f"{file} of redis.ca_file, cert_file or key_file cannot be read: give PEM files")
    login, _, hosts = url.netloc.rpartition("@")
    path, credentials = url.path, _read_credentials(settings, login)
    if topology:  # the connections find the host, and only the database is of the path
        hosts, path = hosts.partition(",")[0], f"/{url.path.strip('/').partition('/')[2]}"
    options: dict[str, Any] = {
        **credentials,
        "socket_timeout": settings.timeout_s,
        "socket_connect_timeout": settings.timeout_s,
        "retry": Retry(ExponentialWithJitterBackoff(cap=2.0, base=0.05), max(1, int(patience_s / 2))),
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
        **tls,
    }
    query = f"?{url.query}" if url.query else ""
    return f"{scheme}://{hosts}{path}{query}", topology, options


def _read_credentials(settings: RedisSettings, login: str) -> dict[str, Any]:
    """User and password: those of the URL; without a password there, those of the settings' file at each connect."""
    of_url: dict[str, Any] = {**parse_url(f"redis://{login}@host")} if login else {}
    user = of_url.get("username") or settings.username
    if settings.password_file is not None and "password" not in of_url:
        return {"credential_provider": _PasswordFile(user, settings.password_file)}
    return {"username": user or None, "password": of_url.get("password")}


class _PasswordFile(redis.CredentialProvider):
    """The user and the first line of a file, which is read again after it has changed: see `forage redis acl`."""

    def __init__(self, user: str, file: Path) -> None:
        self._user = (user,) if user else ()
        self._passwords = TokenFile(file, "redis.password_file")

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        return (*self._user, self._passwords.token)


def _follow(settings: RedisSettings, topology: str, options: dict[str, Any], key: str) -> _Find:
    """Return how to find the primary."""
    nodes = _list_nodes(settings)
    if topology == "cluster":
        return functools.partial(_find_owner, nodes, key, _select_cluster_options(settings, options))
    quick, file = _select_tls_options(settings, options), settings.sentinel_password_file
    quick["password"] = read_token(file, "redis.sentinel_password_file") if file else None
    master = urlsplit(settings.url).path.strip("/").partition("/")[0]
    return functools.partial(redis.Sentinel(nodes, sentinel_kwargs=quick).discover_master, master)


def _list_nodes(settings: RedisSettings) -> list[tuple[str, int]]:
    return [split_address(host) for host in urlsplit(settings.url).netloc.rpartition("@")[2].split(",")]


def _select_tls_options(settings: RedisSettings, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a short question to a sentinel or a node."""
    tls = {name: value for name, value in options.items() if name.startswith("ssl")}
    quick = {"socket_timeout": min(2.0, settings.timeout_s), "retry": Retry(NoBackoff(), 0)}
    return {**tls, **quick, "ssl": settings.url.startswith("rediss")}


def _select_cluster_options(settings: RedisSettings, options: dict[str, Any]) -> dict[str, Any]:
    login: dict[str, Any] = {name: value for name, value in options.items() if name in _LOGIN_OPTIONS}
    return {**login, **_select_tls_options(settings, options)}


def _find_owner(nodes: list[tuple[str, int]], key: str, options: dict[str, Any]) -> tuple[str, int]:
    with _open_cluster(nodes, options) as cluster:
        node = cluster.get_node_from_key(key)
        return node.host, node.port


@contextmanager
def _open_cluster(nodes: list[tuple[str, int]], options: dict[str, Any]) -> Iterator[redis.RedisCluster]:
    try:
        starts = [ClusterNode(*node) for node in nodes]
        with redis.RedisCluster(startup_nodes=starts, require_full_coverage=False, **options) as cluster:
            yield cluster
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
            conn.send_command("FCALL", name_function("touch"), 1, f"{self.key}writes")
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
