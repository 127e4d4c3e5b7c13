"""A policy that is published without a trainer."""

from __future__ import annotations

import json
from pathlib import Path

from model_folders import write_smallest_model, write_weights

from forage_cli.local.serving import publish
from forage_common.settings import RedisSettings, RunSettings, Settings
from forage_common.streams.client import StreamClient
from forage_policies.digests import compute_digest


def test_every_shard_of_a_policy_is_published(redis_server: RedisSettings, tmp_path: Path) -> None:
    folder = write_smallest_model(tmp_path)
    (folder / "model.safetensors").unlink()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for tensor, name in names.items():
        write_weights(folder / name, {tensor: [1]})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    settings = Settings(redis=redis_server, run=RunSettings(id="shards"))
    first, policy = publish(settings, folder), publish(settings, folder)
    assert [(file.name, file.bytes) for file in policy.files] == [
        (name, (folder / name).stat().st_size) for name in names.values()
    ]
    assert policy.files[1].digest == compute_digest(folder / names["b"])
    assert policy.uri == str(folder)
    assert policy.epoch == first.epoch + 1, "the later one replaces the earlier"
    assert StreamClient(redis_server, "shards").read_policy() == policy
