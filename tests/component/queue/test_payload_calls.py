"""Files of groups under a server or a place that refuses: written once, read side by side, and lost only where gone."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import redis
from payload_clients import load_payload_settings, open_payload_client, start_trainer
from waiting import WAIT_S

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import Prompt, Trajectory, TrajectoryGroup
from forage_queue.streams import client, payloads
from forage_queue.streams.client import Entry, StreamClient
from forage_queue.streams.payloads import FOLDER, Payloads
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import RedisSettings, Settings
from forage_trajectory.codec import pack_group

Connect = Callable[..., StreamClient]


@pytest.fixture
def settings(redis_server: RedisSettings, tmp_path: Path) -> Settings:
    return load_payload_settings(redis_server, tmp_path, 0)


@pytest.fixture
def connect(settings: Settings) -> Connect:
    def open_client(payloads_url: str = "") -> StreamClient:
        place = settings.redis.model_copy(update={"payloads_url": payloads_url})
        return open_payload_client(settings.model_copy(update={"redis": place}))

    return open_client


@pytest.fixture
def trainer(connect: Connect) -> StreamClient:
    return start_trainer(connect())


@contextmanager
def refuse_writes(server: RedisSettings) -> Iterator[None]:
    """Let the server refuse every write, as one without its replicas does."""
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("min-replicas-to-write", "1")
        try:
            yield
        finally:
            admin.config_set("min-replicas-to-write", "0")


def make_group(position: int = 0) -> PackedGroup:
    chance = random.Random(position)
    ids = [chance.randrange(2**16) for _ in range(1000)]
    return pack_group(
        TrajectoryGroup(group_uid="g", batch=1, position=position, trajectories=[Trajectory(token_ids=ids)])
    )


def claim(trainer: StreamClient, worker: StreamClient, count: int) -> list[Entry[Prompt]]:
    for position in range(count):
        trainer.issue(Prompt(group_uid="g", batch=1, position=position))
    return worker.claim_prompts("worker", count, 0.1)


def finish(trainer: StreamClient, worker: StreamClient, count: int) -> None:
    for entry in claim(trainer, worker, count):
        assert worker.finish(entry, make_group(entry.message.position))


def list_files(settings: Settings) -> list[Path]:
    return sorted((settings.run.folder / FOLDER / "trajectories").glob("*"))


# Redis refuses writes.


def test_a_group_that_redis_refuses_is_stored_once_however_often_its_call_is_repeated(
    trainer: StreamClient, connect: Connect, settings: Settings
) -> None:
    worker = connect()
    (entry,) = claim(trainer, worker, 1)
    group = make_group()
    with refuse_writes(settings.redis):
        for _ in range(5):
            with pytest.raises(UnavailableError, match="fewer replicas than a write must reach"):
                worker.finish(entry, group)
    (file,) = list_files(settings)
    assert worker.finish(entry, group)
    assert list_files(settings) == [file]
    assert [one.message.read_packed() for one in trainer.claim_groups(trainer.trajectories, 5, 0.1)] == [group]


def test_another_group_of_the_same_prompt_has_a_file_of_its_own(
    trainer: StreamClient, connect: Connect, settings: Settings
) -> None:
    worker = connect()
    (entry,) = claim(trainer, worker, 1)
    with refuse_writes(settings.redis), pytest.raises(UnavailableError):
        worker.finish(entry, make_group(1))
    assert worker.finish(entry, make_group(2))
    assert [one.message.read_packed() for one in trainer.claim_groups(trainer.trajectories, 5, 0.1)] == [make_group(2)]


def test_a_file_that_waits_for_redis_never_becomes_an_orphan(
    trainer: StreamClient, connect: Connect, settings: Settings
) -> None:
    worker = connect()
    (entry,) = claim(trainer, worker, 1)
    group = make_group()
    with refuse_writes(settings.redis), pytest.raises(UnavailableError):
        worker.finish(entry, group)
    with patch.object(payloads, "ORPHAN_S", -60.0):  # so long has it waited
        assert worker.finish(entry, group)
    assert len(list_files(settings)) == 2, "the first one may be deleted at any time"
    list_files(settings)[0].unlink()
    assert [one.message.read_packed() for one in trainer.claim_groups(trainer.trajectories, 5, 0.1)] == [group]


def test_a_call_that_is_never_repeated_is_forgotten(
    trainer: StreamClient, connect: Connect, settings: Settings
) -> None:
    worker = connect()
    first, second = claim(trainer, worker, 2)
    with refuse_writes(settings.redis), pytest.raises(UnavailableError):
        worker.finish(first, make_group())
    assert list(worker._calls) == [first.id]
    with patch.object(client, "ORPHAN_S", -1.0):  # so long has it not been tried
        assert worker.finish(second, make_group())
    assert not worker._calls
    assert worker._payloads is not None
    assert not worker._payloads._written


def test_an_entry_that_is_rejected_twice_leaves_one_copy(trainer: StreamClient, connect: Connect) -> None:
    finish(trainer, connect(), 1)
    ((id, _),) = trainer._redis.xrange(trainer.trajectories)
    for _ in range(3):
        trainer.reject(trainer.trajectories, id, b"content")
    assert trainer._redis.xlen(trainer.key("rejected")) == 1


def test_a_rejection_that_redis_refuses_loses_no_other_group(trainer: StreamClient, connect: Connect) -> None:
    trainer._redis.xadd(trainer.trajectories, {"p": b"\xff\xff\xff"})
    finish(trainer, connect(), 2)
    with (
        patch.object(trainer, "reject", side_effect=UnavailableError("no writes")),
        pytest.raises(UnavailableError, match="no writes"),
    ):
        trainer.claim_groups(trainer.trajectories, 5, 0.1)
    assert len(trainer.claim_groups(trainer.trajectories, 5, 0.1)) == 2
    assert trainer.count_backlog(trainer.trajectories) == 2


# The place of the files.


def test_a_start_with_another_place_is_refused_and_going_back_helps(
    trainer: StreamClient, connect: Connect, settings: Settings, tmp_path: Path
) -> None:
    finish(trainer, connect(), 2)
    other = connect(f"file://{tmp_path}/elsewhere")
    with pytest.raises(
        SettingsError, match=r"^2 groups of this run .*elsewhere is not the place .*redis\.payloads_url"
    ):
        other.require_payloads()
    again = connect()
    again.require_payloads()
    again.acquire_epoch()
    again.offer_payloads()
    groups = again.reclaim_groups(again.trajectories, ()) + again.claim_groups(again.trajectories, 5, 0.1)
    assert [one.message.read_packed() for one in groups] == [make_group(0), make_group(1)]
    again.discard(again.trajectories, [one.id for one in groups])
    other.require_payloads()  # no group waits any more


def test_files_that_were_copied_are_read_in_their_new_place(
    trainer: StreamClient, connect: Connect, settings: Settings, tmp_path: Path
) -> None:
    finish(trainer, connect(), 2)
    shutil.copytree(settings.run.folder / FOLDER, tmp_path / "elsewhere/run")
    other = connect(f"file://{tmp_path}/elsewhere")
    other.require_payloads()
    other.acquire_epoch()
    other.offer_payloads()
    assert len(other.claim_groups(other.trajectories, 5, 0.1)) == 2


def test_an_empty_folder_where_a_volume_should_be_loses_no_group(
    trainer: StreamClient, connect: Connect, settings: Settings
) -> None:
    finish(trainer, connect(), 2)
    folder = settings.run.folder / FOLDER
    folder.rename(folder.with_name("unmounted"))
    folder.mkdir()
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"lacks trajectories/.*is its volume mounted"):
            trainer.claim_groups(trainer.trajectories, 5, 0.1)
    assert trainer.count_backlog(trainer.trajectories) == 2
    trainer.offer_payloads()
    assert list(folder.iterdir()) == [], "a place is marked once: an empty one does not become the trainer's"
    folder.rmdir()
    folder.with_name("unmounted").rename(folder)
    assert len(trainer.claim_groups(trainer.trajectories, 5, 0.1)) == 2


def test_files_that_are_gone_for_good_cost_their_groups_once_the_operator_says_so(
    trainer: StreamClient, connect: Connect, settings: Settings
) -> None:
    finish(trainer, connect(), 2)
    folder = settings.run.folder / FOLDER
    shutil.rmtree(folder)
    again = connect()
    with pytest.raises(SettingsError, match="an empty file 'shared' here accepts that these groups are lost"):
        again.require_payloads()
    folder.mkdir()
    (folder / "shared").touch()
    again.require_payloads()
    again.acquire_epoch()
    again.offer_payloads()
    assert again.claim_groups(again.trajectories, 5, 0.1) == []
    assert again.count_backlog(again.trajectories) == 0
    assert len(again.find_absent(again.trajectories, 1)) == 2, "so the trainer issues them again"


# Many files.


def test_files_are_read_side_by_side(trainer: StreamClient, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(trainer, connect(), 8)
    together = threading.Barrier(4)
    fetch = Payloads.fetch

    def fetch_together(self: Payloads, stream: str, packed: PackedGroup) -> None:
        together.wait(WAIT_S)
        fetch(self, stream, packed)

    monkeypatch.setattr(Payloads, "fetch", fetch_together)
    claimed = trainer.claim_groups(trainer.trajectories, 64, 0.1)
    assert [one.message.position for one in claimed] == list(range(8))
    assert len(trainer.reclaim_groups(trainer.trajectories, ())) == 8


@pytest.mark.parametrize("reclaims", [False, True])
def test_files_whose_reading_has_not_begun_wait_for_the_next_claim_when_it_is_over(
    trainer: StreamClient, connect: Connect, monkeypatch: pytest.MonkeyPatch, reclaims: bool
) -> None:
    finish(trainer, connect(), 40)
    if reclaims:
        trainer._read_new(trainer.trajectories, trainer._trainer, 40, 0.1)  # a reply that was lost
    over = threading.Event()
    fetch = Payloads.fetch

    def fetch_last(self: Payloads, stream: str, packed: PackedGroup) -> None:
        over.set()
        fetch(self, stream, packed)

    monkeypatch.setattr(Payloads, "fetch", fetch_last)
    if reclaims:
        first = trainer.reclaim_groups(trainer.trajectories, (), over.is_set)
    else:
        first = trainer.claim_groups(trainer.trajectories, 64, 0.1, over.is_set)
    assert 0 < len(first) <= 16, "those that were being read"
    assert trainer.has_unread(trainer.trajectories)
    rest = trainer.claim_groups(trainer.trajectories, 64, 0.0)
    assert sorted(one.message.position for one in [*first, *rest]) == list(range(40))
