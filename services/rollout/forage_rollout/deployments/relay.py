"""The stderr of Ray's workers, copied to the stderr of the main process, where a supervisor reads it.

Ray writes its workers' output to files in a folder that it removes at its end; a named pipe bypasses them.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

STDERR_VARIABLE = "FORAGE_ROLLOUT_STDERR"
_CHUNK = 65536


class LogRelay:
    """The reading end, in the main process: copies until the process ends."""

    def __init__(self, folder: Path) -> None:
        path = folder / "stderr"
        os.mkfifo(path, mode=0o600)
        os.environ[STDERR_VARIABLE] = str(path)
        # Opened for writing, too: else the pipe would end together with the last worker that writes.
        self._pipe = os.open(path, os.O_RDWR)
        threading.Thread(target=self._copy, name="log-relay", daemon=True).start()

    def _copy(self) -> None:
        while chunk := os.read(self._pipe, _CHUNK):
            sys.stderr.write(chunk.decode(errors="replace"))
            sys.stderr.flush()


def redirect_stderr() -> None:
    """Send this worker's stderr to the main process from now on; without a `LogRelay` nothing happens."""
    path = os.environ.get(STDERR_VARIABLE)
    if not path:
        return
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return  # the main process has ended or runs on another node: Ray's own files keep the output
    os.set_blocking(pipe, True)
    os.dup2(pipe, 2)
    os.close(pipe)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
