"""Policies that are published as what a step has changed: to the bit what a whole one would be."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_parts import write_model
from waiting import WAIT_S

from forage_proto.v1.trajectory_pb2 import Policy, Replica
from forage_queue.streams.client import StreamClient
from forage_runtime.errors import DataError, FencedError
from forage_runtime.retries import Retries
from forage_runtime.settings import PublishSettings, RedisSettings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_weights.announcement import list_parts, verify_files
from forage_weights.folders import make_whole
from forage_weights.trainer.model_files import Adapter
from forage_weights.trainer.publisher import DELTA, KEEP_NEWEST, PolicyStore, Publisher, measure_published

Weights = dict[str, torch.Tensor]


@pytest.fixture
def streams(redis_server: RedisSettings) -> StreamClient:
    return StreamClient(redis_server, "publish", WAIT_S)


@pytest.fixture
def connect(tmp_path: Path, streams: StreamClient) -> Callable[..., Publisher]:
    """Start a trainer's publisher, whose policies are in several files."""
    write_model(tmp_path / "model")

    def build(epoch: int = 1, **named: Any) -> Publisher:
        settings = PublishSettings(**({"shard_bytes": 50_000} | named))
        own, retries = copy.copy(streams), Retries(Stop(), Health())
        own.epoch = epoch
        store = PolicyStore(tmp_path / "policies", settings.uri, "run", retries.storage)
        return Publisher(store, tmp_path / "model", own, settings, retries)

    return build


def make_weights(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Weights:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (300, 64), "layer": (64, 256), "norm": (64,), "empty": (0, 4), "scalar": ()}
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def change(weights: Weights, seed: int, share: float = 0.01) -> Weights:
    """What an optimizer step leaves: new tensors, of whose elements a share has changed."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(w.shape, generator=draw) < share, w * 1.01 + 1e-3, w).to(w.dtype)
        for name, w in weights.items()
    }


def list_folders(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "policies").iterdir()}


def assert_holds(policy: Policy, weights: Weights, target: Path) -> None:
    """That the folders of a policy hold exactly the weights, in files with the digests announced."""
    folder = Path(policy.uri)
    if policy.parts:
        make_whole(folder, target)
        folder = target
    verify_files(policy, folder)
    held: Weights = {}
    for file in policy.files:
        held |= load_file(folder / file.name)
    assert held.keys() == weights.keys()
    for name, w in weights.items():
        assert (held[name].dtype, held[name].shape) == (w.dtype, w.shape)
        assert held[name].reshape(-1).view(torch.uint8).equal(w.reshape(-1).view(torch.uint8)), name
    assert (folder / "tokenizer.json").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_is_published_as_a_delta_that_makes_the_same_files(
    connect: Callable[..., Publisher], streams: StreamClient, tmp_path: Path, dtype: torch.dtype
) -> None:
    publisher, weights = connect(), make_weights(dtype)
    policies, held = [publisher.publish(0, weights)], [weights]
    for version in range(1, 4):
        weights = change(weights, version)
        policies.append(publisher.publish(version, weights))
        held.append(weights)
        assert streams.read_policy() == policies[-1]
    whole = connect(2, full_every=1).publish(3, weights)
    assert [len(policy.parts) for policy in policies] == [0, 2, 3, 4]
    assert not whole.parts
    assert [(f.name, f.digest, f.bytes) for f in policies[-1].files] == [
        (f.name, f.digest, f.bytes) for f in whole.files
    ]
    assert len(whole.files) > 1
    for number, (policy, expected) in enumerate(zip(policies, held, strict=True)):
        assert_holds(policy, expected, tmp_path / f"whole-{number}")
    for before, policy in pairwise(policies[1:]):
        parts = list_parts(policy)
        assert parts[:-1] == list_parts(before)
        assert (parts[-1].uri, list(parts[-1].files)) == (policy.uri, [DELTA])
        assert measure_published(policy) < measure_published(whole) / 20
    assert {file.name for file in Path(policies[-1].uri).iterdir()} == {DELTA, "policy.json"}


def test_weights_that_have_not_changed_and_bits_that_are_no_numbers_are_deltas_too(
    connect: Callable[..., Publisher], tmp_path: Path
) -> None:
    publisher, weights = connect(), make_weights()
    publisher.publish(0, weights)
    assert_holds(publisher.publish(1, {name: w.clone() for name, w in weights.items()}), weights, tmp_path / "1")
    odd = {name: w.clone() for name, w in weights.items()}
    odd["norm"][:4] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    policy = publisher.publish(2, odd)
    assert policy.parts
    assert_holds(policy, odd, tmp_path / "2")


def test_a_whole_policy_follows_where_a_delta_is_not_worth_it(
    connect: Callable[..., Publisher], tmp_path: Path
) -> None:
    publisher, weights = connect(full_every=3), make_weights()
    published = [publisher.publish(version, change(weights, version)) for version in range(7)]
    assert [len(policy.parts) for policy in published] == [0, 2, 3, 0, 2, 3, 0]
    publisher = connect(2)
    assert not publisher.publish(7, weights).parts, "after every start"
    dense = make_weights(seed=1)
    policy = publisher.publish(8, dense)
    assert not policy.parts, "dense"
    assert_holds(policy, dense, tmp_path / "dense")
    assert publisher.publish(9, change(dense, 9)).parts
    assert not publisher.publish(10, make_weights(torch.float32)).parts, "of another type"
    assert not publisher.publish(11, change(make_weights(torch.float32), 11), whole=True).parts, "asked for"
    assert not connect(4, full_every=1).publish(12, weights).parts


def test_deltas_together_are_smaller_than_a_whole_policy(connect: Callable[..., Publisher]) -> None:
    publisher, weights = connect(full_every=1000), make_weights()
    since, wholes = 0, 0
    for version in range(30):
        weights = change(weights, version, share=0.4)
        policy = publisher.publish(version, weights)
        whole = sum(file.bytes for file in policy.files)
        since = since + measure_published(policy) if policy.parts else 0
        wholes += not policy.parts
        assert since <= whole
    assert 2 < wholes < 15


def test_adapters_are_published_whole(connect: Callable[..., Publisher]) -> None:
    publisher = connect()
    adapter = Adapter({"lora_A": torch.zeros(400, 100)}, {"r": 1})
    assert [len(publisher.publish(version, adapter).parts) for version in range(2)] == [0, 0]


def test_a_failed_announcement_leaves_the_base(connect: Callable[..., Publisher], tmp_path: Path) -> None:
    """The next delta is relative to what was announced, not to what was written."""
    publisher, weights = connect(), make_weights()
    publisher.publish(0, weights)
    announce = publisher._streams.publish

    def fail(policy: Policy) -> None:
        raise RuntimeError("no announcement")

    publisher._streams.publish = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no announcement"):
        publisher.publish(1, change(weights, 1))
    publisher._streams.publish = announce  # type: ignore[method-assign]
    weights = change(weights, 2)
    policy = publisher.publish(1, weights)
    assert len(policy.parts) == 2
    assert_holds(policy, weights, tmp_path / "1")


def test_folders_that_a_newest_version_or_a_replica_needs_stay(
    connect: Callable[..., Publisher], streams: StreamClient, tmp_path: Path
) -> None:
    publisher, weights = connect(full_every=4), make_weights()
    served = [publisher.publish(version, change(weights, version)) for version in range(3)][-1]
    streams.acknowledge_policy("replica", Replica(serving=served))
    for version in range(3, 14):
        publisher.publish(version, change(weights, version))
    # 12 is whole; 11 needs 8, 9 and 10, the replica's version 2 needs 0 and 1.
    assert list_folders(tmp_path) == {f"v{version}-e1" for version in (0, 1, 2, 8, 9, 10, 11, 12, 13)}
    streams.acknowledge_policy("replica", Replica(serving=publisher.publish(14, weights)))
    publisher = connect(2)
    for version in range(15, 15 + KEEP_NEWEST):
        publisher.publish(version, weights)
    assert list_folders(tmp_path) == {"v12-e1", "v13-e1", "v14-e1", "v15-e2", "v16-e2", "v17-e2"}
    streams.acknowledge_policy("replica", Replica(serving=publisher.publish(18, weights)))
    publisher.publish(19, weights)
    assert list_folders(tmp_path) == {f"v{version}-e2" for version in range(15, 20)}


@pytest.mark.parametrize("place", ["v0-e1/model-00001-of-00002.safetensors", f"v1-e1/{DELTA}", f"v2-e1/{DELTA}"])
def test_a_damaged_part_is_noticed_and_a_whole_policy_takes_its_place(
    connect: Callable[..., Publisher], streams: StreamClient, tmp_path: Path, place: str
) -> None:
    publisher, weights = connect(), make_weights()
    for version in range(3):
        weights = change(weights, version)
        policy = publisher.publish(version, weights)
    assert len(policy.parts) == 3
    assert not publisher.is_damaged()
    file = tmp_path / "policies" / place
    content = bytearray(file.read_bytes())
    content[-1] ^= 4
    file.write_bytes(content)
    with pytest.raises(DataError, match="does not have the digest that was announced"):
        make_whole(Path(policy.uri), tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    assert publisher.is_damaged()
    again = publisher.publish(2, weights, whole=True)
    assert not publisher.is_damaged()
    assert streams.read_policy() == again
    assert_holds(again, weights, tmp_path / "whole")
    assert publisher.publish(3, weights).parts, "deltas go on from there"


def test_a_delta_whose_whole_policy_was_deleted_is_refused_with_the_remedy(
    connect: Callable[..., Publisher], tmp_path: Path
) -> None:
    publisher, weights = connect(), make_weights()
    publisher.publish(0, weights)
    policy = publisher.publish(1, change(weights, 1))
    shutil.rmtree(tmp_path / "policies/v0-e1")
    with pytest.raises(DataError, match=r"v1-e1 holds what has changed since v0-e1, .*forage trainer export"):
        make_whole(Path(policy.uri), tmp_path / "whole")
    assert json.loads((Path(policy.uri) / "policy.json").read_text())["version"] == "1"


@pytest.mark.parametrize("content", ["", "{", '{"version": "x"}'])
def test_a_damaged_description_of_an_old_version_does_not_hold_up_the_run(
    connect: Callable[..., Publisher], streams: StreamClient, tmp_path: Path, content: str
) -> None:
    """Engines read the announcement; the description beside a delta is for whoever comes later."""
    publisher, weights = connect(full_every=3), make_weights()
    for version in range(2):
        publisher.publish(version, change(weights, version))
    (tmp_path / "policies/v1-e1/policy.json").write_text(content)
    for version in range(2, 7):
        policy = publisher.publish(version, change(weights, version))
        assert streams.read_policy() == policy
    assert list_folders(tmp_path) == {f"v{version}-e1" for version in (3, 4, 5, 6)}


def test_a_relative_address_is_the_same_for_engines_with_another_working_directory(
    connect: Callable[..., Publisher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    policy = connect(uri="copies/").publish(0, make_weights())
    assert policy.uri == str(tmp_path / "work/copies/run/v0-e1")
    verify_files(policy, Path(policy.uri))


def test_a_replaced_trainer_whose_folder_is_gone_is_fenced(
    connect: Callable[..., Publisher], streams: StreamClient, tmp_path: Path
) -> None:
    """Its successor deletes what it has written before the copies are complete."""
    streams.acquire_epoch()
    publisher = connect(1, uri=f"memory://{tmp_path.name}")
    write = publisher._write

    def write_and_lose(*args: Any) -> Policy:
        policy = write(*args)
        streams.acquire_epoch()
        shutil.rmtree(tmp_path / "policies/v0-e1")
        return policy

    publisher._write = write_and_lose  # type: ignore[method-assign]
    with pytest.raises(FencedError):
        publisher.publish(0, make_weights())


def test_a_place_where_nothing_can_be_written_is_named(connect: Callable[..., Publisher], tmp_path: Path) -> None:
    publisher, weights = connect(), make_weights()
    publisher.publish(0, weights)
    policy = publisher.publish(1, change(weights, 1))
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be made whole: .*file"):
        make_whole(Path(policy.uri), tmp_path / "file/whole")


def test_a_policy_is_published_beside_other_work(connect: Callable[..., Publisher], streams: StreamClient) -> None:
    publisher, weights = connect(), make_weights()
    assert publisher.wait() is None
    publisher.begin(0, weights)
    with pytest.raises(RuntimeError, match="was not waited for"):
        publisher.begin(1, weights)
    assert publisher.wait() == streams.read_policy()
    assert publisher.wait() is None
