"""Builds dist/forage_cli-<version>-py3-none-any.whl: the `forage` command with all that it starts.

The wheel holds the packages of the command's environment, whose lock is its list of requirements, and an archive with
what the environments of the services are made of: sources, locks, recipes, the tiny models and the console's pages
(forage_cli/local/home.py unpacks it).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from forage_cli.local.console import PAGE
from forage_cli.local.home import ARCHIVE, DIGEST

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = (
    *("LICENSE", "cli", "configs", "examples", "libs", "models", "services"),
    *("scripts/setup.sh", "scripts/services.txt", "scripts/requirements-setup.lock"),
)
"""What of the checkout is in the archive, besides the console's pages."""
_PROJECT = """\
[build-system]
requires = ["hatchling==1.28.0"]
build-backend = "hatchling.build"

[project]
name = "forage-cli"
version = "{version}"
description = "{description}"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = {dependencies}

[project.scripts]
forage = "forage_cli.main:main"

[tool.hatch.build.targets.wheel]
packages = {packages}
artifacts = ["{archive}"]
"""


def list_files() -> list[Path]:
    """List the files of the archive, relative to the checkout.

    Raises:
        SystemExit: the console's pages are not built.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", *SHIPPED], cwd=ROOT, capture_output=True, check=True, text=True, encoding="utf-8"
    )
    if not (ROOT / PAGE).is_file():
        raise SystemExit("wheel: the console's pages are not built: run 'make console'")
    pages = [path.relative_to(ROOT) for path in (ROOT / PAGE).parent.rglob("*") if path.is_file()]
    files = {Path(name) for name in listed.stdout.split("\0") if name} | set(pages)
    return sorted(path for path in files if (ROOT / path).is_file() and "web" not in path.parts)


def make_archive(files: Iterable[Path]) -> bytes:
    """Make the archive: the same bytes for the same files."""
    content = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=content, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in files:
            data, info = (ROOT / path).read_bytes(), tarfile.TarInfo(path.as_posix())
            info.size, info.mode = len(data), 0o755 if (ROOT / path).stat().st_mode & 0o100 else 0o644
            archive.addfile(info, io.BytesIO(data))
    return content.getvalue()


def list_requirements(lock: str) -> list[str]:
    """List the requirements of a lock, without hashes."""
    lines = (line.removesuffix("\\").strip() for line in lock.splitlines() if line and line[0] not in " #")
    return list(lines)


def build(out: Path) -> None:
    """Build the wheel into a folder."""
    project = tomllib.loads((ROOT / "cli/pyproject.toml").read_text(encoding="utf-8"))["project"]
    included = (ROOT / "cli/requirements.in").read_text(encoding="utf-8")
    libraries = re.findall(r"(?m)^-r \.\./libs/(\w+)/base\.in", included)
    packages = [ROOT / "cli/forage_cli", *(ROOT / f"libs/{name}/forage_{name}" for name in libraries)]
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        for package in packages:
            shutil.copytree(package, stage / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        archive = make_archive(list_files())
        (stage / "forage_cli" / ARCHIVE).write_bytes(archive)
        digest = f"{project['version']}-{hashlib.sha256(archive).hexdigest()[:12]}\n"
        (stage / "forage_cli" / DIGEST).write_text(digest, encoding="utf-8")
        text = _PROJECT.format(
            version=project["version"],
            description=project["description"],
            dependencies=list_requirements((ROOT / "cli/requirements.lock").read_text(encoding="utf-8")),
            packages=[package.name for package in packages],
            archive=ARCHIVE,
        )
        (stage / "pyproject.toml").write_text(text, encoding="utf-8")
        command = [ROOT / ".venvs/uv/bin/uv", "build", "--quiet", "--wheel", "--out-dir", out.absolute(), stage]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (dist)")
    arguments = parser.parse_args()
    build(arguments.out)
    sys.stdout.writelines(f"{wheel}\n" for wheel in sorted(arguments.out.glob("forage_cli-*.whl")))
