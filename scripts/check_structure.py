"""Limits on the size of modules and packages; `make lint` runs this beside the import rules of `.importlinter`.

Generated code (`v1/`) is exempt. Exits with 1 and prints a line for each violation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
MAX_MODULES = 15
"""Modules in one package, sub-packages not included; a larger package needs sub-packages that name its parts."""
MAX_LINES = 400
"""Lines of a module; a longer one probably has two subjects."""
MAX_COMMON_LINES = 10_650
"""Lines of forage_common, which stays small because every service imports it."""


def list_packages() -> list[Path]:
    """List the top folder of every package of this repository."""
    return sorted([*REPOSITORY.glob("services/*/forage_*"), *REPOSITORY.glob("models/forage_*")])


def list_modules(package: Path) -> list[Path]:
    """List every module that is not generated."""
    return [file for file in sorted(package.rglob("*.py")) if "v1" not in file.parts]


def count_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def find_violations() -> Iterator[str]:
    """Find every module and package that exceeds a limit: one message each."""
    for package in list_packages():
        files = list_modules(package)
        for file in files:
            if (lines := count_lines(file)) > MAX_LINES:
                yield f"{file.relative_to(REPOSITORY)} has {lines} lines, at most {MAX_LINES}: split it by subject"
        for folder in sorted({file.parent for file in files}):
            count = sum(file.parent == folder and file.name != "__init__.py" for file in files)
            if count > MAX_MODULES:
                where = folder.relative_to(REPOSITORY)
                yield f"{where} has {count} modules, at most {MAX_MODULES}: give it sub-packages that name its parts"
    common = REPOSITORY / "services/common/forage_common"
    if (total := sum(map(count_lines, list_modules(common)))) >= MAX_COMMON_LINES:
        yield f"forage_common has {total} lines, fewer than {MAX_COMMON_LINES} allowed: move out what one service uses"


if __name__ == "__main__":
    violations = list(find_violations())
    sys.stderr.writelines(f"structure: {line}\n" for line in violations)
    sys.exit(bool(violations))
