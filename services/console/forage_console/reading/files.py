"""Files of a run that another process writes: read when they have changed, never an error that ends a page."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil
from pydantic_core import from_json
from upath import UPath

from forage_console.context import is_text

Stamp = tuple[int, int, int]
"""Time of the last change in ns, size, number of the file: another stamp is another content. Zeros: there is none."""
NONE: Stamp = (0, 0, 0)

_PROCESSES = "processes.json"
"""File in the folder of a run with the processes of those who started it on one machine."""
Row = dict[str, Any]
T = TypeVar("T")


def read_stamp(file: UPath) -> Stamp:
    """Read the stamp of a file or folder; `NONE` where there is none, or none that can be reached."""
    try:
        state = file.stat()
    except OSError:
        return NONE
    changed = getattr(state, "st_mtime_ns", None) or int(state.st_mtime * 1e9)
    return changed, state.st_size, state.st_ino


def read_changed(stamp: Stamp) -> float | None:
    """Read the time of the last change, in seconds; None of a file that does not exist."""
    return stamp[0] / 1e9 if stamp[0] else None


def read_object(file: UPath) -> tuple[Row | None, str | None]:
    """Read a JSON object: None where there is no file; and the problem of one that cannot be read."""
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except OSError as error:
        return None, describe(file, error)
    try:
        value = from_json(content)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return None, f"{file.name} holds no JSON object: it may be half written"
    return value, None


def describe(file: UPath, error: Exception) -> str:
    """Describe why a file cannot be read, in a clause."""
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error) or repr(error)
    return f"{file.name} cannot be read ({' '.join(reason.split())[:200]})"


def is_alive(folder: UPath) -> bool:
    """Whether the supervisor on this machine that started the services of a run lives."""
    if not isinstance(folder, Path):
        return False
    try:
        supervisor = json.loads((folder / _PROCESSES).read_text(encoding="utf-8"))["supervisor"]
        return psutil.pid_exists(int(supervisor["pid"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return False


def list_names(folder: UPath, suffix: str = "") -> list[str]:
    """List the names in a folder; empty where there is none."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(suffix) and is_text(entry.name))
    except OSError:
        return []


def to_number(value: object) -> float | None:
    """Convert a value of a file to a finite number; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def to_count(value: object, otherwise: int = 0) -> int:
    """Convert a value of a file to a whole number that JavaScript has, too."""
    number = to_number(value)
    return int(number) if number is not None and abs(number) < 2**53 else otherwise


@dataclass
class Cached(Generic[T]):
    """A value that depends on files; computed again when one of them has changed.

    Example:
        self._notes = Cached(lambda: read_notes(file))
        self._notes.get((read_stamp(file),))
    """

    compute: Callable[[], T]
    _stamps: tuple[Stamp, ...] | None = None
    _value: T | None = None

    def get(self, stamps: tuple[Stamp, ...]) -> T:
        if self._stamps != stamps:
            self._value, self._stamps = self.compute(), stamps
        return self._value  # type: ignore[return-value]
