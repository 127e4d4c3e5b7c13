"""Copies of checkpoints: complete or without a manifest, retried, and never the run's problem."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from limits import WAIT_S
from trainer_parts import save_checkpoint

from forage_runtime.errors import UserError
from forage_trainer.checkpoints.checkpoint import Checkpoints, read_checkpoint
from forage_trainer.checkpoints.upload import ATTEMPTS, DROPPED, FAILED, MAX_WAITING, UPLOADED, Uploader


def save(checkpoints: Checkpoints, step: int, text: str = "") -> Path:
    def write(state: Path) -> None:
        (state / "deep").mkdir()
        (state / "deep/weights.pt").write_text(text or f"weights {step}")

    return save_checkpoint(checkpoints, step, write)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", 2, 10)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Uploader]]:
    uploaders: list[Uploader] = []

    def make(url: str | None = None) -> Uploader:
        uploaders.append(Uploader(tmp_path / "checkpoints", url or f"file://{tmp_path / 'copies'}", "r", pause_s=0.01))
        return uploaders[-1]

    yield make
    for uploader in uploaders:
        uploader.close(0)


class Store:
    """Makes the store behave as given, for each file that it receives."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.put: list[str] = []
        self.before: Callable[[str], None] = lambda path: None
        real = LocalFileSystem.put_file

        def put_file(system: LocalFileSystem, local: str, remote: str, **named: Any) -> Any:
            self.before(remote)
            self.put.append(remote)
            return real(system, local, remote, **named)

        patch.setattr(LocalFileSystem, "put_file", put_file)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


def count(counter: Any) -> float:
    return counter._value.get()


def list_copies(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "copies/r").glob("step_*") if (p / "manifest.json").exists())


def test_an_uploaded_copy_restores_the_checkpoint(
    tmp_path: Path, checkpoints: Checkpoints, start: Callable[..., Uploader]
) -> None:
    uploader = start()
    uploader.add(save(checkpoints, 5))
    assert uploader.close(WAIT_S)
    assert read_checkpoint(tmp_path / "copies/r/step_5").step == 5
    shutil.rmtree(tmp_path / "checkpoints")
    shutil.copytree(tmp_path / "copies/r", tmp_path / "checkpoints")
    result = Checkpoints(tmp_path / "checkpoints", 2, 10).find_newest()
    assert result is not None
    assert (result[0] / "deep/weights.pt").read_text() == "weights 5"


def test_checkpoints_left_by_a_restart_are_copied_and_none_twice(
    tmp_path: Path, checkpoints: Checkpoints, start: Callable[..., Uploader], store: Store
) -> None:
    save(checkpoints, 5)
    assert start().close(WAIT_S)
    save(checkpoints, 6)
    assert start().close(WAIT_S)
    assert list_copies(tmp_path) == ["step_5", "step_6"]
    assert len(store.put) == 2
    assert list((tmp_path / "checkpoints/.upload").iterdir()) == []


def test_a_repeated_step_replaces_its_copy(
    tmp_path: Path, checkpoints: Checkpoints, start: Callable[..., Uploader]
) -> None:
    save(checkpoints, 5)
    assert start().close(WAIT_S)
    save(checkpoints, 5, "others")
    assert start().close(WAIT_S)
    assert read_checkpoint(tmp_path / "copies/r/step_5").step == 5
    assert (tmp_path / "copies/r/step_5/state/deep/weights.pt").read_text() == "others"


def test_a_failing_store_is_retried_and_counted(
    tmp_path: Path, checkpoints: Checkpoints, start: Callable[..., Uploader], store: Store
) -> None:
    failures = [OSError("away"), ConnectionError("reset")]

    def interrupt(remote: str) -> None:
        if failures:
            raise failures.pop()

    store.before = interrupt
    failed, sent = count(FAILED), count(UPLOADED)
    uploader = start()
    uploader.add(save(checkpoints, 5))
    assert uploader.close(WAIT_S)
    assert (count(FAILED) - failed, count(UPLOADED) - sent) == (2, 1)
    assert list_copies(tmp_path) == ["step_5"]


def test_an_unavailable_store_does_not_end_the_run_and_the_next_start_retries(
    tmp_path: Path, checkpoints: Checkpoints, start: Callable[..., Uploader], store: Store
) -> None:
    def interrupt(remote: str) -> None:
        raise OSError("dead")

    store.before = interrupt
    failed = count(FAILED)
    uploader = start()
    uploader.add(save(checkpoints, 5))
    assert not uploader.close(WAIT_S)
    assert count(FAILED) - failed == ATTEMPTS
    assert list_copies(tmp_path) == []
    store.before = lambda remote: None
    assert start().close(WAIT_S)
    assert list_copies(tmp_path) == ["step_5"]


def test_a_slow_store_never_blocks_and_its_queue_is_bounded_and_safe_from_retention(
    tmp_path: Path, checkpoints: Checkpoints, start: Callable[..., Uploader], store: Store
) -> None:
    began, release = threading.Event(), threading.Event()

    def interrupt(remote: str) -> None:
        began.set()
        assert release.wait(WAIT_S)

    store.before = interrupt
    dropped = count(DROPPED)
    uploader = start()
    uploader.add(save(checkpoints, 1))
    assert began.wait(WAIT_S)
    for step in range(2, 9):  # the store stands still meanwhile
        uploader.add(save(checkpoints, step))
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*")) == ["step_7", "step_8"]
    assert len(list((tmp_path / "checkpoints/.upload").glob("step_*"))) == MAX_WAITING + 1
    assert count(DROPPED) - dropped == 5
    release.set()
    assert uploader.close(WAIT_S)
    assert list_copies(tmp_path) == ["step_1", "step_7", "step_8"]
    for name in list_copies(tmp_path):
        assert read_checkpoint(tmp_path / "copies/r" / name).step == int(name[5:])


def test_a_copy_without_its_last_file_has_no_manifest(
    tmp_path: Path, checkpoints: Checkpoints, start: Callable[..., Uploader], store: Store
) -> None:
    uploader = start()
    seen: list[bool] = []
    store.before = lambda remote: seen.append((tmp_path / "copies/r/step_5/manifest.json").exists())
    uploader.add(save(checkpoints, 5))
    assert uploader.close(WAIT_S)
    save(checkpoints, 5, "others")
    assert start().close(WAIT_S)
    assert seen == [False, False]


def test_an_unsupported_address_is_named(checkpoints: Checkpoints, start: Callable[..., Uploader]) -> None:
    with pytest.raises(UserError, match=r"trainer.upload_url = 'nosuch://bucket/x' cannot be used"):
        start("nosuch://bucket/x")
