"""Brings what Ray's workers write to stderr to the stderr of the main process, where a supervisor reads it.

Ray sends its workers' output to files in a folder that goes away with it; a pipe with a name goes around that.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

ENVIRONMENT = "FORAGE_ROLLOUT_STDERR"
_CHUNK = 65536


class LogRelay:
    """The main process's end: copies until the process ends."""

    def __init__(self, folder: Path) -> None:
        path = folder / "stderr"
        os.mkfifo(path, mode=0o600)
        os.environ[ENVIRONMENT] = str(path)
        # Opened for writing, too: the pipe never ends because the last worker left.
        self._pipe = os.open(path, os.O_RDWR)
        threading.Thread(target=self._copy, name="log-relay", daemon=True).start()

    def _copy(self) -> None:
        while chunk := os.read(self._pipe, _CHUNK):
            sys.stderr.write(chunk.decode(errors="replace"))
            sys.stderr.flush()


def join() -> None:
    """A worker's end: from here on its stderr is the main process's. Without a main process nothing happens."""
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return  # the main process is gone or elsewhere: Ray's own files keep the output
    os.set_blocking(pipe, True)
    os.dup2(pipe, 2)
    os.close(pipe)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
