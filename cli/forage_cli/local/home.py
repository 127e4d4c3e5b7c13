"""What the `forage` command needs besides itself: the services with their environments, recipes, the tiny models.

In a checkout all of it lies beside the command. A wheel of the command (scripts/wheel.py) has it as an archive. The
archive is unpacked on first use, below FORAGE_HOME; the environment of a service is installed there, from the service's
lock, when it is needed first.
"""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from forage_runtime.errors import UserError
from forage_runtime.files.folders import remove_leftovers, stage_folder
from forage_runtime.settings import Settings, check_settings, load_settings

_PACKAGE = Path(__file__).resolve().parents[1]
ARCHIVE, DIGEST = "home.tar.gz", "home.digest"
"""Files of a wheel's package: the archive, and its version and digest as text."""
FOLDER_VARIABLE = "FORAGE_HOME"
DEMO = Path("configs/demo.yaml")
"""The recipe of commands that are given none, below `find_home`."""


@functools.cache
def find_home() -> Path:
    """Return the folder with services/, configs/ and models/: the checkout, or what the wheel unpacks.

    Raises:
        UserError: the command was installed without them, as in an image.
    """
    if is_checkout():
        return _PACKAGE.parents[1]
    if not (_PACKAGE / ARCHIVE).is_file():
        raise UserError(
            "this command needs the services, recipes and models of Forage, and the command alone is installed: use a "
            "checkout after 'make setup' or a wheel of 'make wheel', or give --config if the services run elsewhere"
        )
    return unpack(_PACKAGE, _find_data_folder())


def unpack(package: Path, data: Path) -> Path:
    """Unpack the archive of a package, unless that was done before; returns the folder.

    Args:
        data: folder with a folder for each archive, as wheels of several versions may be in use.
    """
    folder = data / (package / DIGEST).read_text(encoding="utf-8").strip()
    if not folder.is_dir():
        data.mkdir(parents=True, exist_ok=True)
        with (data / ".unpack.lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # wait: another command unpacks it
            if not folder.is_dir():
                remove_leftovers(data)
                with stage_folder(folder) as staging, tarfile.open(package / ARCHIVE) as archive:
                    archive.extractall(staging, filter="data")
    return folder


def _find_data_folder() -> Path:
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given).absolute()
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share", "forage").absolute()


def is_checkout() -> bool:
    """Whether the command belongs to a checkout, whose environments `make setup` installs."""
    return (_PACKAGE.parents[1] / "services").is_dir()


def describe_setup(device: str = "") -> str:
    """Name the command that installs the environments of the services."""
    if is_checkout():
        return f"'make setup{f' DEVICE={device}' if device else ''}'"
    return f"'forage setup{f' --device {device}' if device else ''}'"


def locate_interpreter(service: str) -> Path:
    """Return where the Python of a service's environment is or will be; raises as `find_home`."""
    return find_home() / ".venvs" / service / "bin" / "python"


def is_installed(service: str) -> bool:
    """Whether a service's environment is here and complete; an image has that of one service."""
    try:
        return (locate_interpreter(service).parents[1] / ".installed").exists()  # setup.sh writes it last
    except UserError:
        return False


def find_interpreter(service: str) -> Path:
    """Return the Python of a service's environment, which a wheel's command installs where it is missing.

    Raises:
        UserError: it is not installed in a checkout, or cannot be installed.
    """
    python = locate_interpreter(service)
    if not is_installed(service):
        if is_checkout():
            raise UserError(
                f"the {service} environment is not installed ({python.parent.parent}): run {describe_setup()}"
            )
        install([service])
    return python


def install(services: Sequence[str] = (), device: str = "") -> None:
    """Install environments from their locks, all by default; what is current stays. Progress is on stderr.

    Args:
        device: cpu, gpu or gpu-base; empty: that of the last time.

    Raises:
        UserError: one cannot be installed.
    """
    home = find_home()
    with (home / ".setup.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # wait: another command installs them
        options = [*([] if is_checkout() else ["--production"]), *(["--device", device] if device else [])]
        done = subprocess.run([str(home / "scripts" / "setup.sh"), *options, *services], cwd=home)
    if done.returncode:
        raise UserError(f"not all environments in {home / '.venvs'} could be installed: see above, then try again")


def load_recipe(config: Path | None, overrides: Iterable[str]) -> Settings:
    """Load settings of a file, which may be one of Forage's own recipes, from any folder.

    `model.path` may be a model of Forage's own, and the code of a recipe, `FILE.py:NAME`, an example of its own: what
    is in the working directory goes first.

    Raises:
        UserError: as `load_settings`.
    """
    settings = load_settings(config and _find_shipped(config), list(overrides))
    tree = settings.model_dump(mode="json")
    placed = _place_code(tree)
    if placed != tree:
        settings = check_settings(placed)
    path = _find_shipped(settings.model.path)
    return settings.model_copy(update={"model": settings.model.model_copy(update={"path": path})})


def _place_code(value: Any) -> Any:
    """The values of settings with each `FILE.py:NAME` where `_find_shipped` finds it."""
    if isinstance(value, dict):
        return {key: _place_code(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_place_code(one) for one in value]
    file, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return f"{_find_shipped(Path(file))}{colon}{name}" if file.endswith(".py") else value


def _find_shipped(path: Path) -> Path:
    """Find a file or folder in the working directory, else in Forage's own; the same path where it is in neither."""
    if path.exists() or path.is_absolute():
        return path
    try:
        shipped = find_home() / path
    except UserError:
        return path
    return shipped if shipped.exists() else path
