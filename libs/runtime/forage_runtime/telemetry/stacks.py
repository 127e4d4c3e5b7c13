"""The Python stacks of a process, written when it gets a signal, also while it is stuck in C code.

Nothing else uses this signal: Ray, vLLM, torchrun and NCCL leave it alone. A process that did not call
`write_stacks_on_signal` would be ended by it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path

FOLDER_VARIABLE = "FORAGE_STACKS"
"""Environment variable with the folder of the files, which child processes inherit; without it stderr is used."""

SIGNAL = signal.SIGUSR1


def find_stack_file(folder: Path, pid: int) -> Path:
    """Return the file that a process appends its stacks to."""
    return folder / f"{pid}.txt"


def write_stacks_on_signal() -> None:
    """Append the stacks of all threads to this process's file, or to stderr, whenever `SIGNAL` arrives."""
    output = sys.stderr
    if folder := os.environ.get(FOLDER_VARIABLE):
        with contextlib.suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
            file = find_stack_file(Path(folder), os.getpid())
            output = file.open("w", encoding="utf-8")  # stays open as long as the process
    with contextlib.suppress(ValueError, OSError, AttributeError):  # stderr may be no file
        faulthandler.register(SIGNAL, output, all_threads=True)
