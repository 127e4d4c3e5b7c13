"""A training in the background: the same command without a terminal, which outlives the one that started it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from forage_cli.local.processes import find_supervisor
from forage_cli.local.stack import RECORD
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings

LOG = "logs/train.log"
"""File in the folder of a run with the output of the command."""
_FORAGE = (sys.executable, "-c", "from forage_cli.main import main; main()")
_START_S = 300.0
"""The checks before the start and the world facts take seconds; a plan for many GPUs longer."""
_POLL_S = 0.2


def start_detached(settings: Settings, arguments: Sequence[str]) -> int:
    """Start `forage` with these arguments in a session of its own, and wait until it has started the services.

    Returns:
        The process id. SIGTERM stops it and the services.

    Raises:
        UserError: it ended before; the message is the last line of its output.
    """
    folder = settings.run.folder.absolute()
    file = folder / LOG
    file.parent.mkdir(parents=True, exist_ok=True)
    # Kept open, since a run that ends by a user's error removes its folder.
    with file.open("a+b") as log:
        begin = log.tell()
        process = subprocess.Popen(
            [*_FORAGE, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_for_services(process, folder)
        except BaseException:
            process.terminate()
            raise
        if process.returncode:
            _remove_empty(file)
            raise UserError(_read_error(log, begin) or f"the training ended with exit code {process.returncode}")
    return process.pid


def _wait_for_services(process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        supervisor = find_supervisor(folder / RECORD)
        if supervisor is not None and supervisor.pid == process.pid:
            return
        time.sleep(_POLL_S)  # wait: has a time limit


def _remove_empty(file: Path) -> None:
    """Remove the log of a training that never began, with its folders where nothing else is in them."""
    if (file.parent.parent / "settings.yaml").exists():
        return
    file.unlink(missing_ok=True)
    for folder in (file.parent, file.parent.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _read_error(log: BinaryIO, begin: int) -> str:
    """The sentence with which the training ended, or one for each problem; else its last line."""
    log.seek(begin)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    sentences = [line.removeprefix("forage: ") for line in lines if line.startswith("forage: ")]
    return "\n".join(sentences or lines[-1:])
