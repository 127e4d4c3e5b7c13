"""Files of rows that grow together: written in order, synced to the disk once a minute, resumed after a kill."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forage_runtime.files import durable

CHECKPOINT_S = 60.0
"""Longest work that a kill loses. A sync waits for the disk, so more of them would cost speed."""

_PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class RowFile:
    """A file of rows of `row_bytes` each behind a header."""

    name: str
    row_bytes: int
    header: bytes = b""


@dataclass(frozen=True)
class Progress:
    """What a stage had done at its last checkpoint: rows, of how many, in how many seconds of work."""

    done: int
    of: int
    seconds: float


class RowFiles:
    """Appends rows to several files at once, and resumes from those of a killed process.

    Attributes:
        done: number of rows that are written; those since the last checkpoint may be lost by a kill.
    """

    def __init__(self, folder: Path, key: str, rows: int, files: Sequence[RowFile]) -> None:
        """`key` names the content of `rows` rows; files of another key are overwritten."""
        self._folder = folder
        self._key = key
        self._rows = rows
        self._files = tuple(files)
        kept = read_progress(folder, key)
        self.done = kept.done if kept is not None and self._are_long_enough(kept.done) else 0
        self._synced, self._seconds = self.done, kept.seconds if kept is not None and self.done else 0.0
        self._begun = self._checked = time.monotonic()
        self._open = [(folder / file.name).open("r+b" if self.done else "w+b") for file in self._files]
        for file, stream in zip(self._files, self._open, strict=True):
            stream.write(file.header)
            stream.truncate(len(file.header) + self.done * file.row_bytes)
            stream.seek(0, os.SEEK_END)

    def append(self, parts: Mapping[str, bytes | memoryview]) -> None:
        """Append the next rows to every file, and sync them all if the last checkpoint is a minute old.

        Args:
            parts: the bytes of as many rows for each file, by its name.
        """
        (count,) = {len(parts[file.name]) // file.row_bytes for file in self._files}
        for file, stream in zip(self._files, self._open, strict=True):
            stream.write(parts[file.name])
        self.done += count
        if time.monotonic() - self._checked >= CHECKPOINT_S or self.done == self._rows:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Sync all rows: from here on no kill loses them."""
        for stream in self._open:
            stream.flush()
            os.fsync(stream.fileno())
        self._checked = time.monotonic()
        self._synced = self.done
        progress: dict[str, Any] = {"key": self._key, "done": self.done, "of": self._rows}
        progress["seconds"] = round(self._seconds + self._checked - self._begun, 3)
        durable.write_atomically(self._folder / _PROGRESS_FILE, json.dumps(progress))

    def close(self) -> None:
        """Close the files, with a checkpoint: a build that ends with an error or Ctrl-C loses nothing."""
        try:
            if self._synced != self.done:
                self.checkpoint()
        finally:
            for stream in self._open:
                stream.close()

    def _are_long_enough(self, done: int) -> bool:
        for file in self._files:
            path = self._folder / file.name
            if not path.is_file() or path.stat().st_size < len(file.header) + done * file.row_bytes:
                return False
        return True


def read_progress(folder: Path, key: str) -> Progress | None:
    """The last checkpoint of the rows of this key in a folder; None where there is none."""
    try:
        progress = json.loads((folder / _PROGRESS_FILE).read_text(encoding="utf-8"))
        if progress["key"] != key or not progress["done"]:
            return None
        return Progress(int(progress["done"]), int(progress["of"]), float(progress["seconds"]))
    except (FileNotFoundError, KeyError, ValueError):
        return None
