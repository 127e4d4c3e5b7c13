"""What a server's refusals become: those that pass are waited for, and the client goes on when they are over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis_process import DURABLE, serve
from waiting import wait_until

from forage_proto.v1.trajectory_pb2 import ChatMessage, LedgerEntry, Policy, Prompt, Replica, Shift, TrajectoryGroup
from forage_queue.streams.client import StreamClient
from forage_queue.streams.connection import translate_error
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import RedisSettings
from forage_trajectory.codec import pack_group

WHERE = "Redis at server:6379"


@pytest.fixture
def server(own_redis: RedisSettings) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_redis.url) as client:
        yield client


@pytest.fixture
def client(own_redis: RedisSettings) -> StreamClient:
    client = StreamClient(own_redis, "run", patience_s=1)
    client.create_groups()
    return client


def build_prompt(position: int = 0, size: int = 0) -> Prompt:
    content = [ChatMessage(role="user", content="x" * size)]
    return Prompt(group_uid=f"uid-{position}", batch=1, position=position, messages=content)


def save(server: redis.Redis, outcome: str) -> None:
    """Save a snapshot in the background, as a server does by itself, and wait for how it ends."""
    server.bgsave()
    wait_until(lambda: server.info("persistence")["rdb_last_bgsave_status"] == outcome)


def is_confirmed(client: StreamClient) -> bool:
    try:
        client.create_groups()  # repeated, it writes nothing
    except UnavailableError:
        return False
    return True


def test_a_full_server_refuses_no_script_and_other_commands_are_waited_for(
    server: redis.Redis, client: StreamClient
) -> None:
    server.config_set("maxmemory", "1mb")
    client.create_groups()
    assert client.acquire_epoch() == 1
    assert client.issue(build_prompt())
    [entry] = client.claim_prompts("worker", 1, 0.1)
    assert client.finish(entry, pack_group(TrajectoryGroup(group_uid="uid-0", batch=1)))
    [group] = client.claim_groups(client.trajectories, 1, 0.1)
    client.publish(Policy(version=1, epoch=1))
    client.acknowledge_policy("replica", Replica(serving=Policy(version=1, epoch=1)))
    shift = Shift(number=1, is_trainers=True)
    client.set_shift(shift)
    assert client.replace_shift(shift, Shift(epoch=1, number=2))
    client.acknowledge(LedgerEntry(step=1), [group.id])
    assert client.count_backlog(client.trajectories) == 0, "what frees memory is possible"
    with pytest.raises(UnavailableError, match=r"^Redis at 127.* is full \(maxmemory 1mb\): raise its maxmemory"):
        client._call(client._redis.set, "other", "x")
    server.config_set("maxmemory", "0")
    client._call(client._redis.set, "other", "x")


def test_a_server_that_cannot_write_its_data_is_waited_for(server: redis.Redis, client: StreamClient) -> None:
    server.config_set("save", "3600 1")
    snapshot = Path(server.config_get("dir")["dir"], "dump.rdb")
    snapshot.mkdir()  # so that the file cannot be written, whoever runs the test
    save(server, "err")
    with pytest.raises(UnavailableError, match=r"cannot write its data to disk: free space"):
        client.issue(build_prompt())
    snapshot.rmdir()
    save(server, "ok")
    assert client.issue(build_prompt())


def test_a_replica_and_a_primary_without_replicas_are_waited_for(server: redis.Redis, client: StreamClient) -> None:
    server.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(UnavailableError, match=r"is a replica, which takes no writes: give the address"):
        client.issue(build_prompt())
    server.execute_command("REPLICAOF", "NO", "ONE")
    server.config_set("min-replicas-to-write", "1")
    with pytest.raises(UnavailableError, match=r"fewer replicas than a write must reach: start"):
        client.issue(build_prompt())
    server.config_set("min-replicas-to-write", "0")
    assert client.issue(build_prompt())


def test_a_write_that_no_replica_confirms_is_not_done(
    tmp_path: Path,
    redis_binary: str,
    free_address: Callable[[], str],
    own_redis: RedisSettings,
    server: redis.Redis,
) -> None:
    server.config_set("repl-diskless-sync-delay", "0")
    client = StreamClient(own_redis.model_copy(update={"wait_replicas": 1, "timeout_s": 1.0}), "run", patience_s=1)
    with pytest.raises(UnavailableError, match=r"fewer replicas than a write must reach: start"):
        client.create_groups()
    assert client.count_backlog(client.prompts) == 0, "reading does not wait"
    writer = StreamClient(own_redis, "run")
    writer.acquire_epoch()
    assert writer.issue(build_prompt()), "written, but not confirmed"
    host, _, port = own_redis.url.removeprefix("redis://").removesuffix("/0").rpartition(":")
    own = free_address().rpartition(":")[2]
    with serve(redis_binary, tmp_path / "replica", own, "--replicaof", f"{host} {port}"):
        wait_until(lambda: is_confirmed(client))
        assert redis.Redis(port=int(own)).exists(client.prompts), "the replica has what was written before"


def test_a_group_that_no_replica_confirmed_is_its_workers_when_it_is_written_again(own_redis: RedisSettings) -> None:
    trainer = StreamClient(own_redis, "run", patience_s=1)
    trainer.create_groups()
    trainer.issue(build_prompt())
    [entry] = trainer.claim_prompts("worker", 1, 0.1)
    worker = StreamClient(own_redis.model_copy(update={"wait_replicas": 1, "timeout_s": 1.0}), "run", patience_s=1)
    group = pack_group(TrajectoryGroup(group_uid="uid-0", batch=1))
    for _ in range(2):
        with pytest.raises(UnavailableError, match="fewer replicas than a write must reach"):
            worker.finish(entry, group)
    worker._redis.replicas = 0  # they are back
    assert worker.finish(entry, group), "it was this worker that has written it"
    assert not StreamClient(own_redis, "run").finish(entry, group), "and no other one"
    assert trainer.count_backlog(trainer.trajectories) == 1


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (redis.exceptions.MasterDownError("Link with MASTER is down", status_code="MASTERDOWN"), "lost its primary"),
        (
            redis.exceptions.ClusterDownError("The cluster is down", status_code="CLUSTERDOWN"),
            "lost a part of its cluster",
        ),
        (redis.exceptions.TryAgainError("Multiple keys request", status_code="TRYAGAIN"), "moving keys"),
        (redis.BusyLoadingError("loading the dataset in memory", status_code="LOADING"), "reading its data from disk"),
        (redis.ResponseError("BUSY Redis is busy running a script."), "busy with a script"),
        (redis.ResponseError("ERR Error running script: @user_script: 2: -OOM command not allowed"), "is full:"),
        (redis.TimeoutError("Timeout reading from socket"), "is it running"),
    ],
)
def test_each_refusal_that_passes_has_its_sentence(error: Exception, sentence: str) -> None:
    found = translate_error(error, WHERE)
    assert isinstance(found, UnavailableError)
    assert WHERE in str(found)
    assert sentence in str(found)


@pytest.mark.parametrize("text", ["ERR syntax error", "BUSYGROUP Consumer Group name already exists", "ERR no OOM"])
def test_a_defect_of_ours_is_no_refusal(text: str) -> None:
    assert translate_error(redis.ResponseError(text), WHERE) is None


def test_wrong_credentials_end_the_process_with_a_sentence(
    tmp_path: Path, redis_binary: str, free_address: Callable[[], str]
) -> None:
    port = free_address().rpartition(":")[2]
    with serve(redis_binary, tmp_path, port, *DURABLE, "--requirepass", "right"):
        assert StreamClient(RedisSettings(url=f"redis://:right@127.0.0.1:{port}/0"), "run", patience_s=1).ping()
        with pytest.raises(SettingsError, match=rf"^Redis at 127.0.0.1:{port} refuses this client"):
            StreamClient(RedisSettings(url=f"redis://:wrong-one@127.0.0.1:{port}/0"), "run", patience_s=1).ping()


def test_a_stream_is_measured_in_bytes(server: redis.Redis, client: StreamClient, own_redis: RedisSettings) -> None:
    assert client.measure_bytes("no such stream") == 0
    for position in range(20):
        client.issue(build_prompt(position, size=10_000))
    assert 200_000 < client.measure_bytes(client.prompts) < 300_000


def test_the_byte_limit_follows_the_setting_else_the_server(
    server: redis.Redis, client: StreamClient, own_redis: RedisSettings
) -> None:
    assert client.read_byte_limit() == 0
    server.config_set("maxmemory", "64mb")
    assert client.read_byte_limit() == 32 * 2**20
    asked = own_redis.model_copy(update={"max_stream_bytes": 1000})
    assert StreamClient(asked, "run").read_byte_limit() == 1000
