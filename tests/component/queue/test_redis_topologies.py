"""Connections to servers with users, TLS, sentinels or a cluster: real server processes, and a real failover."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from pydantic import ValidationError
from redis.crc import key_slot
from redis_process import DURABLE, serve
from tls_proxy import make_certificates, serve_tls
from waiting import wait_until

from forage_proto.v1.trajectory_pb2 import Prompt
from forage_queue.streams.client import StreamClient
from forage_queue.streams.connection import connect, connect_all, load_functions
from forage_queue.streams.functions import build_library
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import RedisSettings

AT_ONCE = ("--repl-diskless-sync-delay", "0")
KEY = "forage:{run}:"


@pytest.fixture
def free_port(free_address: Callable[[], str]) -> Callable[[], str]:
    return lambda: free_address().rpartition(":")[2]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Processes that end with the test."""
    with contextlib.ExitStack() as processes:
        yield processes


def test_a_user_with_a_password_file_uses_the_runs_keys_only(
    tmp_path: Path, redis_binary: str, free_port: Callable[[], str]
) -> None:
    port = free_port()
    (tmp_path / "password").write_text("word\n")
    users = [
        "--user",
        "default",
        "off",
        "--user",
        "forage",
        "on",
        ">word",
        "~forage:*",
        "+@all",
        "-@dangerous",
        "+info",
    ]
    settings = RedisSettings(url=f"redis://forage@127.0.0.1:{port}/0", password_file=tmp_path / "password")
    with serve(redis_binary, tmp_path, port, *DURABLE, *users):
        client = StreamClient(settings, "run", patience_s=1)
        client.create_groups()
        assert client.issue(Prompt(group_uid="uid", batch=1))
        assert client.read_byte_limit() == 0
        with pytest.raises(SettingsError, match=r"refuses this client .*check user, password and rights"):
            client.measure_bytes("another application")


def test_tls_needs_the_authority_and_the_clients_certificate(tmp_path: Path, redis_server: RedisSettings) -> None:
    make_certificates(tmp_path)
    with serve_tls(tmp_path, ("127.0.0.1", int(redis_server.url.rpartition(":")[2].partition("/")[0]))) as address:
        files = {
            "ca_file": tmp_path / "ca.pem",
            "cert_file": tmp_path / "client.pem",
            "key_file": tmp_path / "client.key",
        }
        url = f"rediss://{address}/0"
        assert StreamClient(RedisSettings(url=url, **files), "run", patience_s=1).ping()
        untrusted = RedisSettings(url=url, **{**files, "ca_file": None})
        with pytest.raises(UnavailableError, match="certificate verify failed"):
            StreamClient(untrusted, "run", patience_s=1).ping()
        with pytest.raises(UnavailableError):
            StreamClient(RedisSettings(url=url, ca_file=files["ca_file"]), "run", patience_s=1).ping()
        missing = RedisSettings(url=url, **{**files, "ca_file": tmp_path / "none.pem"})
        with pytest.raises(SettingsError, match=r"none\.pem of redis\.ca_file"):
            StreamClient(missing, "run")


def test_a_client_follows_a_failover_of_sentinel(
    tmp_path: Path, redis_binary: str, free_port: Callable[[], str], stack: contextlib.ExitStack
) -> None:
    first, second, sentinel = free_port(), free_port(), free_port()
    primary = stack.enter_context(serve(redis_binary, tmp_path / "a", first, *DURABLE, *AT_ONCE))
    stack.enter_context(serve(redis_binary, tmp_path / "b", second, *DURABLE, "--replicaof", f"127.0.0.1 {first}"))
    replica = redis.Redis(port=int(second))
    wait_until(lambda: replica.info("replication")["master_link_status"] == "up")
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {sentinel}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {first} 1\n"
        "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 5000\n"
    )
    stack.enter_context(serve(redis_binary, tmp_path / "s", sentinel, before=(str(config), "--sentinel")))
    watcher = redis.Redis(port=int(sentinel))
    wait_until(lambda: watcher.sentinel_master("main")["num-slaves"] == 1)

    silent = free_port()
    settings = RedisSettings(url=f"redis+sentinel://127.0.0.1:{silent},127.0.0.1:{sentinel}/main/0")
    client = StreamClient(settings, "run", patience_s=240)
    client.create_groups()
    assert client.issue(Prompt(group_uid="uid-0", batch=1))
    assert redis.Redis(port=int(first)).wait(num_replicas=1, timeout=120_000) == 1
    primary.kill()
    assert client.issue(Prompt(group_uid="uid-1", batch=2)), "written to the new primary"
    assert [issue.group_uid for issue in client.read_issued()] == ["uid-0", "uid-1"]
    assert replica.info("replication")["role"] == "master"
    assert build_library().name in str(replica.function_list()), "it had the functions before it was the primary"


def test_sentinels_that_know_no_primary_are_an_error_that_names_them(free_port: Callable[[], str]) -> None:
    port = free_port()
    client = StreamClient(RedisSettings(url=f"redis+sentinel://127.0.0.1:{port}/main"), "run", patience_s=1)
    with pytest.raises(
        UnavailableError, match=rf"no answer from Redis at 127.0.0.1:{port} \(No master found for 'main'"
    ):
        client.ping()


def test_a_client_follows_the_owner_of_its_keys_in_a_cluster(
    tmp_path: Path, redis_binary: str, free_port: Callable[[], str], stack: contextlib.ExitStack
) -> None:
    nodes = []
    for name in ("a", "b"):
        port = free_port()
        options = ("--cluster-enabled", "yes", "--cluster-port", free_port())
        stack.enter_context(serve(redis_binary, tmp_path / name, port, *DURABLE, *options))
        nodes.append(redis.Redis(port=int(port), decode_responses=True))
    a, b = nodes
    slot = key_slot(KEY.encode())
    a.execute_command("CLUSTER ADDSLOTSRANGE", 0, slot)
    b.execute_command("CLUSTER ADDSLOTSRANGE", slot + 1, 16383)
    bus = b.config_get("cluster-port")["cluster-port"]
    a.execute_command("CLUSTER MEET", "127.0.0.1", b.connection_pool.connection_kwargs["port"], bus)
    for node in nodes:
        wait_until(lambda node=node: node.cluster("info")["cluster_state"] == "ok")

    # The first address that is asked is that of the node without the keys.
    hosts = ",".join(f"127.0.0.1:{node.connection_pool.connection_kwargs['port']}" for node in (b, a))
    settings = RedisSettings(url=f"redis+cluster://{hosts}")
    streams = StreamClient(settings, "run", patience_s=60)
    streams.create_groups()
    assert streams.issue(Prompt(group_uid="uid", batch=1)), "a script over several keys"
    assert [entry.message.group_uid for entry in streams.claim_prompts("worker", 1, 0.1)] == ["uid"]
    assert b.dbsize() == 0

    assert [load_functions(node, "Redis") for node in connect_all(settings, 60)].count(True) == 1, "one had them"
    assert all(build_library().name in str(node.function_list()) for node in nodes)

    client = connect(settings, 60, KEY)
    assert client.set(KEY + "x", 1)
    a.flushall()
    owner = b.cluster("myid")
    for node in (b, a):
        node.execute_command("CLUSTER SETSLOT", slot, "NODE", owner)
    assert client.set(KEY + "x", 2), "written to the new owner"
    assert b.dbsize() == 1


@pytest.mark.parametrize(
    "url", ["127.0.0.1:6379", "http://127.0.0.1:6379", "redis+sentinel://host/main", "redis+sentinel://host:26379"]
)
def test_an_address_that_is_no_servers_is_refused_when_settings_are_read(url: str) -> None:
    with pytest.raises(ValidationError, match="url"):
        RedisSettings(url=url)
