"""Checks of published policies, and the sentences of their refusals."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from model_folders import write_smallest_model, write_weights

from forage_common.files.model_folder import read_model_shapes, read_safetensors_header
from forage_common.v1.trajectory_pb2 import Policy, PolicyFile
from forage_rollout.weights.policy import (
    PolicyError,
    format_label,
    is_newer,
    list_files,
    parse_label,
    read_tensor_shapes,
    verify_files,
    verify_shapes,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_smallest_model(tmp_path)


def make_policy(folder: Path, version: int = 1, epoch: int = 1) -> Policy:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return Policy(version=version, epoch=epoch, uri=str(folder), digest=digest)


def make_sharded_policy(folder: Path, names: list[str]) -> Policy:
    files = []
    for name in names:
        content = (folder / name).read_bytes()
        files.append(PolicyFile(name=name, digest=hashlib.sha256(content).hexdigest(), bytes=len(content)))
    return Policy(version=1, epoch=1, uri=str(folder), files=files)


def verify_policy(policy: Policy, expected: dict[str, tuple[int, ...]]) -> list[Path]:
    """Check a policy in a local folder as a transport does."""
    files = verify_files(policy, Path(policy.uri))
    verify_shapes(policy, read_tensor_shapes(policy, files), expected)
    return files


def test_a_policy_is_refused_unless_its_file_has_the_announced_digest_and_shapes(folder: Path) -> None:
    expected = read_model_shapes(folder)
    policy = make_policy(folder)
    assert verify_policy(policy, expected) == [folder / "model.safetensors"]
    write_weights(folder / "model.safetensors", {"embed": [4, 2], "norm": [2], "extra": [1]})
    with pytest.raises(PolicyError, match="digest"):
        verify_policy(policy, expected)
    with pytest.raises(PolicyError, match="extra and 0 more differ"):
        verify_policy(make_policy(folder), expected)
    shutil.rmtree(folder)
    with pytest.raises(PolicyError, match="cannot be read"):
        verify_policy(policy, expected)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    expected = read_model_shapes(folder)
    whole, file = make_policy(folder), folder / "model.safetensors"
    listed = make_sharded_policy(folder, ["model.safetensors"])
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(PolicyError, match="has digest"):
        verify_policy(whole, expected)
    with pytest.raises(PolicyError, match=r"has \d+ bytes, announced were \d+"):
        verify_policy(listed, expected)
    with pytest.raises(PolicyError, match="but the header describes"):
        verify_policy(make_policy(folder), expected)


def test_a_tied_head_may_be_in_the_file_or_not(folder: Path) -> None:
    expected = read_model_shapes(folder)
    write_weights(folder / "model.safetensors", {"embed": [4, 2], "norm": [2], "lm_head.weight": [4, 2]})
    verify_policy(make_policy(folder), expected)
    verify_policy(make_policy(folder), expected | {"lm_head.weight": (4, 2)})


def test_shards_are_verified_one_by_one_and_must_hold_the_whole_model(folder: Path) -> None:
    expected = read_model_shapes(folder)
    write_weights(folder / "one.safetensors", {"embed": [4, 2]})
    write_weights(folder / "two.safetensors", {"norm": [2]})
    names = ["one.safetensors", "two.safetensors"]
    assert verify_policy(make_sharded_policy(folder, names), expected) == [folder / name for name in names]
    with pytest.raises(PolicyError, match="norm and 0 more differ"):
        verify_policy(make_sharded_policy(folder, names[:1]), expected)
    policy = make_sharded_policy(folder, names)
    write_weights(folder / "two.safetensors", {"more": [2]})
    with pytest.raises(PolicyError, match=r"two\.safetensors has digest"):
        verify_policy(policy, expected)
    write_weights(folder / "two.safetensors", {"norm": [2], "embed": [4, 2]})
    with pytest.raises(PolicyError, match="holds embed a second time"):
        verify_policy(make_sharded_policy(folder, names), expected)


@pytest.mark.parametrize("name", ["", "..", "../model.safetensors", "/etc/passwd", "a/b", "a\\b"])
def test_a_file_outside_the_folder_cannot_be_announced(name: str) -> None:
    policy = Policy(uri="/", files=[PolicyFile(name=name, digest="0" * 64)])
    with pytest.raises(PolicyError, match="expected a plain name"):
        list_files(policy)


@pytest.mark.parametrize("digest", ["", "abc", "G" * 64])
def test_a_digest_is_a_sha256(digest: str) -> None:
    with pytest.raises(PolicyError, match="expected 64 hex digits"):
        list_files(Policy(digest=digest))


@pytest.mark.parametrize(
    ("candidate", "serving", "newer"),
    [
        ((1, 0), None, True),
        ((1, 3), (1, 2), True),
        ((1, 2), (1, 2), False),
        ((1, 9), (2, 1), False),
        ((2, 1), (1, 9), True),
    ],
)
def test_a_later_epoch_wins_and_an_earlier_one_never_does(
    candidate: tuple[int, int], serving: tuple[int, int] | None, newer: bool
) -> None:
    served = None if serving is None else Policy(epoch=serving[0], version=serving[1])
    assert is_newer(Policy(epoch=candidate[0], version=candidate[1]), served) == newer


def test_a_version_string_is_read_back() -> None:
    assert parse_label(format_label(Policy(version=7, epoch=3))) == (7, 3)
    assert parse_label("default") == (0, 0)


def test_a_header_may_not_claim_more_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "w"
    file.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="no safetensors header"):
        read_safetensors_header(file)
