"""Limits that keep the tree readable; `make lint` runs this beside the import rules of `.importlinter`.

Generated code (`v1/`) is left out. Exits 1 with a line for each place that is over a limit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
MAX_MODULES = 15
"""Modules side by side in one package; beyond that it wants sub-packages that name its parts."""
MAX_LINES = 400
"""Lines of a module; beyond that look for its second subject."""
MAX_COMMON_LINES = 5000
"""Lines of forage_common: what every service imports stays small."""


def packages() -> list[Path]:
    """The top folder of every package of ours."""
    return sorted([*REPOSITORY.glob("services/*/forage_*"), *REPOSITORY.glob("models/forage_*")])


def modules(package: Path) -> list[Path]:
    """Every module that a person wrote."""
    return [file for file in sorted(package.rglob("*.py")) if "v1" not in file.parts]


def line_count(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def violations() -> Iterator[str]:
    for package in packages():
        files = modules(package)
        for file in files:
            if (lines := line_count(file)) > MAX_LINES:
                yield f"{file.relative_to(REPOSITORY)} has {lines} lines, at most {MAX_LINES}: split it by subject"
        for folder in sorted({file.parent for file in files}):
            count = sum(file.parent == folder and file.name != "__init__.py" for file in files)
            if count > MAX_MODULES:
                where = folder.relative_to(REPOSITORY)
                yield f"{where} has {count} modules, at most {MAX_MODULES}: give it sub-packages that name its parts"
    common = REPOSITORY / "services/common/forage_common"
    if (total := sum(map(line_count, modules(common)))) >= MAX_COMMON_LINES:
        yield f"forage_common has {total} lines, fewer than {MAX_COMMON_LINES} allowed: move out what one service uses"


if __name__ == "__main__":
    found = list(violations())
    sys.stderr.writelines(f"structure: {line}\n" for line in found)
    sys.exit(bool(found))
