"""`scripts/release.py` keeps one version everywhere."""

from __future__ import annotations

import datetime
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from check_structure import list_packages
from release import (
    PAGES,
    PLACES,
    REPOSITORY,
    ReleaseError,
    check_version,
    find_missing_files,
    list_images,
    read_versions,
    set_version,
)

TODAY = datetime.date(2026, 12, 1)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of every file that contains the version."""
    for glob in (*PLACES, "CHANGELOG.md"):
        for file in REPOSITORY.glob(glob):
            copy = tmp_path / file.relative_to(REPOSITORY)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    return tmp_path


def test_all_files_of_the_repository_have_one_version() -> None:
    check_version(REPOSITORY)


def test_setting_a_version_changes_every_file_and_dates_the_changelog(tree: Path) -> None:
    before = read_versions(tree)
    set_version(tree, "7.8.9rc1", TODAY)
    assert read_versions(tree) == {name: {"7.8.9rc1"} for name in before}
    assert "## [Unreleased]\n\n## [7.8.9rc1] - 2026-12-01" in (tree / "CHANGELOG.md").read_text()
    assert check_version(tree) == "7.8.9rc1"
    assert 'appVersion: "7.8.9rc1"\n' in (tree / "deploy/helm/forage/Chart.yaml").read_text()


def test_setting_a_version_twice_adds_one_changelog_section(tree: Path) -> None:
    set_version(tree, "7.8.9", TODAY)
    set_version(tree, "7.8.9", TODAY)
    assert (tree / "CHANGELOG.md").read_text().count("## [7.8.9]") == 1


@pytest.mark.parametrize("version", ["", "1", "1.2", "v1.2.3", "1.2.3-beta", "1.2.3; rm"])
def test_an_invalid_version_is_refused_and_nothing_is_written(tree: Path, version: str) -> None:
    before = read_versions(tree)
    with pytest.raises(ReleaseError, match="is not a version: give one like"):
        set_version(tree, version, TODAY)
    assert read_versions(tree) == before


def test_files_that_disagree_are_named(tree: Path) -> None:
    chart = tree / "deploy/helm/forage/Chart.yaml"
    chart.write_text(chart.read_text().replace('appVersion: "', 'appVersion: "9.'))
    with pytest.raises(ReleaseError, match=r"(?s)disagree.*deploy/helm/forage/Chart.yaml: .*9\."):
        check_version(tree)


def test_a_version_without_a_changelog_section_is_refused(tree: Path) -> None:
    version = check_version(tree)
    changelog = tree / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(f"## [{version}]", "## [old]"))
    with pytest.raises(ReleaseError, match=r"CHANGELOG.md has no section"):
        check_version(tree)


def test_every_service_has_an_image_and_gpu_services_have_two() -> None:
    listed = list_images("1.2.3")
    assert {f"forage/{name}:1.2.3" for name in ("cli", "retriever", "reward", "rollout", "trainer")} <= set(listed)
    assert "forage/rollout:1.2.3-gpu" in listed
    assert "forage/cli:1.2.3-gpu" not in listed


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A folder with a wheel and a chart that contain the committed files of packages and chart, and pages."""
    committed = subprocess.check_output(
        ["git", "ls-files", "libs/*/forage_*", "services/*/forage_*", "cli/forage_*", "deploy/helm"],
        cwd=REPOSITORY,
        text=True,
    )
    listed = f"{committed}{PAGES}"
    with (
        zipfile.ZipFile(tmp_path / "forage-0-py3-none-any.whl", "w") as wheel,
        tarfile.open(tmp_path / "forage-0.tgz", "w:gz", dereference=True) as chart,
    ):
        wheel.writestr("forage-0.dist-info/licenses/LICENSE", "")
        for file in listed.splitlines():
            if file.startswith("deploy/helm/"):
                chart.add(REPOSITORY / file, file.removeprefix("deploy/helm/"))
            else:
                wheel.writestr(file[file.index("forage_") :], "")
    return tmp_path


def test_a_release_with_all_committed_files_is_complete(packed: Path) -> None:
    assert find_missing_files(packed) == []


def test_files_that_a_wheel_or_the_chart_lacks_are_found(packed: Path) -> None:
    (packed / "forage-0-py3-none-any.whl").unlink()
    missing = find_missing_files(packed)
    assert {"cli/forage_cli/reports/run.html", "libs/runtime/forage_runtime/py.typed"} <= set(missing)
    assert PAGES in missing
    assert not any(file.startswith("deploy/") for file in missing)


def test_a_wheel_without_a_license_is_found(packed: Path) -> None:
    with zipfile.ZipFile(packed / "other-0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("LICENSE", "")
    assert find_missing_files(packed) == ["other-0-py3-none-any.whl/LICENSE"]


def test_every_package_has_the_license_that_its_wheel_contains() -> None:
    packages = [package for package in list_packages(REPOSITORY) if package.name != "forage_models"]
    assert len(packages) == 14
    for package in packages:
        assert (package.parent / "LICENSE").read_bytes() == (REPOSITORY / "LICENSE").read_bytes()
