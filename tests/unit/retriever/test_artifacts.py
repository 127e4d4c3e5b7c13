"""Artifacts are built once, completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forage_retriever.artifacts import build_once, compute_digest
from forage_runtime.errors import UserError

DIGEST = compute_digest("a")


def write(folder: Path) -> None:
    (folder / "part").write_text("whole")


def test_the_same_digest_is_built_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        write(folder)

    first, second = (build_once(tmp_path, "kind", DIGEST, build) for _ in range(2))
    assert first == second
    assert (first / "part").read_text() == "whole"
    assert len(calls) == 1


def test_a_failed_build_leaves_no_files(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        write(folder)
        raise ValueError("interrupted")

    with pytest.raises(ValueError, match="interrupted"):
        build_once(tmp_path, "kind", DIGEST, build)
    assert list(tmp_path.iterdir()) == []


def test_only_staging_directories_of_dead_processes_are_removed(tmp_path: Path) -> None:
    dead, host = 2**22 + 1, os.uname().nodename  # no process of Linux has this number
    left = tmp_path / f".building-{host}-{dead}-x"
    kept = tmp_path / f".building-{host}-{os.getpid()}-x"
    elsewhere = tmp_path / f".building-another-host-{dead}-x"
    for folder in (left, kept, elsewhere):
        folder.mkdir()
    build_once(tmp_path, "kind", DIGEST, write)
    assert [folder.exists() for folder in (left, kept, elsewhere)] == [False, True, True]


def test_of_two_concurrent_builds_one_is_kept(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        write(folder)
        build_once(tmp_path, "kind", DIGEST, write)

    assert (build_once(tmp_path, "kind", DIGEST, build) / "part").read_text() == "whole"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"retriever.cache_dir"):
        build_once(tmp_path / "file" / "cache", "kind", DIGEST, write)


def test_a_full_disk_names_the_setting_and_leaves_no_files(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        write(folder)
        with Path("/dev/full").open("w") as full:
            full.write("x")

    with pytest.raises(UserError, match=r"No space left.*retriever.cache_dir"):
        build_once(tmp_path, "kind", DIGEST, build)
    assert list(tmp_path.iterdir()) == []


def test_digests_depend_on_where_a_part_ends() -> None:
    assert compute_digest("ab", "c") != compute_digest("a", "bc")
