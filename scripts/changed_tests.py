"""Finds the tests that a change can affect, by the graph of imports; `make test-changed` runs them.

A folder of tests is chosen if the change touches the folder, or a module that one of its tests imports, directly or
through other modules. Tests that start a service as a process do not import it: every kind but `unit` depends on the
whole package of its service. Files in a package that are no modules (scripts of Redis, tables) count as their package.
A change that no import shows, as of a lock, a recipe, a model or a protobuf file, chooses all; prose chooses
the tests that read it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import grimp
from check_structure import REPOSITORY, list_packages

TESTS = REPOSITORY / "tests"
SUPPORT = (TESTS / "support", REPOSITORY / "lab")
"""Folders of modules that tests import, without being tests."""
FRONT_END = "services/console/web/"
PROSE = (".md", ".png", ".svg")
READS_PROSE = ("docs/", '"docs"', "README", "CHANGELOG")
"""Words of tests that read the documentation."""


def list_changed_files(commit: str) -> list[str]:
    """List what differs from the point where the branch left a commit, with uncommitted and new files.

    Raises:
        SystemExit: git does not know the commit.
    """
    base = _git("merge-base", commit, "HEAD")
    if not base:
        raise SystemExit(f"changed_tests: '{commit}' is no commit here: name one with BASE=…")
    new = _git("ls-files", "--others", "--exclude-standard")
    return sorted({*_git("diff", "--name-only", base[0]), *new})


def _git(*arguments: str) -> list[str]:
    ended = subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False, encoding="utf-8"
    )
    return ended.stdout.splitlines() if ended.returncode == 0 else []


def list_roots() -> list[Path]:
    """List the folders from which packages are imported."""
    return sorted({package.parent for package in list_packages(REPOSITORY)})


@cache
def build_graph() -> grimp.ImportGraph:
    """Build the graph of imports of all packages of this repository."""
    packages = [package.name for package in list_packages(REPOSITORY)]
    known = list(sys.path)
    sys.path[:0] = [str(root) for root in list_roots()]
    try:
        return grimp.build_graph(*packages, cache_dir=str(REPOSITORY / ".cache/imports"))
    finally:
        sys.path[:] = known


def find_module(name: str) -> str | None:
    """Find the module of a file of a package, or the package that contains it; None for other files."""
    file = REPOSITORY / name
    root = next((root for root in list_roots() if file.is_relative_to(root)), None)
    if root is None:
        return None
    parts = file.relative_to(root).with_suffix("").parts if file.suffix == ".py" else file.relative_to(root).parts[:-1]
    modules = build_graph().modules
    while parts:
        module = ".".join(part for part in parts if part != "__init__")
        if module in modules:
            return module
        parts = parts[:-1]
    return None


def find_affected(module: str) -> set[str]:
    """Find a module and all that import it, directly or not; of a package, also what imports its modules."""
    graph = build_graph()
    members = {module, *graph.find_descendants(module)} if module in graph.modules else {module}
    return members.union(*(graph.find_downstream_modules(member) for member in members if member in graph.modules))


@cache
def list_imports(file: Path) -> frozenset[str]:
    """List the modules that a test file imports, with those of tests/support and lab that it imports, as
    `support.NAME`."""
    modules: set[str] = set()
    source = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    for module in list(modules):
        supports = [folder / f"{module.replace('.', '/')}.py" for folder in SUPPORT]
        if found := [support for support in supports if support.is_file() and support != file]:
            modules |= {f"support.{module}", *list_imports(found[0])}
        elif (REPOSITORY / f"scripts/{module}.py").is_file():
            modules.add(f"scripts.{module}")
    if any(word in source for word in READS_PROSE):
        modules.add("prose")
    return frozenset(modules)


def list_dependencies(folder: Path, files: Iterable[Path]) -> set[str]:
    """List the modules on which a folder of tests depends."""
    conftests = [at / "conftest.py" for at in (TESTS, *folder.parents, folder) if at.is_relative_to(TESTS)]
    sources = [*files, *(file for file in set(conftests) if file.exists())]
    modules = set().union(*(list_imports(file) for file in sources))
    if folder.parent.name != "unit":
        graph, package = build_graph(), f"forage_{folder.name.partition('_')[0]}"
        modules |= {package, *graph.find_descendants(package)} if package in graph.modules else set()
        if folder.parent.name in ("e2e", "system"):
            modules |= {module for module in graph.modules if module.startswith("forage_")}
    return modules


def select_changed(files: Sequence[Path], commit: str) -> tuple[list[Path], bool]:
    """Select the test files in folders that a change since a commit can affect, and whether the front end is."""
    changed = list_changed_files(commit)
    touched: set[str] = set()
    folders: set[Path] = set()
    for name in changed:
        path = Path(name)
        if path.suffix in PROSE:
            touched.add("prose")
            continue
        if name.startswith(FRONT_END):
            continue
        if (module := find_module(name)) is not None:
            touched |= find_affected(module)
        elif path.suffix == ".py" and (support := next(filter((REPOSITORY / name).is_relative_to, SUPPORT), None)):
            touched.add(f"support.{'.'.join((REPOSITORY / name).relative_to(support).with_suffix('').parts)}")
        elif name.startswith("scripts/") and path.suffix == ".py":
            touched.add(f"scripts.{path.stem}")
        elif len(path.parts) > 3 and path.parts[0] == "tests" and path.parts[1] != "data":
            folders.add(REPOSITORY.joinpath(*path.parts[:3]))
        else:
            print(f"test-changed: all tests, because of {name}")
            return list(files), True
    by_folder: dict[Path, list[Path]] = {}
    for file in files:
        by_folder.setdefault(TESTS.joinpath(*file.relative_to(TESTS).parts[:2]), []).append(file)
    selected = {
        folder
        for folder, members in by_folder.items()
        if folder in folders or touched & list_dependencies(folder, members)
    }
    print(f"test-changed: {len(changed)} files changed, {len(selected)} of {len(by_folder)} folders are affected")
    chosen = [file for folder in sorted(selected) for file in by_folder[folder]]
    return chosen, any(name.startswith(FRONT_END) for name in changed)
