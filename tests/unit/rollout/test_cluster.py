"""Folders that a killed service leaves behind are removed."""

from __future__ import annotations

from pathlib import Path

from forage_rollout.deployments.cluster import lock_folder, remove_abandoned


def test_only_folders_without_a_running_owner_are_removed(tmp_path: Path) -> None:
    for name in ("forage-ray-dead", "forage-ray-alive", "forage-ray-new", "other"):
        (tmp_path / name).mkdir()
    lock_folder(tmp_path / "forage-ray-dead").close()
    with lock_folder(tmp_path / "forage-ray-alive"):
        remove_abandoned(tmp_path)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["forage-ray-alive", "forage-ray-new", "other"]
