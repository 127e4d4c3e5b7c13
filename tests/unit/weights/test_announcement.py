"""Checks of what an announcement lists, and the sentences of their refusals."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile
from forage_weights.announcement import PolicyError, list_files, verify_files
from forage_weights.digests import compute_digest


def announce(folder: Path, names: list[str]) -> Policy:
    files = [
        PolicyFile(name=name, digest=compute_digest(folder / name), bytes=(folder / name).stat().st_size)
        for name in names
    ]
    return Policy(version=1, epoch=1, uri=str(folder), files=files)


def test_files_are_verified_one_by_one_in_the_announced_order(tmp_path: Path) -> None:
    names = [f"{number}.safetensors" for number in (3, 1, 2)]
    for name in names:
        (tmp_path / name).write_text(name)
    policy = announce(tmp_path, names)
    assert verify_files(policy, tmp_path) == [tmp_path / name for name in names]
    (tmp_path / names[1]).write_text(names[0])
    with pytest.raises(PolicyError, match=r"1\.safetensors does not have the digest that was announced"):
        verify_files(policy, tmp_path)
    (tmp_path / names[1]).write_text("x")
    with pytest.raises(PolicyError, match=r"1\.safetensors has 1 bytes, announced were 13"):
        verify_files(policy, tmp_path)
    (tmp_path / names[1]).unlink()
    with pytest.raises(PolicyError, match=r"1\.safetensors cannot be read .*is the run's folder shared"):
        verify_files(policy, tmp_path)


def test_one_file_may_be_announced_by_its_digest_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    policy = Policy(uri=str(tmp_path), digest=hashlib.sha256(b"weights").hexdigest())
    assert verify_files(policy, tmp_path) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("name", ["", "..", ".lock", "../model.safetensors", "/etc/passwd", "a/b", "a\\b", "a\0"])
def test_a_file_outside_the_folder_cannot_be_announced(name: str) -> None:
    with pytest.raises(PolicyError, match="expected a plain name"):
        list_files(Policy(uri="/", files=[PolicyFile(name=name, digest="0" * 64)]))


@pytest.mark.parametrize("digest", ["", "abc", "G" * 64, "md5:" + 64 * "0"])
def test_a_malformed_digest_is_refused(digest: str) -> None:
    with pytest.raises(PolicyError, match="expected blake3: and 64 hex digits"):
        list_files(Policy(digest=digest))


def test_a_file_is_listed_once() -> None:
    file = PolicyFile(name="model.safetensors", digest="0" * 64)
    with pytest.raises(PolicyError, match=r"lists model\.safetensors twice"):
        list_files(Policy(files=[file, file]))
