"""Whether a server keeps what it has acknowledged: through a crash, a failover and a full memory."""

from __future__ import annotations

from forage_queue.streams.client import StreamClient
from forage_queue.streams.connection import name_server
from forage_runtime.errors import SettingsError
from forage_runtime.settings import RedisSettings
from forage_runtime.telemetry.logs import get_logger


def check_durability(client: StreamClient, settings: RedisSettings) -> list[str]:
    """Check the server; one clause per problem, with its remedy.

    Raises:
        UnavailableError: it does not answer.
        SettingsError: it does not tell (INFO).
    """
    persistence, memory = client.read_server("persistence"), client.read_server("memory")
    replication = client.read_server("replication")
    problems = []
    if not persistence["aof_enabled"]:
        problems.append("it keeps no append-only file and forgets the run when it ends: set appendonly yes")
    elif (sync := client.read_option("appendfsync")) is None:
        problems.append(
            "it does not tell whether each write reaches the disk: run `forage redis load`, or allow CONFIG GET"
        )
    elif sync != "always":
        problems.append(f"a crash loses the last writes with appendfsync {sync}: set appendfsync always")
    policy = memory["maxmemory_policy"]
    if policy.startswith("allkeys"):  # keys of a run have no expiry, so volatile policies evict none
        problems.append(f"it deletes keys when it is full (maxmemory-policy {policy}): set maxmemory-policy noeviction")
    if replication["connected_slaves"] and not settings.wait_replicas:
        problems.append("a failover to a replica loses the writes that it has not received: set redis.wait_replicas=1")
    return problems


def require_durability(client: StreamClient, settings: RedisSettings) -> None:
    """Refuse a server that can lose what it has acknowledged; only warn if `redis.require_durable` is false.

    Raises:
        SettingsError: it can; names each problem and its remedy.
        UnavailableError: it does not answer.
    """
    problems = check_durability(client, settings)
    if problems and settings.require_durable:
        raise SettingsError(
            f"{name_server(settings)} can lose what it has acknowledged: {'; '.join(problems)}; or accept the loss of"
            " groups with redis.require_durable=false"
        )
    for problem in problems:
        get_logger().warning("redis_not_durable", detail=problem)
