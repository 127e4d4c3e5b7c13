"""Published policies: what is refused, and with which sentence."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from model_folders import smallest_model, write_weights

from forage_common.model_folder import model_shapes, read_header
from forage_common.v1.trajectory_pb2 import Policy
from forage_rollout.policy import (
    PolicyError,
    is_newer,
    label,
    parse_label,
    verify,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return smallest_model(tmp_path)


def policy_of(folder: Path, version: int = 1, epoch: int = 1) -> Policy:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return Policy(version=version, epoch=epoch, uri=str(folder), digest=digest)


def test_a_policy_is_served_only_as_it_was_announced(folder: Path) -> None:
    expected = model_shapes(folder)
    policy = policy_of(folder)
    assert verify(policy, expected) == folder / "model.safetensors"
    write_weights(folder / "model.safetensors", {"embed": [4, 2], "norm": [2], "extra": [1]})
    with pytest.raises(PolicyError, match="digest"):
        verify(policy, expected)
    with pytest.raises(PolicyError, match="extra and 0 more differ"):
        verify(policy_of(folder), expected)
    shutil.rmtree(folder)
    with pytest.raises(PolicyError, match="cannot be read"):
        verify(policy, expected)


def test_a_tied_head_may_be_in_the_file_or_not(folder: Path) -> None:
    expected = model_shapes(folder)
    write_weights(folder / "model.safetensors", {"embed": [4, 2], "norm": [2], "lm_head.weight": [4, 2]})
    verify(policy_of(folder), expected)
    verify(policy_of(folder), expected | {"lm_head.weight": (4, 2)})


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
    assert parse_label(label(Policy(version=7, epoch=3))) == (7, 3)
    assert parse_label("default") == (0, 0)


def test_a_header_may_not_claim_more_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "w"
    file.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="no safetensors header"):
        read_header(file)
