"""Small file systems of their own under a run's checkpoints and under its Redis, which can be filled."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

_BLOCK = 2**20
_BALLAST = ".ballast"


class SmallDisk:
    """A file system in memory at a folder. `problem` says why there is none."""

    def __init__(self, folder: Path, mebibytes: int) -> None:
        self._folder = folder
        self.problem = ""
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "forage-chaos", str(folder)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            self.problem = f"no small disk: {error}"
        else:
            if ended.returncode:
                self.problem = f"no small disk (mount needs root): {ended.stderr.strip()}"

    def fill(self) -> None:
        """Take all space that is left."""
        # Unbuffered: what a buffer holds back is refused when the file is closed.
        with (self._folder / _BALLAST).open("ab", buffering=0) as ballast:
            for size in (_BLOCK, 4096, 1):
                with contextlib.suppress(OSError):
                    while ballast.write(b"\0" * size):
                        pass

    def empty(self) -> None:
        """Give it back."""
        (self._folder / _BALLAST).unlink(missing_ok=True)

    def unmount(self) -> None:
        if not self.problem:
            subprocess.run(["umount", "--lazy", str(self._folder)], capture_output=True, check=False)


def flip_bit(file: Path, position: int, bit: int) -> None:
    """Flip one bit of a file in place."""
    with file.open("r+b") as content:
        content.seek(position)
        (value,) = content.read(1)
        content.seek(position)
        content.write(bytes([value ^ 1 << bit]))
        content.flush()
        os.fsync(content.fileno())


def cut_end(file: Path, count: int) -> int:
    """Cut the last bytes off a file, at most all; the number that were cut."""
    size = file.stat().st_size
    kept = max(0, size - count)
    os.truncate(file, kept)
    return size - kept
