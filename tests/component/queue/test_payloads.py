"""Large groups in files beside Redis: what holds for groups inline holds for them, on a real server."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import fsspec
import pytest
from payload_clients import load_payload_settings, open_payload_client, start_trainer

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import LedgerEntry, Prompt, Trajectory, TrajectoryGroup
from forage_queue.streams import payloads
from forage_queue.streams.client import VALIDATION, Entry, StreamClient
from forage_queue.streams.payloads import FOLDER, ORPHAN_S, Payloads
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import RedisSettings, Settings
from forage_trajectory.codec import pack_group

LIMIT = 2000
Connect = Callable[..., StreamClient]


@pytest.fixture
def settings(redis_server: RedisSettings, tmp_path: Path) -> Settings:
    return load_payload_settings(redis_server, tmp_path, LIMIT)


@pytest.fixture
def connect(settings: Settings) -> Connect:
    return lambda own=settings: open_payload_client(own)


@pytest.fixture
def trainer(connect: Connect) -> StreamClient:
    return start_trainer(connect())


@pytest.fixture
def worker(connect: Connect) -> StreamClient:
    return connect()


def make_group(position: int = 0, tokens: int = 2 * LIMIT) -> PackedGroup:
    chance = random.Random(position)
    ids = [chance.randrange(2**16) for _ in range(tokens)]
    return pack_group(
        TrajectoryGroup(group_uid="g", batch=1, position=position, trajectories=[Trajectory(token_ids=ids)])
    )


def claim(trainer: StreamClient, worker: StreamClient, count: int, stream: str = "") -> list[Entry[Prompt]]:
    for position in range(count):
        trainer.issue(Prompt(group_uid="g", batch=1, position=position, reply_stream=stream))
    return worker.claim_prompts("worker", count, 0.1)


def finish(trainer: StreamClient, worker: StreamClient, count: int = 1) -> list[Entry[Prompt]]:
    entries = claim(trainer, worker, count)
    for entry in entries:
        assert worker.finish(entry, make_group(entry.message.position))
    return entries


def list_files(settings: Settings, stream: str = "trajectories") -> list[Path]:
    return sorted((settings.run.folder / FOLDER / stream).glob("*"))


def test_a_large_group_is_in_a_file_and_a_small_one_in_redis(
    trainer: StreamClient, worker: StreamClient, settings: Settings
) -> None:
    small, large = claim(trainer, worker, 2)
    worker.finish(small, make_group(0, 10))
    assert list_files(settings) == []
    worker.finish(large, make_group(1))
    (file,) = list_files(settings)
    assert file.stat().st_size > LIMIT
    entries = trainer._redis.xrange(trainer.trajectories)
    assert sum(len(value) for _, fields in entries for value in fields.values()) < LIMIT
    claimed = trainer.claim_groups(trainer.trajectories, 10, 0.1)
    assert [entry.message.read_packed() for entry in claimed] == [make_group(0, 10), make_group(1)]
    assert list_files(settings) == [file], "it stays until the group is acknowledged"
    again = trainer.reclaim_groups(trainer.trajectories, ())
    assert [entry.id for entry in again] == [entry.id for entry in claimed]


def test_a_file_goes_with_its_entry(trainer: StreamClient, worker: StreamClient, settings: Settings) -> None:
    finish(trainer, worker, 3)
    ids = [entry.id for entry in trainer.claim_groups(trainer.trajectories, 10, 0.1)]
    assert len(list_files(settings)) == 3
    trainer.acknowledge(LedgerEntry(step=1, group_uids=["g"]), ids[:1])
    trainer.acknowledge(LedgerEntry(step=1, group_uids=["g"]), ids[:1])
    assert len(list_files(settings)) == 2
    trainer.discard(trainer.trajectories, ids[1:2])
    assert len(list_files(settings)) == 1
    trainer.reject(trainer.trajectories, ids[2], b"forged")
    assert list_files(settings) == []
    assert not trainer._redis.exists(trainer.key("stored:trajectories"))


def test_files_of_a_validation_go_with_its_stream(
    trainer: StreamClient, worker: StreamClient, settings: Settings
) -> None:
    stream = trainer.key(f"{VALIDATION}after")
    trainer.open_replies(stream, 1)
    first, late = claim(trainer, worker, 2, stream)
    assert worker.finish(first, make_group())
    assert [e.message.read_packed() for e in trainer.claim_groups(stream, 5, 0.1)] == [make_group()]
    assert len(list_files(settings, "validation-after")) == 1
    trainer.close_replies(stream, 1)
    folder = settings.run.folder / FOLDER / "validation-after"
    assert not folder.exists()
    assert not worker.finish(late, make_group()), "nobody waits for it"
    assert not folder.exists()
    folder.mkdir()  # its trainer was killed before it deleted the folder
    assert Payloads(settings).list_old() == {}
    assert not folder.exists()


def test_of_two_workers_the_second_deletes_its_own_file(
    trainer: StreamClient, worker: StreamClient, connect: Connect, settings: Settings
) -> None:
    (entry,) = claim(trainer, worker, 1)
    assert worker.finish(entry, make_group())
    kept = list_files(settings)
    assert not connect().finish(entry, make_group())
    assert list_files(settings) == kept
    assert [one.message.read_packed() for one in trainer.claim_groups(trainer.trajectories, 5, 0.1)] == [make_group()]


def test_a_call_whose_reply_was_lost_keeps_its_file(
    trainer: StreamClient, worker: StreamClient, settings: Settings
) -> None:
    (entry,) = claim(trainer, worker, 1)
    real, calls = worker._redis.fcall, []

    def call_twice(*args: object) -> object:
        calls.append(real(*args))
        return real(*args)  # what the connection does after a lost reply

    with patch.object(worker._redis, "fcall", call_twice):
        assert worker.finish(entry, make_group())
    assert calls == [1]
    assert len(list_files(settings)) == 1
    assert len(trainer.claim_groups(trainer.trajectories, 5, 0.1)) == 1


@pytest.mark.parametrize("damage", ["deleted", "altered", "cut"])
def test_a_group_whose_file_is_lost_is_rejected_and_found_absent(
    trainer: StreamClient, worker: StreamClient, settings: Settings, damage: str
) -> None:
    finish(trainer, worker, 2)
    (file, *_) = list_files(settings)
    data = file.read_bytes()
    if damage == "deleted":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    assert len(trainer.claim_groups(trainer.trajectories, 5, 0.1)) == 1
    assert len(list_files(settings)) == 1
    assert trainer.count_backlog(trainer.trajectories) == 1
    assert len(trainer.find_absent(trainer.trajectories, 1)) == 2, "so the trainer finds which one to issue again"
    assert trainer._redis.xlen(trainer.key("rejected")) == 1


def test_a_file_that_cannot_be_read_now_is_read_by_the_next_claim(
    trainer: StreamClient, worker: StreamClient, settings: Settings
) -> None:
    finish(trainer, worker, 3)
    _, file, _ = list_files(settings)
    data = file.read_bytes()
    file.unlink()
    file.mkdir()
    assert len(trainer.claim_groups(trainer.trajectories, 5, 0.1)) == 2, "the others do not wait for it"
    assert trainer.has_unread(trainer.trajectories)
    with pytest.raises(UnavailableError, match=r"cannot be read .IsADirectoryError.*see redis.payloads_url"):
        trainer.claim_groups(trainer.trajectories, 5, 0.1)
    file.rmdir()
    file.write_bytes(data)
    assert len(trainer.claim_groups(trainer.trajectories, 5, 0.1)) == 1, "none is lost, and none is rejected"
    assert not trainer.has_unread(trainer.trajectories)
    assert trainer.count_backlog(trainer.trajectories) == 3


def test_orphans_are_deleted_once_they_are_old(
    trainer: StreamClient, worker: StreamClient, connect: Connect, settings: Settings
) -> None:
    finish(trainer, worker, 1)
    kept = list_files(settings)
    packed = PackedGroup(columns=b"of a worker that died before it wrote the reference")
    assert Payloads(settings).put("trajectories", "0" * 16, packed)
    partial = kept[0].with_name(f".partial-elsewhere.1.00000000-{kept[0].name}")
    partial.write_bytes(b"")
    trainer.delete_orphans()
    assert len(list_files(settings)) == 3, "they are young"
    with patch.object(payloads, "ORPHAN_S", -60.0):
        successor = connect()
        successor.acquire_epoch()
        partial.unlink()
        successor.delete_orphans()
    assert list_files(settings) == kept
    trainer._redis.xtrim(trainer.trajectories, 0)
    with patch.object(payloads, "ORPHAN_S", -60.0):
        successor = connect()
        successor.acquire_epoch()
        successor.delete_orphans()
    assert list_files(settings) == [], "an operator deleted the entry"
    assert ORPHAN_S == 3600


def test_without_a_shared_place_groups_go_through_redis(
    trainer: StreamClient, connect: Connect, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = settings.run.model_copy(update={"dir": tmp_path / "another volume"})
    apart = connect(settings.model_copy(update={"run": run}))
    finish(trainer, apart, 2)
    assert list_files(settings) == []
    assert len(trainer.claim_groups(trainer.trajectories, 5, 0.1)) == 2
    assert capsys.readouterr().err.count("payloads_not_shared") == 1


def test_without_a_trainer_that_reads_files_groups_go_through_redis(
    connect: Connect, worker: StreamClient, settings: Settings
) -> None:
    trainer = StreamClient(settings.redis, "run", 2.0)
    trainer.create_groups()
    trainer.acquire_epoch()
    finish(trainer, worker)
    assert len(trainer.claim_groups(trainer.trajectories, 5, 0.1)) == 1


def test_a_place_that_takes_no_file_costs_nothing_but_memory(
    trainer: StreamClient, worker: StreamClient, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    (settings.run.folder / FOLDER / "trajectories").write_text("in the way")
    finish(trainer, worker)
    assert len(trainer.claim_groups(trainer.trajectories, 5, 0.1)) == 1
    assert "payload_not_written" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../secret", "", "shared", "0-0123456789abcdeX", "/etc/passwd"])
def test_a_reference_reaches_no_other_file(trainer: StreamClient, settings: Settings, name: str) -> None:
    (settings.run.dir / "secret").write_bytes(b"keep")
    packed = PackedGroup()
    packed.stored.name, packed.stored.bytes = name, 4
    trainer._redis.xadd(trainer.trajectories, {"p": packed.SerializeToString()})
    assert trainer.claim_groups(trainer.trajectories, 5, 0.1) == []
    assert trainer.count_backlog(trainer.trajectories) == 0
    assert (settings.run.dir / "secret").read_bytes() == b"keep"


def test_an_object_store_holds_files_too(trainer: StreamClient, settings: Settings) -> None:
    redis = settings.redis.model_copy(update={"payloads_url": "memory://bucket/groups"})
    own = settings.model_copy(update={"redis": redis})
    reader, writer = (StreamClient(redis, "run", 2.0, payloads=Payloads(own)) for _ in range(2))
    reader.epoch = trainer.epoch
    reader.offer_payloads()
    system = fsspec.filesystem("memory")
    finish(reader, writer, 2)
    assert len(system.find("/bucket/groups/run/trajectories")) == 2
    first, second = reader.claim_groups(reader.trajectories, 5, 0.1)
    assert [first.message.read_packed(), second.message.read_packed()] == [make_group(0), make_group(1)]
    reader.discard(reader.trajectories, [first.id])
    assert len(system.find("/bucket/groups/run/trajectories")) == 1
    with patch.object(payloads, "ORPHAN_S", -60.0):
        Payloads(own).put("trajectories", "0" * 16, PackedGroup(columns=b"orphan"))
        reader.delete_orphans()
    assert len(system.find("/bucket/groups/run/trajectories")) == 1
    system.rm("/bucket", recursive=True)
    with pytest.raises(UnavailableError, match=r"memory://bucket/groups lacks trajectories/.*is its volume mounted"):
        reader.reclaim_groups(reader.trajectories, ())
    assert reader.count_backlog(reader.trajectories) == 1


def test_an_address_that_nothing_reads_is_refused(settings: Settings) -> None:
    redis = settings.redis.model_copy(update={"payloads_url": "nowhere://bucket"})
    with pytest.raises(SettingsError, match=r"redis.payloads_url = 'nowhere://bucket' cannot be used"):
        Payloads(settings.model_copy(update={"redis": redis}))
