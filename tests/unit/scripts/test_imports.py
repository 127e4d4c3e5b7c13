"""Imports in the documentation, in benchmarks and in programs that tests start name modules and names that exist.

Neither mypy nor the collection of tests reads the Python code in these strings.
"""

from __future__ import annotations

import ast
import functools
import re

import pytest
from check_structure import REPOSITORY, list_packages

PACKAGES = {package.name: package for package in list_packages(REPOSITORY)}
_IMPORT = re.compile(rf"^\W*from ((?:{'|'.join(PACKAGES)})(?:\.\w+)*) import (\w+(?:, \w+)*)", re.M)
FILES = sorted(
    file
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "libs/*/README.md",
        "services/*/README.md",
        "cli/README.md",
        "lab/**/*.py",
        "examples/**/*",
        "tests/**/*.py",
    )
    for file in REPOSITORY.glob(pattern)
    if file.suffix in (".md", ".py")
)


@functools.cache
def read_source(module: str) -> str:
    top, *rest = module.split(".")
    file = PACKAGES[top].joinpath(*rest).with_suffix(".py")
    return file.read_text() if file.is_file() else ""


def has_name(module: str, name: str) -> bool:
    """Whether a module has a name: most are defined at the beginning of a line, and need no parsing."""
    is_defined = re.search(rf"^(class |def |async def |){name}\b", read_source(module), re.M) is not None
    return is_defined or name in read_names(module)


@functools.cache
def read_names(module: str) -> frozenset[str]:
    """Read the names that a module defines or imports, and the sub-modules of a package; empty if it does not exist."""
    top, *rest = module.split(".")
    path = PACKAGES[top].joinpath(*rest)
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = {child.stem for child in path.glob("*")} if path.is_dir() else set()
    if not source.is_file():
        return frozenset(names)
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return frozenset(names)


def test_imported_names_exist() -> None:
    imports = [
        (str(file.relative_to(REPOSITORY)), module, name)
        for file in FILES
        for module, names in _IMPORT.findall(file.read_text())
        for name in names.split(", ")
    ]
    assert len(imports) > 500
    missing = [entry for entry in imports if entry[1].partition(".v1")[1] == "" and not has_name(entry[1], entry[2])]
    assert missing == []


@pytest.mark.parametrize(("module", "name"), [("forage_runtime.settings", "load"), ("forage_runtime.local", "stack")])
def test_a_name_that_was_moved_is_found(module: str, name: str) -> None:
    assert name not in read_names(module)
    assert _IMPORT.findall(f'    "from {module} import {name}; {name}()"') == [(module, name)]
