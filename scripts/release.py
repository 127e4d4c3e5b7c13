"""Sets the project's one version in packages, images and chart, and builds a release.

    release.py check              check that all files have the same version and CHANGELOG.md has a section for it
    release.py set 0.2.0          write the version everywhere, and rename CHANGELOG.md's Unreleased section to it
    release.py build [--no-tag]   check, then build wheels, chart, list of images and bills of materials into dist/,
                                  and tag v0.2.0

Building needs a clean work tree and runs `make lint`. It pushes nothing: at the end it prints the commands that
publish.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import check_structure
import sbom
import tools

REPOSITORY = Path(__file__).resolve().parents[1]
DIST = REPOSITORY / "dist"
CHART = "deploy/helm/forage"
PLACES = {
    "libs/*/pyproject.toml": r'^version = "(.+)"$',
    "services/*/pyproject.toml": r'^version = "(.+)"$',
    "cli/pyproject.toml": r'^version = "(.+)"$',
    "libs/runtime/forage_runtime/__init__.py": r'^__version__ = "(.+)"$',
    f"{CHART}/Chart.yaml": r'^(?:version: |appVersion: ")([^"\n]+)"?$',
    ".env": r"^FORAGE_VERSION=(.+)$",
}
"""Files (globs) that contain the version, and the pattern whose first group is the version."""
PAGES = "services/console/forage_console/static/index.html"
"""A file that is built, not committed, and that a wheel has to contain."""
CHANGELOG = "CHANGELOG.md"
_VERSION = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
_UNRELEASED = "## [Unreleased]"


class ReleaseError(Exception):
    """The release cannot continue; the message names the cause and the remedy."""


def read_versions(root: Path) -> dict[str, set[str]]:
    """Read the versions in every file of `PLACES`, by file name.

    Raises:
        ReleaseError: a file is missing or contains no version.
    """
    versions: dict[str, set[str]] = {}
    for glob, pattern in PLACES.items():
        files = sorted(root.glob(glob))
        if not files:
            raise ReleaseError(f"{glob} matches no file: correct PLACES in scripts/release.py")
        for file in files:
            name = str(file.relative_to(root))
            versions[name] = set(re.findall(pattern, file.read_text(encoding="utf-8"), re.M))
            if not versions[name]:
                raise ReleaseError(f"{name} contains no version: expected a line that matches {pattern}")
    return versions


def check_version(root: Path) -> str:
    """Check that every file has the same version, and return it.

    Raises:
        ReleaseError: files disagree, or the changelog has no section for it.
    """
    versions = read_versions(root)
    distinct = set().union(*versions.values())
    if len(distinct) != 1:
        lines = "\n".join(f"  {name}: {', '.join(sorted(values))}" for name, values in versions.items())
        raise ReleaseError(f"files disagree about the version: run 'make version VERSION=…'\n{lines}")
    version = distinct.pop()
    if f"## [{version}]" not in (root / CHANGELOG).read_text(encoding="utf-8"):
        raise ReleaseError(f"{CHANGELOG} has no section '## [{version}]': run 'make version VERSION={version}'")
    return version


def set_version(root: Path, version: str, today: datetime.date) -> None:
    """Write the version into every file, and date the changelog's Unreleased section.

    Raises:
        ReleaseError: not a version, or the changelog has no Unreleased section.
    """
    if not _VERSION.fullmatch(version):
        raise ReleaseError(f"'{version}' is not a version: give one like 0.2.0 or 0.2.0rc1")
    changelog = root / CHANGELOG
    text = changelog.read_text(encoding="utf-8")
    if _UNRELEASED not in text:
        raise ReleaseError(f"{CHANGELOG} has no section '{_UNRELEASED}': add one above the newest version")
    read_versions(root)
    for glob, pattern in PLACES.items():
        for file in root.glob(glob):
            file.write_text(_replace_group(pattern, version, file.read_text(encoding="utf-8")), encoding="utf-8")
    if f"## [{version}]" not in text:
        heading = f"{_UNRELEASED}\n\n## [{version}] - {today.isoformat()}"
        changelog.write_text(text.replace(_UNRELEASED, heading, 1), encoding="utf-8")


def _replace_group(pattern: str, value: str, text: str) -> str:
    def replace(match: re.Match[str]) -> str:
        begin, end = match.span(1)
        return match[0][: begin - match.start()] + value + match[0][end - match.start() :]

    return re.sub(pattern, replace, text, flags=re.M)


def build(tag: bool) -> None:
    """Build wheels, chart, images.txt, bills of materials and SHA256SUMS into dist/, and create the tag.

    Raises:
        ReleaseError: the work tree is not clean, a check fails, the tag exists, or a package is incomplete.
    """
    version = check_version(REPOSITORY)
    name = f"v{version}"
    if changed := _run("git", "status", "--porcelain"):
        raise ReleaseError(f"the work tree is not clean: commit or stash first\n{changed}")
    if tag and _run("git", "tag", "--list", name):
        raise ReleaseError(f"the tag {name} exists: set the next version with 'make version VERSION=…'")
    if subprocess.run([REPOSITORY / "scripts/lint.sh"]).returncode:
        raise ReleaseError("'make lint' fails (see above): correct that first")
    if subprocess.run([REPOSITORY / "scripts/console.sh"]).returncode:
        raise ReleaseError("the console's pages could not be built (see above)")
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    for package in check_structure.list_packages(REPOSITORY):
        if package.name == "forage_models":  # it makes what this repository ships
            continue
        tools.run_uv("build", "--wheel", "--out-dir", str(DIST), str(package.parent))
    (DIST / ".gitignore").unlink(missing_ok=True)
    _run(str(tools.install_helm(max(tools.HELMS))), "package", CHART, "--destination", str(DIST))
    if missing := find_missing_files(DIST):
        raise ReleaseError(f"wheels or chart lack files of the repository: {', '.join(missing)}")
    (DIST / "images.txt").write_text("".join(f"{image}\n" for image in list_images(version)), encoding="utf-8")
    committed = datetime.datetime.fromisoformat(_run("git", "log", "-1", "--format=%cI"))
    sbom.write_boms(DIST, version, committed.astimezone(datetime.UTC))
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    for file in sorted(DIST.iterdir()):
        print(f"  dist/{file.name}")
    if tag:
        _run("git", "tag", "--annotate", name, "--message", f"Forage {version}")
        print(
            f"tagged {name}; to publish: git push origin {name}, make images REGISTRY=…, helm push dist/forage-*.tgz …"
        )


def find_missing_files(folder: Path) -> list[str]:
    """List files of packages and chart that no wheel or chart in `folder` contains as a regular file: all that are
    committed, and the console's pages.

    Every wheel needs a license of its own: hatchling packs the LICENSE beside each pyproject.toml. The chart's rules
    and dashboards are symbolic links in the repository.
    """
    packed: set[str] = set()
    unlicensed = []
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            packed |= set(archive.namelist())
            if not any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist()):
                unlicensed.append(f"{wheel.name}/LICENSE")
    for chart in folder.glob("forage-*.tgz"):
        with tarfile.open(chart) as archive:
            packed |= {f"deploy/helm/{member.name}" for member in archive.getmembers() if member.isfile()}
    packages = ("libs/*/forage_*", "services/*/forage_*", "cli/forage_*")
    expected = [*_run("git", "ls-files", *packages, CHART).splitlines(), PAGES]
    return unlicensed + [file for file in expected if re.sub(r"^(libs/\w+|services/\w+|cli)/", "", file) not in packed]


def list_images(version: str) -> list[str]:
    """List every image of a release: the CPU images, then the GPU images."""
    on_gpus = [service for service, home in tools.HOMES.items() if (home / "requirements.gpu.lock").exists()]
    return [
        *(f"forage/{service}:{version}" for service in tools.HOMES),
        *(f"forage/{service}:{version}-gpu" for service in on_gpus),
    ]


def _run(*command: str) -> str:
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, encoding="utf-8")
    if ended.returncode:
        raise ReleaseError(f"{' '.join(command)}: {ended.stderr.strip()}")
    return ended.stdout.strip()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="check that the version is the same everywhere")
    commands.add_parser("set", help="write the version everywhere").add_argument("version")
    commands.add_parser("build", help="build into dist/ and tag").add_argument("--no-tag", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if options.command == "set":
            set_version(REPOSITORY, options.version, datetime.date.today())
        elif options.command == "build":
            build(tag=not options.no_tag)
        print(f"version {check_version(REPOSITORY)}")
    except (ReleaseError, tools.ToolError, subprocess.CalledProcessError) as error:
        print(f"release: {error}", getattr(error, "stderr", None) or "", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
