"""Names in Markdown, pre-commit hooks and workflows: every make target and every file that they use exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tools
import yaml
from check_structure import REPOSITORY
from pages import list_pages, read_blocks, read_lines, read_quoted

_RULE = re.compile(r"^([a-z][a-z0-9-]*):(?!=)(?:.*?## (.*))?", re.M)
_MAKE = re.compile(r"\bmake(?: -\w+)*((?: +(?:[a-z][a-z0-9-]*|[A-Z_]+=(?:\"[^\"]*\"|\S+))(?![\w<…-]))+)")
PAGES = [*list_pages(), *sorted(REPOSITORY.glob("lab/**/*.md")), *sorted(REPOSITORY.glob(".github/**/*.md"))]
HOOKS = [
    hook
    for source in yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in source["hooks"]
]
WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))


def read_targets() -> dict[str, str]:
    """Targets of the Makefile → help text; those of the pattern `bench-%` by the folders that it runs."""
    targets = {name: text for name, text in _RULE.findall((REPOSITORY / "Makefile").read_text())}
    benchmarks = (run.parent.name for run in REPOSITORY.glob("lab/benchmarks/*/run"))
    return targets | {f"bench-{name}": "run one benchmark" for name in benchmarks}


def find_make_targets(command: str) -> list[str]:
    """Targets of every `make …` in a text."""
    command = re.sub(r"\$\{\{.*?\}\}", "0", command)  # what a workflow fills in
    return [word for words in _MAKE.findall(command) for word in shlex.split(words) if "=" not in word]


def find_commands(page: Path) -> Iterator[str]:
    """Code of a page: lines of fenced blocks without their comments, and inline code."""
    yield from (line.text for block in read_blocks(page) for line in read_lines(block))
    yield from read_quoted(page)


def list_run_steps(workflow: Path) -> list[str]:
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_make_targets_in_a_page_exist(page: Path) -> None:
    named = {target for command in find_commands(page) for target in find_make_targets(command)}
    assert named <= read_targets().keys()


def test_pages_name_make_targets() -> None:
    """The search above finds what it is for."""
    readme = {target for command in find_commands(REPOSITORY / "README.md") for target in find_make_targets(command)}
    assert {"setup", "demo"} & readme
    assert find_make_targets("SEED=1 make demo") == ["demo"]
    assert find_make_targets('make -s images SERVICES="reward cli" && make up') == ["images", "up"]
    assert find_make_targets("make bench-<service>") == []


def test_every_phony_target_has_a_rule_and_a_help_text() -> None:
    makefile = (REPOSITORY / "Makefile").read_text().replace("\\\n", " ")
    phony = {name for line in re.findall(r"^\.PHONY:(.*)$", makefile, re.M) for name in line.split()}
    with_help = {name for name, text in read_targets().items() if text}
    assert phony
    assert phony <= with_help


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_the_entry_of_a_hook_names_files_that_exist(hook: dict[str, Any]) -> None:
    words = shlex.split(hook["entry"])
    assert set(find_make_targets(hook["entry"])) <= read_targets().keys()
    for word in words:
        if word.startswith(".venvs/"):  # made by `make setup`
            environment = word.split("/")[1]
            assert environment in {"uv", *tools.HOMES}, word
        elif "/" in word and " " not in word:
            assert (REPOSITORY / word).exists(), word


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.stem)
def test_workflows_call_make_targets_and_scripts_that_exist(workflow: Path) -> None:
    for step in list_run_steps(workflow):
        assert set(find_make_targets(step)) <= read_targets().keys(), step
        for script in re.findall(r"\b(?:scripts|\.ci)/[\w./-]+", step):
            assert (REPOSITORY / script).is_file(), script


def test_the_ci_workflow_calls_the_targets_that_contributors_run() -> None:
    called = {
        target for step in list_run_steps(REPOSITORY / ".github/workflows/ci.yml") for target in find_make_targets(step)
    }
    assert {"setup", "lint", "test", "docs"} <= called
