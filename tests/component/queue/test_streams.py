"""The exactly-once rules of the streams, on a real server."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from waiting import WAIT_S

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import LedgerEntry, Policy, Prompt, Purpose, Replica, Shift, TrajectoryGroup
from forage_queue.streams.client import ANNOUNCED, NEVER, StreamClient
from forage_queue.streams.prompt_identity import Issue
from forage_runtime.errors import FencedError, SettingsError, UnavailableError
from forage_runtime.settings import RedisSettings
from forage_trajectory.codec import pack_group

HOUR_S = 3600.0


@pytest.fixture
def client(redis_server: RedisSettings) -> StreamClient:
    client = StreamClient(redis_server, "run")
    client.create_groups()
    return client


def let_time_pass(client: StreamClient, worker: str, entry: bytes) -> None:
    """Let the server take it that a worker has not spoken of its entry for two hours."""
    client._redis.xclaim(client.prompts, "forage", worker, 0, [entry], idle=int(2000 * HOUR_S), justid=True)


def build_prompt(position: int = 0, attempt: int = 0) -> Prompt:
    return Prompt(
        run_id="run",
        group_uid=f"world/train/{position}/0",
        batch=1,
        position=position,
        attempt=attempt,
        purpose=Purpose.PURPOSE_TRAIN,
    )


def make_group(position: int = 0) -> PackedGroup:
    uid = f"world/train/{position}/0"
    return pack_group(TrajectoryGroup(run_id="run", group_uid=uid, batch=1, position=position))


def test_the_password_is_read_from_its_file(redis_server: RedisSettings, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("word\n")
    admin = redis.Redis.from_url(redis_server.url)
    admin.config_set("requirepass", "word")
    try:
        assert StreamClient(redis_server.model_copy(update={"password_file": file}), "run").ping()
        with pytest.raises(SettingsError, match=r"refuses this client .HELLO must.*check user, password"):
            StreamClient(redis_server, "run", patience_s=2).ping()
    finally:
        admin.config_set("requirepass", "")
    file.write_text("")
    with pytest.raises(SettingsError, match=r"redis.password_file .* holds no single token"):
        StreamClient(redis_server.model_copy(update={"password_file": file}), "run")


def test_a_prompt_is_issued_once(client: StreamClient) -> None:
    assert client.issue(build_prompt())
    assert not client.issue(build_prompt())
    assert client.issue(build_prompt(attempt=1)), "a further attempt is another issue"
    assert len(client.claim_prompts("a", 10, 0.1)) == 2
    assert client.read_issued() == [Issue(1, 0, attempt, "world/train/0/0") for attempt in (0, 1)]


def test_finish_acknowledges_the_prompt_and_writes_its_group_atomically(client: StreamClient) -> None:
    client.issue(build_prompt())
    (entry,) = client.claim_prompts("a", 1, 0.1)
    assert client.finish(entry, make_group())
    assert client.count_backlog(client.prompts) == 0
    assert client.reclaim_groups(client.trajectories, ()) == []
    (taken,) = client.claim_groups(client.trajectories, 10, 0.1)
    assert taken.message.read_packed() == make_group()


def test_of_two_workers_with_the_same_entry_only_the_first_to_finish_writes_a_group(
    redis_server: RedisSettings,
) -> None:
    client = StreamClient(redis_server.model_copy(update={"reclaim_idle_s": HOUR_S}), "run")
    client.create_groups()
    client.issue(build_prompt())
    (slow,) = client.claim_prompts("slow", 1, 0.1)
    assert client.reclaim_prompts("fast", 10) == []
    let_time_pass(client, "slow", slow.id)
    (fast,) = client.reclaim_prompts("fast", 10)
    assert fast.id == slow.id
    assert client.finish(fast, make_group())
    assert not client.finish(slow, make_group())
    assert client.count_backlog(client.trajectories) == 1


def test_keep_alive_prevents_a_reclaim(redis_server: RedisSettings) -> None:
    client = StreamClient(redis_server.model_copy(update={"reclaim_idle_s": HOUR_S}), "run")
    client.create_groups()
    client.issue(build_prompt())
    (entry,) = client.claim_prompts("a", 1, 0.1)
    let_time_pass(client, "a", entry.id)
    client.keep_alive("a", [entry.id])
    assert client.reclaim_prompts("b", 10) == []
    let_time_pass(client, "a", entry.id)
    assert [e.id for e in client.reclaim_prompts("b", 10)] == [entry.id]


def test_groups_are_reclaimed_until_their_step_is_acknowledged(client: StreamClient) -> None:
    client.issue(build_prompt())
    (entry,) = client.claim_prompts("a", 1, 0.1)
    client.finish(entry, make_group())
    (first,) = client.claim_groups(client.trajectories, 10, 0.1)
    (again,) = client.reclaim_groups(client.trajectories, ())
    assert (again.id, again.message.read_packed()) == (first.id, make_group())
    step = LedgerEntry(step=1, group_uids=[make_group().head.group_uid])
    client.acknowledge(step, [first.id])
    client.acknowledge(LedgerEntry(step=1, group_uids=["another"]), [first.id])
    assert client.read_ledger() == {1: step}, "a repeated acknowledgement changes nothing"
    assert client.reclaim_groups(client.trajectories, ()) == []
    assert client.count_backlog(client.trajectories) == 0


def test_a_trainer_of_an_older_epoch_is_fenced(client: StreamClient) -> None:
    old, new = client.acquire_epoch(), client.acquire_epoch()
    client.publish(Policy(version=3, epoch=new, uri="new"))
    with pytest.raises(FencedError, match="has taken over"):
        client.publish(Policy(version=9, epoch=old, uri="old"))
    policy = client.read_policy()
    assert policy is not None
    assert policy.uri == "new"
    client.publish(Policy(version=2, epoch=new, uri="resumed"))
    client.acknowledge_policy("replica-0", Replica(serving=Policy(version=2, epoch=new)))
    assert client.read_replicas()["replica-0"].serving.version == 2


@pytest.mark.parametrize(
    "act",
    [
        lambda client: client.reject(client.trajectories, b"1-1", b"content"),
        lambda client: client.open_replies(client.key("validation-before"), 1),
        lambda client: client.create_groups(client.key("validation-before")),
        lambda client: client.claim_groups(client.key("validation-before"), 1, 0.0),  # which would create it again
    ],
    ids=["reject", "open_replies", "create_groups", "claim_groups"],
)
def test_a_replaced_trainer_changes_no_stream(
    client: StreamClient, redis_server: RedisSettings, act: Callable[[StreamClient], object]
) -> None:
    client.acquire_epoch()
    StreamClient(redis_server, "run").acquire_epoch()
    client._redis.xadd(client.trajectories, {"p": make_group().SerializeToString()}, id="1-1")
    with pytest.raises(FencedError, match="has taken over"):
        act(client)
    assert client.count_backlog(client.trajectories) == 1
    assert not client._redis.exists(client.key("validation-before"), client.key("rejected"))


def test_a_worker_rejects_prompts_whoever_is_the_trainer(client: StreamClient, redis_server: RedisSettings) -> None:
    StreamClient(redis_server, "run").acquire_epoch()
    client._redis.xadd(client.prompts, {"m": b"\xff\xff\xff"})
    assert client.claim_prompts("a", 1, 0.1) == []
    assert client.count_backlog(client.prompts) == 0


def test_shifts_are_the_latest_trainers_and_are_replaced_only_by_who_knows_them(
    client: StreamClient, redis_server: RedisSettings
) -> None:
    assert client.read_shift() is None
    client.acquire_epoch()
    shift = Shift(number=1, is_trainers=True)
    client.set_shift(shift)
    assert client.read_shift() == Shift(epoch=1, number=1, is_trainers=True)
    seen = client.await_change(ANNOUNCED, NEVER, 0.1)
    sign, end = Shift(epoch=1, number=1, is_trainers=True, beat=1), Shift(epoch=1, number=2)
    assert client.replace_shift(shift, sign)
    assert client.await_change(ANNOUNCED, seen, 0.1) == NEVER, "a sign of life wakes nobody"
    assert not client.replace_shift(shift, end), "the trainer lives"
    assert client.replace_shift(sign, end)
    assert client.await_change(ANNOUNCED, seen, 0.1) > seen
    later = StreamClient(redis_server, "run")
    later.acquire_epoch()
    with pytest.raises(FencedError, match="has taken over"):
        client.set_shift(shift)
    later.set_shift(Shift(number=1, is_trainers=True))
    assert client.read_shift() == Shift(epoch=2, number=1, is_trainers=True)


def test_malformed_entries_are_rejected_and_valid_ones_are_claimed(client: StreamClient) -> None:
    client._redis.xadd(client.prompts, {"m": b"\xff\xff\xff"})
    client._redis.xadd(client.prompts, {"x": b""})
    client.issue(build_prompt())
    assert [e.message for e in client.claim_prompts("a", 10, 0.1)] == [build_prompt()]
    assert client._redis.xlen(client.key("rejected")) == 2
    assert client.count_backlog(client.prompts) == 1


def test_a_server_that_lost_its_data_gets_its_reply_streams_back(
    client: StreamClient, redis_server: RedisSettings
) -> None:
    admin, stream = redis.Redis.from_url(redis_server.url), client.key("validation-before")
    client.open_replies(stream, 1)
    prompt = build_prompt()
    prompt.reply_stream = stream
    client.issue(prompt)
    (entry,) = client.claim_prompts("worker", 1, 0.1)
    client.finish(entry, make_group())
    (group,) = client.claim_groups(stream, 1, 0.1)
    admin.delete(stream)  # after the look for pending entries, before their claim
    pages = iter([[{"message_id": group.id}], []])
    client._redis.xpending_range = lambda *_: next(pages)
    assert client.reclaim_groups(stream, ()) == []
    assert admin.xinfo_groups(stream)[0]["name"] == b"forage"


def test_no_entry_is_lost_when_the_server_is_killed(own_redis: RedisSettings) -> None:
    import psutil

    client = StreamClient(own_redis, "run", patience_s=240)
    client.create_groups()
    for position in range(20):
        client.issue(build_prompt(position))
    for entry in client.claim_prompts("a", 5, 0.1):
        client.finish(entry, make_group(entry.message.position))
    port = own_redis.url.rpartition(":")[2].partition("/")[0]
    (server,) = [
        p for p in psutil.Process().children(recursive=True) if "valkey" in p.name() and port in " ".join(p.cmdline())
    ]
    command, folder = server.cmdline(), server.cwd()
    binary = server.exe()
    server.send_signal(signal.SIGKILL)
    server.wait(WAIT_S)
    arguments = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", folder, "--appendonly", "yes"]
    assert command, "the server showed its command line"
    with subprocess.Popen([binary, *arguments]) as second:
        try:
            assert len(client.read_issued()) == 20
            assert client.count_backlog(client.prompts) == 15
            assert client.count_backlog(client.trajectories) == 5
            assert not client.issue(build_prompt(3)), "what was issued before stays issued"
        finally:
            second.kill()


def test_an_unavailable_server_is_an_error_that_names_its_address(free_address) -> None:
    address = free_address()
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:\d+.*is it running"):
        StreamClient(RedisSettings(url=f"redis://{address}/0"), "run", patience_s=1).ping()
