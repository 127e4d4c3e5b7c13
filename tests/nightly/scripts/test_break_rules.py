"""`scripts/break_rules.py`: rules that are as the code and the tests are today, and what becomes of a broken one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import break_rules
import pytest
from break_rules import Copy, Edit, Group, Rule, RuleError, find_failures, find_problems, find_tests, main, read_rules


def test_every_rule_has_its_texts_and_its_test_files(repository: Path) -> None:
    rules = [rule for group in break_rules.GROUPS for rule in read_rules(group)]
    assert find_problems(repository, rules) == []
    assert len({rule.name for rule in rules}) == len(rules)


def test_rules_are_read_like_diffs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "# words",
        "[test_a.py cli/test_b.py]",
        "one is one",
        "  a/b.py",
        "- x",
        "-   y",
        "  c.lua",
        "- old",
        "+ new",
    ]
    (tmp_path / "state.txt").write_text("\n".join(lines))
    monkeypatch.setattr(break_rules, "RULES", tmp_path)
    edits = Edit("a/b.py", "x\n  y", ""), Edit("c.lua", "old", "new")
    assert read_rules("state") == [Rule("state", "one is one", edits, ("test_a.py", "cli/test_b.py"))]
    (tmp_path / "state.txt").write_text("[test_a.py]\n- x\n")
    with pytest.raises(RuleError, match=r"state\.txt:2: '- x' belongs to no rule"):
        read_rules("state")


def test_texts_and_tests_that_are_gone_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("unit/cli", "component/cli", "unit/trainer", "nightly/cli"):
        (tmp_path / "tests" / place).mkdir(parents=True)
    (tmp_path / "tests/nightly/cli/test_c.py").touch()
    (tmp_path / "tests/unit/cli/test_a.py").touch()
    (tmp_path / "tests/component/cli/test_a.py").touch()
    assert [file.parts[-3] for file in find_tests(tmp_path, "test_a.py")] == ["component", "unit"]
    (tmp_path / "tests/unit/trainer/test_a.py").touch()
    assert len(find_tests(tmp_path, "cli/test_a.py")) == 2
    monkeypatch.setattr(break_rules, "REPOSITORY", tmp_path)
    rule = Rule("state", "one is one", (Edit("a.py", "x", ""),), ("test_a.py", "test_c.py"))
    gone, ambiguous, absent = find_problems(tmp_path, [rule])
    assert gone == "'one is one': a.py has no 'x' any more: change state.txt"
    assert "test_a.py is in cli, trainer: name the part" in ambiguous
    assert "test_c.py is in none of unit, component" in absent
    monkeypatch.setattr(break_rules, "REPOSITORY", tmp_path / "today's")
    assert find_tests(tmp_path, "test_c.py") == []  # the rule and its test may be younger than the other clone


@pytest.fixture
def clone(tmp_path: Path, repository: Path) -> Callable[[str], tuple[int | None, list[str]]]:
    """A repository of one function and one test of it: `clone("False")` runs the test where `True` is broken so."""
    package, tests = tmp_path / "cli/forage_cli", tmp_path / "tests/unit/cli"
    package.mkdir(parents=True)
    tests.mkdir(parents=True)
    (package / "__init__.py").write_text("VALUE = True\n")
    test = tests / "test_value.py"
    test.write_text(
        "import time\nimport forage_cli\n\n\ndef test_value():\n    assert forage_cli.VALUE or time.sleep(600)\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["cli"]\n')
    (tmp_path / ".venvs").symlink_to(repository / ".venvs")
    (tmp_path / "copies").mkdir()
    copy = Copy(tmp_path, tmp_path / "copies")

    def run(new: str) -> tuple[int | None, list[str]]:
        with copy.broken([Edit("cli/forage_cli/__init__.py", "True", new)]):
            code, output = copy.run("cli", [test], Group(60.0))
        return code, find_failures(output)

    return run


def test_each_break_is_of_the_copy_and_for_its_own_run(clone: Callable[[str], tuple[int | None, list[str]]]) -> None:
    assert clone("True") == (0, [])
    # The second is as long as the first, in the same second: Python must not take the code compiled for that.
    assert clone("1//0") == (2, ["tests/unit/cli/test_value.py"])
    assert clone("None") == (None, [])
    assert clone("True") == (0, [])


def test_names_select_groups_and_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(break_rules.select_rules(["delivery"])) == 9
    assert [rule.group for rule in break_rules.select_rules(["epsilon is added"])] == ["semantics"]
    assert main(["nothing of the kind"]) == 2
    assert "'nothing of the kind' is no group and begins no rule" in capsys.readouterr().err
