"""Checks of the repository itself: structure and commit messages."""

from __future__ import annotations

import subprocess
from pathlib import Path

import check_structure
import pytest


def write_module(root: Path, name: str, lines: int) -> None:
    file = root / "services" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("pass\n" * lines)


def test_packages_within_the_limits_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(check_structure.MAX_MODULES):
        write_module(tmp_path, f"a/forage_a/m{number}.py", check_structure.MAX_LINES)
    write_module(tmp_path, "a/forage_a/__init__.py", 1)
    write_module(tmp_path, "common/forage_common/v1/generated_pb2.py", 9_000)
    monkeypatch.setattr(check_structure, "REPOSITORY", tmp_path)
    assert list(check_structure.find_violations()) == []


def test_each_limit_is_enforced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(check_structure.MAX_MODULES + 1):
        write_module(tmp_path, f"a/forage_a/part/m{number}.py", 1)
    write_module(tmp_path, "a/forage_a/long.py", check_structure.MAX_LINES + 1)
    for number in range(check_structure.MAX_COMMON_LINES // 390 + 1):
        write_module(tmp_path, f"common/forage_common/p{number % 2}/m{number}.py", 390)
    monkeypatch.setattr(check_structure, "REPOSITORY", tmp_path)
    long, flat, common = check_structure.find_violations()
    assert long.startswith("services/a/forage_a/long.py has 401 lines")
    assert flat.startswith("services/a/forage_a/part has 16 modules")
    assert common.startswith(f"forage_common has {(check_structure.MAX_COMMON_LINES // 390 + 1) * 390} lines")


@pytest.mark.parametrize(
    ("line", "accepted"),
    [
        ("fix(trainer): do not mark spans as failed on SIGTERM", True),
        ("feat!: rename rollout.attach", True),
        ("docs: say what the demo needs", True),
        ("Merge branch 'main'", True),
        ("Fix things", False),
        ("fix things", False),
        ("unknown(trainer): something", False),
        ("fix(trainer):", False),
        ("", False),
    ],
)
def test_commit_messages_follow_conventional_commits(
    repository: Path, tmp_path: Path, line: str, accepted: bool
) -> None:
    message = tmp_path / "message"
    message.write_text(f"{line}\n\nfix: only the first line counts\n")
    done = subprocess.run([repository / "scripts/check_commit_message.sh", message], capture_output=True, text=True)
    assert (done.returncode == 0) is accepted, done.stderr
    assert accepted or "should read like 'fix(trainer): " in done.stderr
