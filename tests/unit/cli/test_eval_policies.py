"""Forms of --policy, and which policies one engine can serve."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from key_pairs import make_keys, make_signatures

from forage_cli.evaluation.policies import (
    Kind,
    check_labels,
    find_untrained,
    group_by_engine,
    hash_model_folder,
    resolve_policy,
    verify_signatures,
)
from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile, PolicyPart
from forage_runtime.errors import DataError, UserError
from forage_runtime.settings import Settings
from forage_weights.delta import encode_delta, patch_files
from forage_weights.digests import compute_content, compute_digest
from forage_weights.folders import find_newest, write_description
from forage_weights.signed_folder import sign_folder
from forage_weights.tensors import open_tensors


@pytest.fixture
def run(tmp_path: Path, repository: Path) -> Path:
    """A run that has published versions 3, 10 and, under a second trainer, 10 and 11; 10 was best."""
    folder = tmp_path / "my-run"
    for name in ("v3-e1", "v10-e1", "v10-e2", "v11-e2"):
        shutil.copytree(repository / "models/tiny-policy", folder / "policies" / name)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/best").write_text("step_10\n")
    settings = Settings()
    model = settings.model.model_copy(update={"path": repository / "models/tiny-policy"})
    (folder / "settings.yaml").write_text(settings.model_copy(update={"model": model}).to_yaml())
    return folder


@pytest.mark.parametrize(
    ("version", "folder", "label"),
    [
        ("latest", "v11-e2", "my-run@11"),
        ("best", "v10-e2", "my-run@10"),
        ("10", "v10-e2", "my-run@10"),
        ("3", "v3-e1", "my-run@3"),
    ],
)
def test_a_runs_versions_are_found(run: Path, version: str, folder: str, label: str) -> None:
    policy = resolve_policy(f"{run}@{version}")
    assert (policy.kind, policy.folder, policy.label) == (Kind.FOLDER, run / "policies" / folder, label)
    assert resolve_policy(f"after={run}@{version}").label == "after"


def test_a_folder_with_digits_of_another_script_is_no_version(run: Path) -> None:
    newest = resolve_policy(f"{run}@latest").folder
    shutil.copytree(run / "policies" / str(newest and newest.name), run / "policies/v９９-e9")
    assert resolve_policy(f"{run}@latest").folder == newest


def test_a_missing_version_of_a_run_names_the_export_command(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"policy 4 \(available versions: 3, 10, 11\).*forage trainer export"):
        resolve_policy(f"{run}@4")
    shutil.rmtree(run / "policies/v10-e1")
    shutil.rmtree(run / "policies/v10-e2")
    with pytest.raises(DataError, match="FOLDER --best"):
        resolve_policy(f"{run}@best")
    (run / "checkpoints/best").unlink()
    with pytest.raises(DataError, match="names no best checkpoint"):
        resolve_policy(f"{run}@best")
    with pytest.raises(UserError, match=r"is a run: say which version, for instance .*my-run@latest"):
        resolve_policy(str(run))
    with pytest.raises(DataError, match="is not a run"):
        resolve_policy(f"{tmp_path}@latest")
    (tmp_path / "weights").mkdir()
    with pytest.raises(DataError, match=r"has no readable config\.json"):
        resolve_policy(str(tmp_path / "weights"))


def publish_delta(whole: Path, name: str) -> Path:
    """Publish a step after the whole policy of a folder, which changes a few elements, as the trainer does."""
    folder, file = whole.with_name(name), whole / "model.safetensors"
    folder.mkdir()
    old = {tensor: one.bits for tensor, one in open_tensors(file).items()}
    new = {tensor: bits.copy() for tensor, bits in old.items()}
    for bits in new.values():
        bits[::97] += 1
    after = shutil.copy(file, folder / "model.safetensors")
    delta = folder / "policy.delta"
    size = encode_delta(old, new, delta, 10**9)
    patch_files(delta, [after])
    digests = [compute_digest(one) for one in (file, after, delta)]
    contents = [compute_content({file.name: digest}) for digest in digests[:2]]
    files = [PolicyFile(name=file.name, digest=digest, bytes=file.stat().st_size) for digest in digests[:2]]
    change = PolicyFile(name=delta.name, digest=digests[2], bytes=size)
    parts = [
        PolicyPart(uri=f"/gone/{whole.name}", files=files[:1], content=contents[0]),
        PolicyPart(uri=f"s3://elsewhere/{name}", files=[change], content=contents[1]),
    ]
    write_description(folder, Policy(version=12, uri=parts[-1].uri, files=files[1:], parts=parts))
    after.rename(folder.parent / "expected.safetensors")
    return folder


def test_a_version_that_was_published_as_a_delta_is_made_whole(run: Path) -> None:
    folder = publish_delta(run / "policies/v11-e2", "v12-e2")
    policy = resolve_policy(f"{run}@latest")
    assert policy.folder == run / "policies/whole-v12-e2"
    assert policy.label == "my-run@12"
    assert filecmp.cmp(policy.folder / "model.safetensors", run / "policies/expected.safetensors", shallow=False)
    assert (policy.folder / "tokenizer.json").exists()
    assert resolve_policy(str(folder)).digest == policy.digest == hash_model_folder(policy.folder)
    assert resolve_policy(str(folder)).label == "v12-e2"


def test_a_delta_whose_whole_policy_is_gone_names_the_export_command(run: Path) -> None:
    publish_delta(run / "policies/v11-e2", "v12-e2")
    shutil.rmtree(run / "policies/v11-e2")
    with pytest.raises(DataError, match=r"v12-e2 holds what has changed since v11-e2.*forage trainer export"):
        resolve_policy(f"{run}@12")
    (run / "policies/v12-e2/policy.json").write_text("{")
    with pytest.raises(DataError, match=r"policy\.json cannot be read"):
        resolve_policy(f"{run}@12")


def publish_adapter(run: Path, name: str) -> Path:
    """A policy as a run with rollout.engine.max_lora_rank publishes it."""
    folder = run / "policies" / name
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def test_the_newest_policy_is_that_of_the_last_epoch_whatever_its_kind_and_its_files_time(run: Path) -> None:
    os.utime(run / "policies/v3-e1", (10**10, 10**10))
    assert find_newest(run) == run / "policies/v11-e2"
    delta = publish_delta(run / "policies/v11-e2", "v12-e2")
    assert find_newest(run) == delta
    assert resolve_policy(f"{run}@latest").folder == run / "policies/whole-v12-e2"
    shutil.copytree(run / "policies/v10-e1", run / "policies/v10-e3")  # the trainer went back to a checkpoint
    assert find_newest(run) == resolve_policy(f"{run}@latest").folder == run / "policies/v10-e3"
    assert resolve_policy(f"{run}@12").folder == run / "policies/whole-v12-e2"
    adapter = publish_adapter(run, "v11-e3")
    assert find_newest(run) == adapter
    assert find_newest(run.parent) is None


def test_an_adapter_names_the_command_that_makes_a_policy_to_serve(run: Path) -> None:
    folder = publish_adapter(run, "v12-e2")
    export = rf"v12-e2 holds a LoRA adapter without its model.*'forage trainer export {run} FOLDER'"
    for text in (f"{run}@latest", f"{run}@12", str(folder)):
        with pytest.raises(DataError, match=export):
            resolve_policy(text)


def test_endpoints_and_the_running_policy_are_resolved() -> None:
    remote = resolve_policy("https://host:8000/v1/")
    assert (remote.kind, remote.url, remote.label) == (Kind.ENDPOINT, "https://host:8000/v1", "host-8000")
    assert resolve_policy("big=http://host/v1").label == "big"
    assert (resolve_policy("running").kind, resolve_policy("now=running").label) == (Kind.RUNNING, "now")


def test_an_endpoints_login_is_in_no_name_and_in_no_error() -> None:
    policy = resolve_policy("http://user:S3cr3t@host:1/v1")
    assert (policy.label, policy.source, policy.url) == (
        "host-1",
        "http://***@host:1/v1",
        "http://user:S3cr3t@host:1/v1",
    )
    with pytest.raises(UserError, match=r"--policy .*not shown.*percent-encode") as error:
        resolve_policy("http://user:p@ss/w#S3cr3t@host:1/v1")
    assert "S3cr3t" not in str(error.value)


def test_the_untrained_policy_is_that_of_the_run(run: Path, repository: Path) -> None:
    trained = resolve_policy(f"{run}@latest")
    policy = find_untrained([trained], None)
    assert (policy.label, policy.folder) == ("untrained", repository / "models/tiny-policy")
    assert find_untrained([trained], run / "policies/v3-e1").folder == run / "policies/v3-e1"
    with pytest.raises(UserError, match="give --untrained FOLDER"):
        find_untrained([resolve_policy("http://host/v1")], None)
    with pytest.raises(UserError, match="two policies are called 'untrained'"):
        check_labels([policy, replace(trained, label="untrained")])


def widen(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1.5}))


def replace_words(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def replace_weights(folder: Path) -> None:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(weights))


@pytest.mark.parametrize(("change", "engines"), [(widen, 2), (replace_words, 2), (replace_weights, 1)])
def test_one_engine_serves_policies_that_differ_only_in_weights(
    run: Path, change: Callable[[Path], None], engines: int
) -> None:
    one, other = resolve_policy(f"{run}@10"), resolve_policy(f"{run}@11")
    assert one.digest == other.digest
    assert other.folder is not None
    change(other.folder)
    assert hash_model_folder(other.folder) != one.digest
    assert len(group_by_engine([one, other])) == engines
    assert (
        len(group_by_engine([one, other, resolve_policy("http://host/v1"), resolve_policy("http://other/v1")]))
        == engines + 2
    )


def test_a_runs_policy_that_was_changed_since_it_was_signed_is_not_evaluated(run: Path, tmp_path: Path) -> None:
    security, folder = make_keys(tmp_path / "keys"), run / "policies/v11-e2"
    policies = [resolve_policy(f"{run}@latest"), resolve_policy("running"), resolve_policy("http://host/v1")]
    with pytest.raises(DataError, match=r"v11-e2 is not signed, and security\.require_signed is set"):
        verify_signatures(policies, security)
    sign_folder(folder, Policy(version=11, epoch=2), make_signatures(tmp_path / "keys", run.name))
    verify_signatures(policies, security)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    with pytest.raises(DataError, match=r"tokenizer\.json was changed since it was signed"):
        verify_signatures([resolve_policy(str(folder))], security)
