"""Pages name files, modules, settings and commands that exist."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml
from check_structure import list_packages
from pages import list_pages, read_blocks, read_lines, read_quoted
from pydantic import BaseModel

from forage_cli.main import app
from forage_runtime.settings import Settings

REPOSITORY = Path(__file__).parents[3]
PAGES = list_pages()
FOLDERS = "cli|configs|deploy|docs|examples|lab|libs|models|proto|scripts|services|tests"
FORWARDED = ("index", "reward", "serve", "trainer", "worker")
"""Commands that run in a service's environment, which knows their options."""
OTHER_NAMES = (
    *(f"docs/operate/{name}.md" for name in ("backup", "compose", "gpu-kubernetes", "images", "kubernetes")),
    *(f"docs/operate/{name}.md" for name in ("multi-node", "redis", "upgrade")),
    *("docs/runbooks/", "docs/guide/migrate-from-"),
    "docs/guide/trace.md",
    "CHANGELOG.md",
)
"""Pages with other names in the form of settings: chart values (`rollout.mode`), spans, old settings, keys of verl."""


def parametrize_pages(pages: Iterable[Path] = PAGES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(REPOSITORY)))


@parametrize_pages()
def test_files_exist(page: Path) -> None:
    paths = [text for text in read_quoted(page) if re.fullmatch(rf"({FOLDERS})/[\w./-]+\.[a-z]+", text)]
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


@parametrize_pages()
def test_modules_and_their_names_exist(page: Path) -> None:
    names = {text for text in read_quoted(page) if re.fullmatch(r"forage_\w+(\.\w+)+", text)}
    names |= {f"{module}.{name}" for module, name in find_imports(page)}
    assert [name for name in sorted(names) if not _is_defined(name)] == []


@parametrize_pages([page for page in PAGES if not str(page.relative_to(REPOSITORY)).startswith(OTHER_NAMES)])
def test_settings_exist(page: Path) -> None:
    sections = "|".join(Settings.model_fields)
    names = [re.match(rf"({sections})(\.[a-z_0-9]+)+(?=$|[=:. ])", text) for text in read_quoted(page)]
    unknown = [
        match[0]
        for match in names
        if match
        and not match[0].endswith((".proto", ".py", ".safetensors"))
        and not _is_setting(match[0])
        and not _is_chart_value(match[0])
    ]
    assert unknown == []


@parametrize_pages()
def test_commands_exist(page: Path) -> None:
    assert [line for line in find_page_commands(page) if not _is_command(line)] == []


def find_imports(page: Path) -> Iterator[tuple[str, str]]:
    for module, names in re.findall(r"^from (forage_[\w.]+) import ([\w, ]+)$", page.read_text(encoding="utf-8"), re.M):
        yield from ((module, name.strip()) for name in names.split(","))


def _is_defined(name: str) -> bool:
    """A module, or a name that occurs in one."""
    package, *rest = name.split(".")
    folder = next(folder for folder in list_packages(REPOSITORY) if folder.name == package)
    while rest:
        folder = folder / rest.pop(0)
        if folder.is_dir():
            continue
        if (module := folder.with_suffix(".py")).is_file():
            stub = module.with_suffix(".pyi")  # of generated messages
            text = (stub if stub.is_file() else module).read_text(encoding="utf-8")
            return not rest or re.search(rf"\b{rest[0]}\b", text) is not None
        package_text = (folder.parent / "__init__.py").read_text(encoding="utf-8") if folder.parent.is_dir() else ""
        return re.search(rf"\b{folder.name}\b", package_text) is not None
    return folder.is_dir()


@functools.cache
def _read_chart_values() -> Any:
    return yaml.safe_load((REPOSITORY / "deploy/helm/forage/values.yaml").read_text())


@functools.cache
def _make_commands() -> Any:
    return typer.main.get_command(app)


def _is_chart_value(name: str) -> bool:
    """Whether the chart's values.yaml has this name, as `rollout.auth`: one page tells of both."""
    node = _read_chart_values()
    for part in name.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def _is_setting(name: str) -> bool:
    models: list[type[BaseModel]] = [Settings]
    for part in name.split("."):
        field = next((model.model_fields[part] for model in models if part in model.model_fields), None)
        if field is None:
            return False
        if "dict" in str(field.annotation):
            return True
        candidates = [field.annotation, *get_args(field.annotation)]
        models = [each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)]
    return True


def find_command_lines(page: Path) -> Iterator[str]:
    """The lines of blocks without a language: commands."""
    yield from (line.text for block in read_blocks(page, "") for line in read_lines(block))


def find_page_commands(page: Path) -> Iterator[str]:
    for line in find_command_lines(page):
        if match := re.search(r"(?:^|[|&] )(?:\.venvs/cli/bin/)?forage (\w.*)", line):
            yield match[1]


def _is_command(line: str) -> bool:
    words = shlex.split(line.split(";")[0].split("&&")[0], comments=True)
    if words[0] in FORWARDED:
        return True
    command = _make_commands()
    while words and (children := getattr(command, "commands", {})):
        if words[0] in children:
            command = children[words.pop(0)]
        elif command.name == "eval":
            command = children["run"]  # its name may be left out
        else:
            return words[0] == "--help"
    options = {option for each in command.params for option in each.opts} | {"--help"}
    return all(word.split("=")[0] in options for word in words if re.match(r"--?[a-z]", word))
