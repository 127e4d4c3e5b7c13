"""A folder for sockets whose paths an operating system takes: 107 bytes on Linux, 103 elsewhere."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from forage_runtime.errors import UserError

_LIMIT_BYTES = 107 if sys.platform == "linux" else 103
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def find_socket_folder(longest: str) -> Path:
    """Find where to put sockets: the folder of temporary files, or a shorter one where a path would be too long.

    Args:
        longest: path of a socket below the folder that is as long as any.

    Raises:
        UserError: no folder is short enough and can be written to.
    """
    temporary, room = tempfile.gettempdir(), _LIMIT_BYTES - 1 - len(os.fsencode(longest))
    for folder in (temporary, *_SHORT):
        if len(os.fsencode(folder)) <= room and os.access(folder, os.W_OK | os.X_OK):
            return Path(folder)
    raise UserError(
        f"TMPDIR is {temporary}, and the path of a socket in it is longer than {_LIMIT_BYTES} bytes: set TMPDIR to a "
        f"folder whose path has at most {room} bytes, or make /tmp writable"
    )
