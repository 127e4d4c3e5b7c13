"""The size of the house: a table of budgets, and a limit on the modules of a package; `make lint` runs this.

The budgets are goals: what is above one is shown, and is a reason to delete before something is added. A package of
more modules than the limit needs sub-packages that name its parts: exits with 1 and prints a line for each of them.
Generated code (`v1/`) and generated pages are not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ROOTS = ("libs/*", "services/*", "cli", "models")
"""The folders of packages."""
MAX_MODULES = 15
"""Modules in one package, sub-packages not included."""
GENERATED = ("api", "cli", "metrics", "models", "settings", "templates")
"""The pages of docs/reference that `make reference` and the lab write."""


WALKS = "scripts/walks.txt"
"""The files to open to follow one prompt and one policy: a headline a walk, a line a file."""
WALK_GOALS = (30, 15)


@dataclass(frozen=True)
class Budget:
    """Something that is counted; goal: None where there is none."""

    what: str
    count: int
    goal: int | None = None

    def __str__(self) -> str:
        if self.goal is None:
            return f"{self.what:<34} {self.count:>8,}"
        over = "" if self.count <= self.goal else f", {self.count - self.goal:,} above it"
        return f"{self.what:<34} {self.count:>8,}   budget {self.goal:,}{over}"


def list_packages(repository: Path) -> list[Path]:
    """List the top folder of every package of a repository: of libraries, services, command and models."""
    return sorted([file for root in ROOTS for file in repository.glob(f"{root}/forage_*")])


def list_modules(package: Path) -> list[Path]:
    """List every module that is not generated."""
    return [file for file in sorted(package.rglob("*.py")) if "v1" not in file.parts]


def list_pages() -> list[Path]:
    """List the pages of the documentation that are written by hand."""
    readmes = [page for root in (".", *ROOTS) for page in REPOSITORY.glob(f"{root}/README.md")]
    readmes.append(REPOSITORY / "CONTRIBUTING.md")
    pages = (REPOSITORY / "docs").rglob("*.md")
    return [*readmes, *(page for page in pages if page.parent.name != "reference" or page.stem not in GENERATED)]


def read_walks() -> dict[str, list[Path]]:
    """Read the files of each walk, by its headline."""
    walks: dict[str, list[Path]] = {}
    for line in (REPOSITORY / WALKS).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            files = walks.setdefault(line.removeprefix("## "), [])
        elif line and not line.startswith("#"):
            files.append(REPOSITORY / line.split()[0])
    return walks


def count_walks() -> Iterator[Budget]:
    """Count the files of each walk, and their lines."""
    for (walk, files), goal in zip(read_walks().items(), WALK_GOALS, strict=True):
        name = walk.partition(",")[0]
        yield Budget(f"files to follow {name}", len(files), goal)
        yield Budget(f"their lines, of {name}", sum(count_lines(file) for file in files if file.is_file()))


def count_budgets() -> list[Budget]:
    """Count what has a budget, and the lines of tests, which have none."""
    from forage_cli.settings_reference import describe_sections

    product = sum(count_lines(file) for package in list_packages(REPOSITORY) for file in list_modules(package))
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in list_pages())
    settings = sum(len(section.settings) for section in describe_sections())
    return [
        Budget("lines of product Python", product, 58_000),
        Budget("lines of tests and their support", sum(map(count_lines, (REPOSITORY / "tests").rglob("*.py")))),
        Budget("lines of lab", sum(map(count_lines, (REPOSITORY / "lab").rglob("*.py")))),
        Budget("settings", settings, 230),
        Budget("words of pages written by hand", words, 55_000),
        *count_walks(),
    ]


def count_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def find_violations() -> Iterator[str]:
    """Find every package that exceeds the limit, and every file of a walk that is gone: one message each."""
    for walk, files in read_walks().items():
        for file in files:
            if not file.is_file():
                yield f"{WALKS} names {file.relative_to(REPOSITORY)} on the way of {walk}: it is gone, change it"
    for package in list_packages(REPOSITORY):
        files = list_modules(package)
        for folder in sorted({file.parent for file in files}):
            count = sum(file.parent == folder and file.name != "__init__.py" for file in files)
            if count > MAX_MODULES:
                where = folder.relative_to(REPOSITORY)
                yield f"{where} has {count} modules, at most {MAX_MODULES}: give it sub-packages that name its parts"


if __name__ == "__main__":
    sys.stdout.writelines(f"structure: {budget}\n" for budget in count_budgets())
    violations = list(find_violations())
    sys.stderr.writelines(f"structure: {line}\n" for line in violations)
    sys.exit(bool(violations))
