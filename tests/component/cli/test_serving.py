"""A policy that is published without a trainer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from forage_command import RunForage, run_forage
from key_pairs import make_keys
from model_folders import write_smallest_model, write_weights
from rich.console import Console

from forage_cli.local.serving import ensure_services, publish
from forage_cli.local.stack import Program
from forage_queue.streams.client import StreamClient
from forage_runtime.errors import DataError, SettingsError
from forage_runtime.settings import RedisSettings, RunSettings, Settings
from forage_weights.announcement import Admission
from forage_weights.digests import compute_digest

__all__ = ["run_forage"]


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


def test_a_policy_that_engines_would_refuse_is_not_published(redis_server: RedisSettings, tmp_path: Path) -> None:
    folder, audit = write_smallest_model(tmp_path), tmp_path / "audit.jsonl"
    settings = Settings(redis=redis_server, run=RunSettings(id="signed", dir=tmp_path))
    security = make_keys(tmp_path / "keys", audit_file=audit)
    settings = settings.model_copy(
        update={"security": security, "model": settings.model.model_copy(update={"path": folder})}
    )
    policy = publish(settings, folder)
    Admission(settings).check(policy)
    (act,) = (json.loads(line) for line in audit.read_text().splitlines())
    assert (act["act"], act["run"], act["uri"]) == ("publish_policy", "signed", str(folder))
    assert act["actor"].startswith("user ")
    blind = security.model_copy(update={"signing_key_file": None})
    with pytest.raises(SettingsError, match=r"this command has no security\.signing_key_file"):
        publish(settings.model_copy(update={"security": blind}), folder)
    assert StreamClient(redis_server, "signed").read_policy() == policy
    changed = shutil.copytree(folder, tmp_path / "run/policies/v1-e1")
    with pytest.raises(DataError, match="is not signed"):  # before any service is started
        ensure_services(settings, Console(), [Program.ROLLOUT], changed).__enter__()


def test_a_question_after_a_run_of_adapters_is_not_answered_by_another_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_forage: RunForage
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/lora/policies/v9-e1"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (tmp_path / "runs/latest").symlink_to("lora")
    asked = run_forage("ask", "Why?", "--base-port", "1")  # nobody listens there
    assert asked.code == 2
    assert "runs/latest/policies/v9-e1 holds a LoRA adapter" in asked.stderr
    assert "'forage trainer export runs/latest FOLDER'" in asked.stderr
