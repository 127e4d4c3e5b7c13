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


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two walks of one file."""
    monkeypatch.setattr(check_structure, "REPOSITORY", tmp_path)
    (tmp_path / "scripts").mkdir()
    walks = "# what it is\n\n## one prompt, its life\nstart.lua  begins\n\n## one policy, its way\nstart.lua  begins\n"
    (tmp_path / "scripts/walks.txt").write_text(walks)
    (tmp_path / "start.lua").write_text("-- one\n-- two\n")
    return tmp_path


def test_a_file_of_a_walk_that_is_gone_is_named(house: Path) -> None:
    prompt, lines, policy, _ = check_structure.count_walks()
    assert (prompt.count, prompt.goal, lines.count, policy.goal) == (1, 30, 2, 15)
    (house / "start.lua").unlink()
    first, second = check_structure.find_violations()
    assert first == "scripts/walks.txt names start.lua on the way of one prompt, its life: it is gone, change it"
    assert "one policy" in second


def test_packages_within_the_limit_are_accepted(house: Path) -> None:
    for number in range(check_structure.MAX_MODULES):
        write_module(house, f"a/forage_a/m{number}.py", 1_000)
        write_module(house, f"proto/forage_proto/v1/generated_{number}_pb2.py", 9)
    write_module(house, "a/forage_a/__init__.py", 1)
    write_module(house, "proto/forage_proto/v1/generated_pb2.py", 9_000)
    assert list(check_structure.find_violations()) == []


def test_the_limit_is_enforced(house: Path) -> None:
    for number in range(check_structure.MAX_MODULES + 1):
        write_module(house, f"a/forage_a/part/m{number}.py", 1)
    (flat,) = check_structure.find_violations()
    assert flat.startswith("services/a/forage_a/part has 16 modules")


def test_budgets_count_what_is_written_by_hand(house: Path) -> None:
    write_module(house, "a/forage_a/m.py", 7)
    write_module(house, "proto/forage_proto/v1/generated_pb2.py", 9_000)
    for name, text in {"README.md": "two words", "CONTRIBUTING.md": "one", "docs/page.md": "and three more"}.items():
        (house / name).parent.mkdir(exist_ok=True)
        (house / name).write_text(text)
    (house / "docs/reference").mkdir()
    (house / "docs/reference/metrics.md").write_text("generated " * 500)
    product, tests, lab, settings, words, *_ = check_structure.count_budgets()
    assert (product.count, tests.count, lab.count, words.count) == (7, 0, 0, 6)
    assert settings.count > 100, "those of the real settings"


def test_a_budget_says_by_how_much_it_is_exceeded() -> None:
    assert str(check_structure.Budget("settings", 340, 230)).endswith("340   budget 230, 110 above it")
    assert str(check_structure.Budget("settings", 230, 230)).endswith("230   budget 230")


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
