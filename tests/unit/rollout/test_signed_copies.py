"""What an engine loads is what it has verified: a folder that is written to between the two changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from key_pairs import make_keys, make_signatures
from policy_files import Publications

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.settings import Settings
from forage_weights.announcement import PolicyError, sign_announcement
from forage_weights.rollout.preparation import hold_policy, open_cache


@pytest.fixture
def publish(tmp_path: Path) -> Callable[[], Policy]:
    published = Publications(str(tmp_path / "runs/r/policies"), tmp_path / "scratch")
    signatures = make_signatures(tmp_path / "keys", "r")

    def make() -> Policy:
        policy = published.publish()
        sign_announcement(policy, signatures)
        return policy

    return make


def make_settings(tmp_path: Path) -> Settings:
    weights = {"weights": {"cache_dir": tmp_path / "cache"}}
    settings = Settings.model_validate({"run": {"id": "r", "dir": tmp_path / "runs"}, "rollout": weights})
    return settings.model_copy(update={"security": make_keys(tmp_path / "keys")})


def overwrite(policy: Policy) -> None:
    """Write to each file of a policy in place, as one who has the volume may."""
    for file in Path(policy.uri).iterdir():
        with file.open("r+b") as stream:
            stream.write(b"\xff" * file.stat().st_size)


async def test_files_that_change_after_they_were_verified_are_not_loaded(
    tmp_path: Path, publish: Callable[[], Policy]
) -> None:
    cache, policy = open_cache(make_settings(tmp_path)), publish()
    before = {file.name: file.read_bytes() for file in Path(policy.uri).iterdir()}
    async with hold_policy(cache, policy) as held:
        overwrite(policy)
        assert held.files
        for file in held.files:
            assert file.is_relative_to(tmp_path / "cache")
            assert file.read_bytes() == before[file.name]
            assert file.stat().st_nlink == 1


async def test_files_that_change_before_they_are_copied_are_refused(
    tmp_path: Path, publish: Callable[[], Policy]
) -> None:
    cache, policy = open_cache(make_settings(tmp_path)), publish()
    overwrite(policy)
    with pytest.raises(PolicyError):
        async with hold_policy(cache, policy):
            pass
