"""`scripts/changed_tests.py` chooses the folders that a change can affect, and no fewer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import changed_tests
import pytest
from changed_tests import FRONT_END, REPOSITORY, find_affected, find_module, list_changed_files, select_changed
from run_tests import QUICK, list_test_files

FILES = list_test_files(QUICK)
ALL = {str(file.relative_to(REPOSITORY / "tests").parent) for file in FILES}


def select(monkeypatch: pytest.MonkeyPatch, *names: str) -> set[str]:
    monkeypatch.setattr(changed_tests, "list_changed_files", lambda commit: list(names))
    return {str(file.relative_to(REPOSITORY / "tests").parent) for file in select_changed(FILES, "HEAD")[0]}


def test_a_change_of_one_service_touches_its_tests_and_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = select(monkeypatch, "services/reward/forage_reward/router.py")
    assert {"unit/reward", "component/reward", "e2e/cli"} <= chosen
    assert not chosen & {"unit/trainer", "component/trainer", "unit/retriever", "unit/console"}


def test_a_change_of_what_all_import_touches_all_services(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = select(monkeypatch, "libs/runtime/forage_runtime/settings/__init__.py")
    assert {f"{kind}/{part}" for kind in ("unit", "component") for part in ("trainer", "rollout", "cli")} <= chosen


def test_a_script_of_redis_counts_as_the_package_that_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_module("libs/queue/forage_queue/streams/scripts.lua") == "forage_queue.streams"
    assert "forage_queue.trainer.batcher" in find_affected("forage_queue.streams")
    assert "component/trainer" in select(monkeypatch, "libs/queue/forage_queue/streams/scripts.lua")


def test_a_support_module_touches_the_tests_that_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = select(monkeypatch, "tests/support/loss_parts.py")
    assert chosen
    assert all(folder.endswith("/trainer") for folder in chosen), chosen


@pytest.mark.parametrize("name", ["services/reward/requirements.lock", "proto/forage/v1/a.proto", "configs/demo.yaml"])
def test_what_no_import_shows_touches_all(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert select(monkeypatch, name) == ALL


def test_prose_touches_only_tests_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = select(monkeypatch, "README.md")
    assert "unit/scripts" in chosen
    assert "unit/sandbox" not in chosen


def test_the_front_end_has_tests_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_tests, "list_changed_files", lambda commit: [f"{FRONT_END}src/app.tsx"])
    assert select_changed(FILES, "HEAD") == ([], True)


def test_an_unknown_commit_is_refused() -> None:
    with pytest.raises(SystemExit, match="'no-such-branch' is no commit here"):
        list_changed_files("no-such-branch")


def test_committed_uncommitted_and_new_files_count_since_the_branch_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        git("add", name)

    git("init", "--initial-branch=main")
    write("old", "1")
    write("edited", "1")
    git("commit", "-m", "first")
    git("checkout", "-b", "branch")
    write("committed", "1")
    git("commit", "-m", "second")
    git("checkout", "main")
    write("of_main", "1")
    git("commit", "-m", "third")
    git("checkout", "branch")
    (tmp_path / "edited").write_text("2")
    (tmp_path / "new").touch()
    monkeypatch.setattr(changed_tests, "REPOSITORY", tmp_path)
    assert list_changed_files("main") == ["committed", "edited", "new"]
