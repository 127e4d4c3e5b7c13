"""Published policies: whole folders, checksummed, announced under one epoch, deleted once no replica serves them."""

from __future__ import annotations

import copy
import errno
import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from key_pairs import make_keys, make_signatures
from safetensors import safe_open
from safetensors.torch import load_file
from trainer_parts import write_model
from waiting import WAIT_S

from forage_proto.v1.trajectory_pb2 import Replica
from forage_queue.streams.client import StreamClient
from forage_runtime.errors import DiskFullError, FencedError
from forage_runtime.retries import Retries
from forage_runtime.security.signatures import Purpose
from forage_runtime.settings import PublishSettings, RedisSettings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_weights.announcement import describe_announcement
from forage_weights.digests import compute_digest
from forage_weights.folders import SIGNED, open_whole
from forage_weights.signed_folder import verify_published
from forage_weights.trainer.model_files import (
    Adapter,
    digest_safetensors,
    split_shards,
    write_model_folder,
    write_safetensors,
)
from forage_weights.trainer.publisher import KEEP_NEWEST, PolicyStore, Publisher


@pytest.fixture
def streams(redis_server: RedisSettings) -> StreamClient:
    return StreamClient(redis_server, "publish", WAIT_S)


def connect(source: Path, target: Path, streams: StreamClient, **publish: Any) -> Publisher:
    settings, retries = PublishSettings(**publish), Retries(Stop(), Health())
    store = PolicyStore(target, settings.uri, "run", retries.storage)
    return Publisher(store, source, streams, settings, retries)


def build_publisher(tmp_path: Path, streams: StreamClient, epoch: int, **publish: Any) -> Publisher:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"architectures": ["X"], "torch_dtype": "bfloat16"}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"the initial weights, not to be copied")
    own = copy.copy(streams)
    own.epoch = epoch
    return connect(model, tmp_path / "policies", own, **publish)


def test_a_published_policy_is_a_model_folder_with_its_checksum(tmp_path: Path, streams: StreamClient) -> None:
    policy = build_publisher(tmp_path, streams, 3).publish(7, {"w": torch.arange(4.0)})
    folder = Path(policy.uri)
    assert folder.name == "v7-e3"
    assert json.loads((folder / "config.json").read_text()) == {"architectures": ["X"], "dtype": "float32"}
    assert (folder / "tokenizer.json").exists()
    assert load_file(folder / "model.safetensors")["w"].tolist() == [0, 1, 2, 3]
    assert policy.digest == compute_digest(folder / "model.safetensors")
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    size = (folder / "model.safetensors").stat().st_size
    assert [(f.name, f.digest, f.bytes) for f in policy.files] == [("model.safetensors", policy.digest, size)]
    assert streams.read_policy() == policy


def test_an_adapter_is_published_alone(tmp_path: Path, streams: StreamClient) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    adapter = Adapter({name: torch.arange(4.0)}, {"r": 1, "lora_alpha": 2})
    policy = build_publisher(tmp_path, streams, 3).publish(7, adapter)
    folder = Path(policy.uri)
    assert policy.adapter
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert {f.name: (f.digest, f.bytes) for f in policy.files} == {
        file.name: (compute_digest(file), file.stat().st_size) for file in folder.iterdir()
    }
    assert json.loads((folder / "adapter_config.json").read_text()) == adapter.config
    assert torch.equal(load_file(folder / "adapter_model.safetensors")[name], adapter.tensors[name])


def test_weights_above_the_limit_are_shards_with_an_index_that_transformers_reads(
    tmp_path: Path, streams: StreamClient
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "real"), dtype=torch.bfloat16)
    weights = {name: w for name, w in model.state_dict().items() if name != "lm_head.weight"}
    source = connect(tmp_path / "real", tmp_path / "policies", streams, shard_bytes=20_000)
    policy = source.publish(7, weights)
    folder = Path(policy.uri)
    written = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in written] == [
        f"model-{n:05}-of-{len(written):05}.safetensors" for n in range(1, len(written) + 1)
    ]
    assert len(written) > 2
    assert [(f.name, f.digest, f.bytes) for f in policy.files] == [
        (file.name, compute_digest(file), file.stat().st_size) for file in written
    ]
    held = [set(load_file(file)) for file in written]
    assert set().union(*held) == set(weights)
    assert sum(len(names) for names in held) == len(weights)
    assert all(file.stat().st_size < 25_000 for file in written)
    result = AutoModelForCausalLM.from_pretrained(folder)
    assert result.dtype == torch.bfloat16
    for name, expected in model.state_dict().items():
        assert torch.equal(result.state_dict()[name], expected)


def test_shards_are_split_in_order_and_only_a_single_tensor_may_exceed_the_limit() -> None:
    assert split_shards({"a": 3, "b": 3, "c": 5, "d": 11, "e": 1, "f": 9}, 10) == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert split_shards({"a": 11}, 10) == [["a"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_reads_back_what_was_written_and_the_digest_is_that_of_the_file(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    weights = {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "odd": torch.randn(3),
        "transposed": torch.randn(5, 7).T,
        "several pieces": torch.nn.Parameter(torch.randn(3, 1_000_001)),
    }
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    result = write_safetensors(tmp_path / "w", weights)
    assert result == compute_digest(tmp_path / "w")
    assert digest_safetensors(weights) == (result, (tmp_path / "w").stat().st_size)
    with safe_open(tmp_path / "w", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(weights)
        for name, tensor in weights.items():
            read = file.get_tensor(name)
            assert (read.dtype, read.shape) == (dtype, tensor.shape)
            assert torch.equal(read, tensor)


def test_an_unsupported_dtype_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"table is of torch\.complex64: expected one of torch\.float32"):
        write_safetensors(tmp_path / "w", {"table": torch.zeros(2, dtype=torch.complex64)})


def test_a_failed_write_raises_the_disks_error(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as result:
            write_model_folder(tmp_path / "out", model, {"w": torch.zeros(100_000)}, 2**30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert result.value.errno == errno.EFBIG


def test_a_full_disk_is_named_with_its_free_space(
    tmp_path: Path, streams: StreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = build_publisher(tmp_path, streams, 1)
    monkeypatch.setattr("forage_weights.trainer.publisher.write_model_folder", raise_full)
    monkeypatch.setattr("forage_runtime.retries.DISK_PATIENCE_S", -1.0)
    with pytest.raises(DiskFullError, match=r"policies/v3-e1 cannot be written: its disk has \d+ bytes free"):
        source.publish(3, {"w": torch.zeros(1)})
    assert list((tmp_path / "policies").iterdir()) == []
    assert streams.read_policy() is None


def test_an_older_trainer_is_fenced(tmp_path: Path, streams: StreamClient) -> None:
    old, new = build_publisher(tmp_path, streams, 1), build_publisher(tmp_path, streams, 2)
    old.publish(0, {"w": torch.zeros(1)})
    announced = new.publish(0, {"w": torch.zeros(1)})
    with pytest.raises(FencedError, match=r"taken over this run \(epoch 2\)"):
        old.publish(1, {"w": torch.ones(1)})
    assert streams.read_policy() == announced


def test_old_folders_are_deleted_unless_a_replica_serves_them(tmp_path: Path, streams: StreamClient) -> None:
    source = build_publisher(tmp_path, streams, 1)
    served = source.publish(0, {"w": torch.zeros(1)})
    streams.acknowledge_policy("replica", Replica(serving=served))
    for version in range(1, KEEP_NEWEST + 3):
        source.publish(version, {"w": torch.zeros(1)})
    newest = [f"v{version}-e1" for version in range(3, KEEP_NEWEST + 3)]
    assert sorted(p.name for p in (tmp_path / "policies").iterdir()) == sorted(["v0-e1", *newest])


def test_a_damaged_policy_that_an_engine_may_lack_is_noticed(tmp_path: Path, streams: StreamClient) -> None:
    publisher = build_publisher(tmp_path, streams, 3)
    assert not publisher.is_damaged(), "nothing was published"
    policy = publisher.publish(7, {"w": torch.arange(4.0)})
    assert not publisher.is_damaged()
    file = Path(policy.uri) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 4
    file.write_bytes(content)
    streams.acknowledge_policy("engine", Replica(serving=policy))
    assert not publisher.is_damaged(), "an engine has it in memory"
    streams.acknowledge_policy("late engine", Replica(refused=policy, reason="no such file"))
    assert publisher.is_damaged(), "another one came too late"
    streams.acknowledge_policy("late engine", Replica(serving=policy))
    streams.acknowledge_policy("engine", Replica(serving=publisher.publish(8, {"w": torch.arange(4.0)})))
    (tmp_path / "policies/v8-e3/model.safetensors").unlink()
    streams._redis.delete(streams.key("alive"))
    assert publisher.is_damaged()
    again = publisher.publish(8, {"w": torch.arange(4.0)})
    assert not publisher.is_damaged()
    assert streams.read_policy() == again


def test_what_is_published_is_signed_file_by_file_and_recorded(tmp_path: Path, streams: StreamClient) -> None:
    publisher = build_publisher(tmp_path, streams, 3)
    signatures, audit = make_signatures(tmp_path / "keys", tmp_path.name), tmp_path / "audit.jsonl"
    publisher._signatures, publisher._audit_file = signatures, audit
    policies = [publisher.publish(1, {"w": torch.arange(9000.0)})]
    policies.append(publisher.publish(2, {"w": torch.arange(9000.0).index_fill(0, torch.tensor([7]), 1.0)}))
    policies.append(publisher.publish(3, Adapter({"a": torch.arange(4.0)}, {"r": 1, "lora_alpha": 2})))
    assert [bool(policy.parts) for policy in policies] == [False, True, False]
    for policy in policies:
        described = describe_announcement(policy)
        key = signatures.require(Purpose.ANNOUNCEMENT, described, policy.signature, "it")
        folder = Path(policy.uri)
        signed = json.loads((folder / SIGNED).read_text())
        assert {file.name for file in folder.iterdir()} == {*signed["files"], SIGNED}
        whole = folder if policy.adapter else open_whole(folder)
        assert key == signatures.key_id == verify_published(folder, whole, make_keys(tmp_path / "keys"))
    assert streams.read_policy() == policies[-1]
    acts = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(act["act"], act["actor"], act["version"], act["signed_by"]) for act in acts] == [
        ("publish_policy", "trainer", version, signatures.key_id) for version in (1, 2, 3)
    ]
