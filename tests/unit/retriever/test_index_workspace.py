"""A workspace is resumed after a kill, and held by one process at a time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forage_retriever.index import workspace as workspaces
from forage_retriever.index.workspace import hold_workspace, remove_abandoned
from forage_retriever.search import row_files, vectors
from forage_retriever.search.row_files import RowFiles
from forage_retriever.search.vectors import (
    VECTORS_FILE,
    VectorsWriter,
    iterate_blocks,
    map_vectors,
    sample_vectors,
    save_vectors,
)
from forage_runtime.errors import UserError


def fill(folder: Path) -> None:
    (folder / "file").write_text("whole")


def build(folder: Path, final: Path, make: Callable[[Path], None] = fill) -> bool:
    """Build an index of one stage; returns whether this call built it."""
    with hold_workspace(folder, final, lambda: None) as workspace:
        if workspace is None:
            return False
        workspace.stage("part", "key", make)
        workspace.finish(final)
    return True


def test_a_finished_stage_is_reused_unless_its_key_changes(tmp_path: Path) -> None:
    calls: list[str] = []

    def make(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        calls.append(folder.name)
        fill(folder)

    for key in ("a", "a", "b"):
        with hold_workspace(tmp_path / "work", tmp_path / "final", lambda: None) as workspace:
            assert workspace is not None
            workspace.stage("part", key, make)
            workspace.stage("scratch", "same", make, temporary=True)
    assert calls == ["part", "scratch", "part"]


def test_what_is_kept_of_an_interrupted_build_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    now = [0.0]
    monkeypatch.setattr(workspaces.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(row_files.time, "monotonic", lambda: now[0])

    def fill_slowly(folder: Path) -> None:
        now[0] += 130
        fill(folder)

    def encode(folder: Path, until: int) -> None:
        writer = VectorsWriter(folder, "key", 2000, 3)
        now[0] += 7400
        writer.append(np.ones((until - writer.done, 3), np.float32))
        writer.close()
        if until < 2000:
            raise KeyboardInterrupt

    for until in (1200, 2000, 2000):
        with (
            contextlib.suppress(KeyboardInterrupt),
            hold_workspace(tmp_path / "work", tmp_path / "final", lambda: None, told.append) as held,
        ):
            assert held is not None
            held.stage("corpus", "key", fill_slowly)
            held.stage("corpus", "key", fill_slowly)
            held.stage("vectors", "key", lambda folder, until=until: encode(folder, until), True, True)  # type: ignore[misc]
        told.append("again")
    assert told == [
        "again",
        "resumed: the passages are complete (2 min 10 s of work kept)",
        "resumed: the vectors continue at passage 1,200 of 2,000 (2 h 3 min of work kept)",
        "again",
        "resumed: the passages are complete (2 min 10 s of work kept)",
        "resumed: the vectors are complete (4 h 6 min of work kept)",
        "again",
    ]


def test_a_failed_stage_starts_from_an_empty_folder(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise ValueError("interrupted")

    with pytest.raises(ValueError, match="interrupted"):
        build(tmp_path / "work", tmp_path / "final", fail)
    assert build(tmp_path / "work", tmp_path / "final")
    assert [path.name for path in (tmp_path / "final").iterdir()] == ["part"]
    assert not (tmp_path / "work").exists()
    assert not build(tmp_path / "work", tmp_path / "final")


def test_a_second_process_waits_and_uses_the_result_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "_POLL_S", 0.0)
    waiting = threading.Event()
    attempts: list[bool] = []

    def build_second() -> None:
        with hold_workspace(tmp_path / "work", tmp_path / "final", waiting.set) as workspace:
            attempts.append(workspace is not None)

    thread = threading.Thread(target=build_second)
    with hold_workspace(tmp_path / "work", tmp_path / "final", lambda: None) as workspace:
        assert workspace is not None
        thread.start()
        assert waiting.wait(120)
        workspace.stage("part", "key", fill)
        workspace.finish(tmp_path / "final")
    thread.join(120)
    assert attempts == [False]
    assert (tmp_path / "final/part/file").read_text() == "whole"


def test_a_waiting_process_builds_when_the_first_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "_POLL_S", 0.0)
    waiting = threading.Event()
    attempts: list[bool] = []

    def build_second() -> None:
        with hold_workspace(tmp_path / "work", tmp_path / "final", waiting.set) as workspace:
            attempts.append(workspace is not None and (workspace.folder / "lock").exists())

    thread = threading.Thread(target=build_second)
    with hold_workspace(tmp_path / "work", tmp_path / "final", lambda: None) as workspace:
        assert workspace is not None
        thread.start()
        assert waiting.wait(120)
        workspace.discard()
    thread.join(120)
    assert attempts == [True]


def test_a_holder_that_removes_the_folder_between_two_looks_of_mkdir_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, looks = Path.mkdir, iter([True])

    def make_removed(folder: Path, *options: Any, **named: Any) -> None:
        if next(looks, False):
            raise FileExistsError(folder)
        make(folder, *options, **named)

    monkeypatch.setattr(Path, "mkdir", make_removed)
    with hold_workspace(tmp_path / "work", tmp_path / "final", lambda: None) as workspace:
        assert workspace is not None
    assert next(looks, None) is None
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError), hold_workspace(tmp_path / "file", tmp_path / "final", lambda: None):
        pass


def test_only_old_workspaces_without_a_holder_are_removed(tmp_path: Path) -> None:
    for name in ("old", "held", "new"):
        with hold_workspace(tmp_path / f".index-{name}", tmp_path / "final", lambda: None) as workspace:
            assert workspace is not None
            workspace.stage("part", "key", fill)
    for name in ("old", "held"):
        for path in (tmp_path / f".index-{name}").iterdir():
            os.utime(path, (0, time.time() - 30 * 24 * 3600))
    (tmp_path / ".index-begun").mkdir()  # by another process, which has written nothing yet
    with hold_workspace(tmp_path / ".index-held", tmp_path / "final", lambda: None):
        for path in (tmp_path / ".index-held").iterdir():
            os.utime(path, (0, 0))
        remove_abandoned(tmp_path, ".index-")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".index-begun", ".index-held", ".index-new"]


@settings(max_examples=20)  # each part is synced to the disk
@given(
    st.integers(0, 40),
    st.lists(
        st.tuples(st.integers(1, 20), st.sampled_from(["continues", "ended", "killed"]), st.booleans()), max_size=8
    ),
)
def test_vectors_survive_any_sequence_of_kills(
    tmp_path_factory: pytest.TempPathFactory, count: int, parts: list[tuple[int, str, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("v")
    wanted = np.random.default_rng(count).standard_normal((count, 3)).astype(np.float32)
    writer, safe = VectorsWriter(folder, "key", count, 3), 0
    with pytest.MonkeyPatch.context() as patching:
        for size, fate, is_late in parts:
            patching.setattr(row_files, "CHECKPOINT_S", 0.0 if is_late else 1e9)
            writer.append(wanted[writer.done : writer.done + size])
            if is_late or fate == "ended" or writer.done == count:
                safe = writer.done
            if fate != "continues":
                if fate == "killed":  # no checkpoint; what was written since the last one is ignored
                    patching.setattr(RowFiles, "checkpoint", lambda self: None)
                writer.close()
                patching.undo()
                writer = VectorsWriter(folder, "key", count, 3)
                assert writer.done == safe
    writer.append(wanted[writer.done :])
    writer.close()
    assert np.array_equal(map_vectors(folder / VECTORS_FILE), wanted)


@pytest.mark.parametrize("why", ["another key", "file lost"])
def test_vectors_of_another_key_are_not_resumed(tmp_path: Path, why: str) -> None:
    writer = VectorsWriter(tmp_path, "key", 4, 2)
    writer.append(np.ones((3, 2), np.float32))
    writer.close()  # an end in order is a checkpoint
    if why == "file lost":
        (tmp_path / VECTORS_FILE).write_bytes(b"")
    writer = VectorsWriter(tmp_path, "key" if why == "file lost" else "other", 4, 2)
    assert writer.done == 0
    writer.append(np.zeros((4, 2), np.float32))
    writer.close()
    assert not map_vectors(tmp_path / VECTORS_FILE).any()


def test_a_vector_that_is_not_finite_names_its_passage(tmp_path: Path) -> None:
    writer = VectorsWriter(tmp_path, "key", 4, 2)
    writer.append(np.ones((2, 2), np.float32))
    with pytest.raises(UserError, match="no vector for passage 3"):
        writer.append(np.array([[1, 1], [1, np.nan]], np.float32))
    assert writer.done == 2


def test_vectors_are_read_in_blocks_sampled_and_saved_in_other_precisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "_BLOCK_BYTES", 4 * 3 * 4)
    wanted = np.arange(30, dtype=np.float32).reshape(10, 3)
    assert [len(block) for block in iterate_blocks(wanted)] == [4, 4, 2]
    assert np.array_equal(np.concatenate(list(iterate_blocks(wanted))), wanted)
    assert sample_vectors(wanted, 3)[:, 0].tolist() == [0, 9, 18]
    assert len(sample_vectors(wanted, 99)) == 10
    save_vectors(wanted, tmp_path / "half.npy", "float16")
    half = map_vectors(tmp_path / "half.npy")
    assert half.dtype == np.float16
    assert np.array_equal(half, wanted)
    (tmp_path / "half.npy").write_bytes(b"no")
    with pytest.raises(UserError, match=r"half.npy cannot be read"):
        map_vectors(tmp_path / "half.npy")
