"""Policies that are published to an object store: a real server of the S3 protocol, which comes and goes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from s3_server import BUCKET, S3Server, await_bucket, serve_s3
from safetensors.torch import load_file
from trainer_parts import write_model
from waiting import WAIT_S, wait_until

from forage_proto.v1.trajectory_pb2 import Policy, Replica
from forage_queue.streams.client import StreamClient
from forage_runtime.errors import UserError
from forage_runtime.retries import Retries, StorageRetry
from forage_runtime.settings import PublishSettings, RedisSettings
from forage_runtime.stop import Stop, Stopped
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.waits import list_waits
from forage_weights.cache import PolicyCache
from forage_weights.storage import delete_folder, list_folders
from forage_weights.trainer.publisher import KEEP_NEWEST, PolicyStore, Publisher

ROOT = f"s3://{BUCKET}/run"
Weights = dict[str, torch.Tensor]


class Store:
    """The store, and the publisher of a trainer that writes there."""

    def __init__(self, server: S3Server, tmp_path: Path, streams: StreamClient) -> None:
        self._server = server
        self._folder, self._streams = tmp_path, streams
        self.stop = Stop()
        write_model(tmp_path / "model")

    def start(self) -> None:
        self._server.start()
        await_bucket(self._server)

    def end(self) -> None:
        self._server.kill()

    def connect(self, epoch: int = 1, uri: str = f"s3://{BUCKET}/") -> Publisher:
        settings, retries = PublishSettings(uri=uri), Retries(self.stop, Health())
        own = copy.copy(self._streams)
        own.epoch = epoch
        self.folders = PolicyStore(self._folder / f"policies-{epoch}", settings.uri, "run", retries.storage)
        return Publisher(self.folders, self._folder / "model", own, settings, retries)


@pytest.fixture
def streams(redis_server: RedisSettings) -> StreamClient:
    return StreamClient(redis_server, "publish", WAIT_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, free_address: Callable[[], str]) -> Iterator[S3Server]:
    own = S3Server(free_address().rpartition(":")[2], tmp_path_factory.mktemp("s3") / "log")
    yield own
    own.kill()


@pytest.fixture
def store(server: S3Server, tmp_path: Path, streams: StreamClient, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store, whose absence is reported at the first attempt."""
    for name, value in (server.environment | {"AWS_MAX_ATTEMPTS": "1"}).items():
        monkeypatch.setenv(name, value)
    file_system = fsspec.get_filesystem_class("s3")
    monkeypatch.setattr(file_system, "retries", 1)
    file_system.clear_instance_cache()
    if server.process is None or server.process.poll() is not None:
        server.start()
    else:
        server.reset()
    await_bucket(server)
    return Store(server, tmp_path, streams)


def make_weights(version: int) -> Weights:
    weights = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
    weights[version] += 1
    return {"w": weights.to(torch.bfloat16)}


def assert_served(cache: PolicyCache, policy: Policy, version: int) -> None:
    with cache.hold(policy) as held:
        assert load_file(held.files[0])["w"].equal(make_weights(version)["w"])


def test_engines_need_nothing_but_the_store(store: Store, streams: StreamClient, tmp_path: Path) -> None:
    publisher, cache = store.connect(), PolicyCache(tmp_path / "cache")
    policies = [publisher.publish(version, make_weights(version)) for version in range(3)]
    assert [policy.uri for policy in policies] == [f"{ROOT}/v{version}-e1" for version in range(3)]
    assert [len(policy.parts) for policy in policies] == [0, 2, 3]
    (tmp_path / "policies-1").rename(tmp_path / "not-shared")
    for version, policy in enumerate(policies):
        assert_served(cache, policy, version)
    assert streams.read_policy() == policies[-1]


def test_old_versions_are_deleted_there_and_epochs_found_there(
    store: Store, streams: StreamClient, tmp_path: Path
) -> None:
    publisher = store.connect()
    streams.acknowledge_policy("replica", Replica(serving=publisher.publish(0, make_weights(0))))
    for version in range(1, 5):
        publisher.publish(version, make_weights(version), whole=True)
    assert list_folders(ROOT) == ["v0-e1", "v2-e1", "v3-e1", "v4-e1"]
    publisher = store.connect(2)  # on another machine, where it finds no folder
    assert store.folders.find_highest_epoch() == 1
    last = [publisher.publish(5 + version, make_weights(version), whole=True) for version in range(KEEP_NEWEST)][-1]
    streams.acknowledge_policy("replica", Replica(serving=last))
    publisher.publish(9, make_weights(9))
    assert list_folders(ROOT) == ["v6-e2", "v7-e2", "v9-e2"]
    assert_served(PolicyCache(tmp_path / "cache"), last, KEEP_NEWEST - 1)


def test_a_store_that_is_away_is_waited_for_and_nothing_is_announced_meanwhile(
    store: Store, streams: StreamClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forage_runtime.retries._RETRY_INTERVAL_S", 0.05)
    publisher = store.connect()
    before = publisher.publish(0, make_weights(0))
    store.end()
    publisher.begin(1, make_weights(1))
    wait = await_wait()
    assert (wait["on"], wait["gives_up_in_s"]) == ("trainer.publish.uri", None)
    assert f"{ROOT}/v1-e1" in wait["detail"]
    assert publisher.poll() is None
    assert streams.read_policy() == before
    store.start()
    policy = publisher.wait()
    assert policy is not None
    assert streams.read_policy() == policy
    assert publisher.is_damaged(), "the store came back without the part before"
    again = publisher.publish(1, make_weights(1), whole=True)
    assert not publisher.is_damaged()
    assert_served(PolicyCache(tmp_path / "cache"), again, 1)
    delete_folder(again.uri)
    assert publisher.is_damaged()


def test_a_stop_request_ends_the_wait(store: Store, streams: StreamClient) -> None:
    publisher = store.connect()
    store.end()
    publisher.begin(0, make_weights(0))
    await_wait()
    store.stop.request()
    with pytest.raises(Stopped):
        publisher.wait()
    assert streams.read_policy() is None


def test_a_trainer_does_not_start_with_an_address_that_waiting_does_not_mend(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_address: Callable[[], str]
) -> None:
    fix = "check that its bucket or folder exists"
    store.connect(uri=f"s3://{BUCKET}/sub/")
    assert fsspec.filesystem("s3").find(f"s3://{BUCKET}/") == []  # what it writes to find out is deleted
    with pytest.raises(UserError, match=rf"^trainer\.publish\.uri cannot be used: s3://absent/run: .*: {fix}$"):
        store.connect(uri="s3://absent")
    with pytest.raises(UserError, match=r"s3://Not_A_Bucket!/run: .*: give another address$"):
        store.connect(uri="s3://Not_A_Bucket!")
    with serve_s3(free_address().rpartition(":")[2], tmp_path / "strict", authenticate=True) as environment:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", environment["AWS_ENDPOINT_URL_S3"])
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        with pytest.raises(UserError, match=rf"{ROOT}: .*: check the credentials for this address$"):
            store.connect()


def test_a_trainer_that_starts_before_the_store_waits_for_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forage_runtime.retries._RETRY_INTERVAL_S", 0.05)
    store.end()
    starting = threading.Thread(target=store.connect)
    starting.start()
    assert "check the endpoint" in await_wait()["detail"]
    store.start()
    starting.join(WAIT_S)
    assert not starting.is_alive()


def test_an_address_that_no_file_system_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.publish\.uri = 'nowhere://x' cannot be used"):
        PolicyStore(tmp_path / "policies", "nowhere://x", "run", StorageRetry(Stop(), Health()))


def await_wait() -> dict[str, Any]:
    def find() -> list[dict[str, Any]]:
        return [wait for wait in list_waits("trainer") if wait["what"] == "the storage of policies"]

    return wait_until(find, "a wait for the storage")[0]
